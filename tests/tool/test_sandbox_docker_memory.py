"""A container without room for its own supervisor: the kernel ends that, and it is told, at once and as what it is."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from docker_harness import containers, foreign_container, new_owner, python, running_backend, until
from waiting import PATIENCE

from tool_service.sandbox import SandboxError, SandboxLimits, SandboxUnavailable, TurnStatus, docker_container
from tool_service.sandbox.base import MIB
from tool_service.sandbox.docker_config import DockerConfig, endpoint_of
from tool_service.sandbox.docker_engine import Engine, EngineError

pytestmark = pytest.mark.needs("docker")

LARGE = f"x = '{'x' * (15 * MIB)}'"
"""A turn that a supervisor has in its hands several times over."""


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cgroup with little more than a supervisor needs to be there: what comes beside it ends it, rather than the
    pages of its program going in and out of memory."""
    monkeypatch.setattr(docker_container, "memory_bytes", lambda limits: 28 * MIB)


@pytest.mark.usefixtures("no_room")
async def test_memory_that_costs_the_supervisor_its_life_is_the_programs_failure_and_no_hang() -> None:
    """The kernel may choose it although a worker is to go first: where that is dying already, and not yet gone."""
    async with running_backend() as backend:
        sandbox = await backend.create(SandboxLimits())
        result = await python(sandbox, LARGE)
        assert (result.status, result.detail) == (TurnStatus.MEMORY, "the sandbox is gone")
        assert not sandbox.alive
        assert (await python(sandbox, "1")).status is TurnStatus.SESSION_LOST
        with pytest.raises(SandboxError, match="is gone"):
            await sandbox.get_file("x", 1)
        assert await until(lambda: backend.stats().running == 0)
        another = await backend.create(SandboxLimits())
        assert (await python(another, "6 * 7")).stdout == b"42\n"


@pytest.mark.usefixtures("no_room")
async def test_a_file_that_costs_the_supervisor_its_life_is_told() -> None:
    async with running_backend() as backend:
        sandbox = await backend.create(SandboxLimits())
        with pytest.raises(SandboxError, match="is gone"):
            async with asyncio.timeout(40):  # sooner than a file is given up
                await sandbox.put_file("x", bytes(45 * MIB))


async def test_a_supervisor_that_cannot_even_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = new_owner()
    async with running_backend(owner) as backend:
        monkeypatch.setattr(docker_container, "memory_bytes", lambda limits: 8 * MIB)
        with pytest.raises(SandboxUnavailable, match=r"did not start|could not be made"):
            async with asyncio.timeout(PATIENCE):
                await backend.create(SandboxLimits())
        assert await until(lambda: containers(owner) == [])


async def test_a_container_that_is_killed_has_not_run_out_of_memory_because_it_once_had() -> None:
    engine = Engine(endpoint_of(DockerConfig()), creations=1, seconds=10)
    await engine.connect()
    greedy = "python3 -c 'b\"x\" * (1 << 30)'; exec sleep 600"
    try:
        with foreign_container({}, greedy, mem_limit="64m", memswap_limit="64m") as container:
            known = False
            while not known:
                with contextlib.suppress(EngineError):  # it knows nothing yet
                    known = await engine.ran_out_of_memory(container.name, 60)
            since = time.monotonic()
            await asyncio.to_thread(container.remove, force=True)
            assert not await engine.ran_out_of_memory(container.name, time.monotonic() - since)
            assert await engine.ran_out_of_memory(container.name, 60)
    finally:
        engine.close()
