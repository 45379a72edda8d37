"""A rollout service that the tool service does not let in says so at once, refuses what needs tools, and recovers."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from certificates import client, make, tls
from rollout_harness import Running, reason, rollouts, script, tool_server
from tiny_models import TINY, make_model
from waiting import PATIENCE, eventually

from turnwire.client.rollout import rollout_task
from turnwire.config import dump, parse_yaml
from turnwire.errors import WrongOrderError
from turnwire.v1 import rollout_pb2 as pb

POLICY = script("<echo>x</echo>", "<answer>1</answer>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=TINY)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tool service knows."""
    made = make(tmp_path_factory.mktemp("right"))
    shutil.copy(made / "ca.crt", made / "known.crt")
    return made


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another CA, with other tokens."""
    return make(tmp_path_factory.mktemp("foreign"))


@pytest.fixture
def shown(right: Path, tmp_path: Path) -> Path:
    """What the rollout service has: a copy, to be changed. It knows services by `known.crt`."""
    return Path(shutil.copytree(right, tmp_path / "shown"))


def settings(server: Path, shown: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a tool service, and of a rollout service as its client."""
    tools = {"tls": parse_yaml(dump(tls(server, "tool"))), "tokens": str(server / "tokens.yaml")}
    return tools, parse_yaml(dump(client(shown, "rollout", ca=str(shown / "known.crt"))))


async def health_is(running: Running, wanted: bool) -> None:
    """Wait for it."""

    async def found() -> bool:
        return await running.client.is_healthy() is wanted

    await eventually(found)


def with_a_tool(name: str) -> pb.RolloutTask:
    return rollout_task(name, "q", ["echo"], answer_tags=("<answer>", "</answer>"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"rollout.token": "foreign/rollout.token"}, "tool service at .*: the token is not known"),
        ({"rollout.token": "right/viewer.token"}, "tool service at .*: Interact needs the role tool"),
        ({name: f"foreign/{name}" for name in ("client.crt", "client.key")}, "a certificate of yours"),
        ({"known.crt": "foreign/ca.crt"}, "its certificate is not vouched for by your `ca`"),
    ],
    ids=["a token that is not known", "a small role", "a stranger's certificate", "a service of another CA"],
)
async def test_what_the_tool_service_refuses_is_told_at_once_and_is_over_when_it_is_mended(
    folder: Path, right: Path, foreign: Path, shown: Path, wrong: dict[str, str], told: str
) -> None:
    for name, source in wrong.items():
        place, _, file = source.partition("/")
        shutil.copy({"right": right, "foreign": foreign}[place] / file, shown / name)
    server, security = settings(right, shown)
    async with (
        tool_server(server=server) as (_, address),
        rollouts(folder, POLICY, tools=False, tool_target=address, client=security) as running,
    ):
        assert not await running.client.is_healthy()
        with pytest.raises(WrongOrderError, match=f"the tool service refuses the rollout service: .*{told}"):
            await running.run(with_a_tool("refused"))
        _, trajectory = await running.one(rollout_task("without tools", "q"))
        assert reason(trajectory) == "FINAL_ANSWER"

        for name in wrong:
            shutil.copy(right / name, shown / name)
        await health_is(running, True)
        _, trajectory = await running.one(with_a_tool("let in"))
        assert reason(trajectory) == "FINAL_ANSWER"


async def test_a_token_that_is_taken_away_is_told_from_the_first_trajectory_on_that_it_fails(
    folder: Path, right: Path, foreign: Path, shown: Path, tmp_path: Path
) -> None:
    here = Path(shutil.copytree(right, tmp_path / "here"))
    server, security = settings(here, shown)
    async with (
        tool_server(server=server) as (_, address),
        rollouts(folder, POLICY, tools=False, tool_target=address, client=security) as running,
    ):
        assert await running.client.is_healthy()
        shutil.copy(foreign / "tokens.yaml", here / "tokens.yaml")
        async with asyncio.timeout(PATIENCE):  # files are looked at once a second
            while reason((await running.one(with_a_tool("taken away")))[1]) != "INFRA_ERROR":
                pass
        await health_is(running, False)
        with pytest.raises(WrongOrderError, match="the token is not known"):
            await running.run(with_a_tool("refused"))


async def test_a_tool_service_that_is_away_is_no_refusal(folder: Path) -> None:
    async with tool_server() as (_, address):
        pass
    async with rollouts(folder, POLICY, tools=False, tool_target=address) as running:
        assert await running.client.is_healthy()
        assert not running.service.trouble
