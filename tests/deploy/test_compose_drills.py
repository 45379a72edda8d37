"""The stack of docker-compose.yml trains with Docker sandboxes, and goes on while its parts are replaced and fail."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import docker.errors
import pytest
from compose_stack import SERVICES, Stack, WatchedRun, demo, eventually, run_in
from docker.models.containers import Container

from trainer_service.ledger import audit
from turnwire.client.trainer import TrainerClient
from turnwire.errors import UnauthenticatedError

pytestmark = [pytest.mark.needs("stack"), pytest.mark.timeout(3600)]

PROMPTS, GROUP = 2, 8
"""Of a step of the runs here, and trajectories of each: as few as keep every service at work."""
IN_FLIGHT = 2 * PROMPTS * GROUP
"""Most trajectories at once: with `max_staleness: 1` those of two steps."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    with stack.up(*SERVICES):
        yield stack
    assert not stack.containers(), "the stack is down, and these are left"


def test_the_demo_trains_inside_the_stack_with_sandboxes_of_the_engine(stack: Stack) -> None:
    done = stack.turnwire(
        *("train", "configs/demo.yaml", "training.steps=3", f"training.prompts_per_step={PROMPTS}"),
        *("evaluation.before=false", "evaluation.after=false"),
        *("--target", f"localhost:{stack.port}", "--run-id", "demo"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "step 3/3" in done.stdout
    images = {sandbox.image.tags[0] for sandbox in stack.sandboxes()}
    assert images == {"turnwire/sandbox-python:1"}
    ledger = stack.summary("demo")["ledger"]
    assert ledger["trained"] + ledger["filtered"] == 3 * PROMPTS * GROUP
    assert not ledger["failed"]


async def test_who_shows_no_token_may_ask_nothing(stack: Stack) -> None:
    async with TrainerClient(f"localhost:{stack.port}", stack.security(token=None)) as client:
        await client.wait_until_ready()
        with pytest.raises(UnauthenticatedError):
            await client.list_runs()


@pytest.mark.needs("prometheus")
def test_the_stacks_prometheus_reads_all_three_services(stack: Stack) -> None:
    stack.compose("up", "--detach", "--no-deps", "prometheus")
    stack.healthy("prometheus")

    def targets() -> dict[str, str]:
        url = f"http://localhost:{stack.prometheus_port}/api/v1/targets"
        with urllib.request.urlopen(url, timeout=60) as answer:
            found = json.load(answer)["data"]["activeTargets"]
        return {target["labels"]["job"]: target["health"] for target in found}

    eventually(lambda: targets() == dict.fromkeys(SERVICES, "up"))


CUT_SECONDS = 8.0
MANY_STEPS = 1000
"""More than there is time for between the first drill and the last."""


async def replaced(stack: Stack, run: WatchedRun, service: str) -> None:
    """A service that drains fails nothing, but for what the tool service has in flight when its time is over."""
    before = run.infra_failures
    await asyncio.to_thread(stack.replace, service)
    if service == "trainer":  # which counts from 0 again
        before = 0
        await run.watch_again()
    await run.goes_on()
    assert run.infra_failures - before <= (IN_FLIGHT if service == "tool" else 0)


async def killed(stack: Stack, run: WatchedRun, service: str) -> None:
    await asyncio.to_thread(stack.kill, service)
    await run.goes_on()


async def paused(stack: Stack, run: WatchedRun, service: str) -> None:
    """So long that its peers give the connections up."""
    container, told = stack.container(service), len(run.events)
    await asyncio.to_thread(pause, container)
    try:
        await run.until(lambda: f"waiting for the {service} service" in run.notices(told))
    finally:
        container.unpause()
    await run.goes_on()


def pause(container: Container) -> None:
    """runc leaves a busy container as it was when it is not frozen in time."""

    def frozen() -> bool:
        try:
            container.pause()
        except docker.errors.APIError as error:
            if "unable to freeze" not in str(error):
                raise
            return False
        return True

    eventually(frozen)


async def cut_off(stack: Stack, run: WatchedRun, service: str) -> None:
    """As if the cable was pulled, between two steps and for a while."""
    container = stack.container(service)
    stack.network.disconnect(container)
    try:
        await asyncio.sleep(CUT_SECONDS)
    finally:
        stack.network.connect(container, aliases=[service])
    await run.goes_on()


DRILLS = [
    *((replaced, service) for service in SERVICES),
    *((killed, service) for service in SERVICES),
    (cut_off, "tool"),
    (paused, "rollout"),
]


async def test_a_run_goes_on_while_services_are_replaced_killed_paused_and_cut_off(
    stack: Stack, tmp_path: Path
) -> None:
    async with run_in(stack, "drills", demo(MANY_STEPS, PROMPTS)) as run:
        await run.goes_on(1)
        for drill, service in DRILLS:
            await drill(stack, run, service)
        steps = await run.stop()
    add_up(stack, tmp_path, "drills", steps)
    for service in SERVICES:
        stack.healthy(service)


@pytest.mark.alone
@pytest.mark.needs("engine-restart")
async def test_a_run_goes_on_when_the_engine_itself_is_restarted(stack: Stack, tmp_path: Path) -> None:
    steps = 8
    async with run_in(stack, "engine", demo(steps, PROMPTS)) as run:
        await run.goes_on(1)
        command = os.environ["TURNWIRE_RESTART_ENGINE"]
        await asyncio.to_thread(subprocess.run, command, shell=True, check=True, timeout=180)
        await run.watch_again()
        await run.finished()
    assert "it goes on from its last checkpoint" in run.notices()
    add_up(stack, tmp_path, "engine", steps)


def add_up(stack: Stack, folder: Path, run_id: str, steps: int) -> None:
    """Each trajectory of a run that has ended is in the books once, in one state, and none has failed."""
    ledger, trajectories = folder / "ledger.jsonl", steps * PROMPTS * GROUP
    ledger.write_bytes(stack.file(run_id, "ledger.jsonl"))
    books = audit(ledger)
    assert not books["twice"]
    assert books["counts"].get("trained", 0) + books["counts"].get("filtered", 0) == trajectories, books
    assert sum(books["counts"].values()) == trajectories, books
