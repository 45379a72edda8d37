"""The whole tool service on the docker backend: turns over gRPC, status, recycling, drain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from docker_harness import as_dict, containers, docker_config, new_owner
from tool_harness import Service, Trajectory, config_of, running, texts

pytestmark = pytest.mark.needs("docker")

ROOT = Path(__file__).resolve().parents[2]


def sandbox_section(owner: str, **changes: Any) -> dict[str, Any]:
    section = {"backend": "docker", "docker": as_dict(docker_config()), "owner": owner, "pool": {"ready": 1}}
    return {**section, **changes}


async def act(service: Service, name: str, *programs: str) -> list[str]:
    """The answers to a trajectory's turns."""
    trajectory = Trajectory(service, name)
    await trajectory.open("python")
    answers = [texts(await trajectory.act(turn, f"<python>{code}</python>")) for turn, code in enumerate(programs)]
    await trajectory.close()
    return [text for (text,) in answers]


async def test_trajectories_run_in_containers_of_their_own_and_leave_none() -> None:
    owner = new_owner()
    async with running(config_of(exclude=(), sandbox=sandbox_section(owner))) as service:
        answers = await asyncio.gather(*(act(service, f"t{i}", f"x = {i}", "x + 1") for i in range(3)))
        assert [answer[1] for answer in answers] == ["1", "2", "3"]
        (pool,) = (await service.status()).pools
        assert (pool.backend, pool.tier, pool.in_use) == ("docker", "isolated", 0)
        assert pool.created_total >= 3
    assert containers(owner) == []


async def test_a_recycling_service_uses_a_container_again() -> None:
    owner = new_owner()
    section = sandbox_section(owner, pool={"ready": 1, "max": 1, "policy": "recycle"})
    async with running(config_of(exclude=(), sandbox=section)) as service:
        before = containers(owner)
        for number in range(3):
            assert await act(service, f"t{number}", "'x' in globals()", "x = 1") == ["False", ""]
        assert containers(owner) == before
    assert containers(owner) == []
