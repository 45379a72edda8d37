"""A trainer that the rollout service does not let in: the run fails with its words, or waits and says what to mend."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from certificates import client, make, serving, tls
from trainer_harness import task
from waiting import eventually

from trainer_service.config import RolloutConfig, SamplingConfig
from trainer_service.rollouts import Assignment, RolloutPool
from turnwire.client.rollout import RolloutClient
from turnwire.errors import PermissionDeniedError, TurnwireError, UnauthenticatedError
from turnwire.serving import ServerConfig


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another CA, with other tokens."""
    return make(tmp_path_factory.mktemp("foreign"))


async def sample(server: Path, security: Any, notices: list[str]) -> None:
    """One trajectory, as a run asks for it."""
    async with (
        serving(ServerConfig(tls=tls(server, "rollout"), tokens=str(server / "tokens.yaml"))) as there,
        RolloutClient(there.address, security) as rollout,
    ):

        async def look() -> None:
            await rollout.get_weight_info()

        async with RolloutPool(rollout, RolloutConfig(), "run", look, notices.append) as pool:
            await pool.sample(Assignment("one", task(), SamplingConfig(), 1))


@pytest.mark.parametrize(
    ("token", "kind", "told"),
    [
        ("foreign/rollout", UnauthenticatedError, "rollout service at .*: the token is not known"),
        ("made/rollout", PermissionDeniedError, "rollout service at .*: Rollout needs the role rollout"),
    ],
    ids=["a token that is not known", "a small role"],
)
async def test_a_token_that_is_refused_ends_the_run_with_the_services_words(
    made: Path, foreign: Path, token: str, kind: type[TurnwireError], told: str
) -> None:
    folder, _, name = token.partition("/")
    file = {"made": made, "foreign": foreign}[folder] / f"{name}.token"
    with pytest.raises(kind, match=told):
        await sample(made, client(made, token_file=str(file)), [])


async def test_a_certificate_that_is_refused_is_waited_for_and_said(made: Path, foreign: Path) -> None:
    notices: list[str] = []
    waiting = asyncio.create_task(sample(made, client(made, "trainer", ca=str(foreign / "ca.crt")), notices))
    await eventually(lambda: notices or waiting.done())
    assert "waiting for the rollout service: " in notices[0]
    assert "its certificate is not vouched for by your `ca`" in notices[0]
    waiting.cancel()
    await asyncio.wait([waiting])
