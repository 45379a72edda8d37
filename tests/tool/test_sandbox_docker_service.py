"""The whole tool service on the docker backend: turns over gRPC, status, recycling, drain."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from docker_harness import as_dict, containers, docker_config, new_owner
from tool_harness import Service, Trajectory, config_of, error_of, eventually, running, texts

from turnwire.client import ToolClient

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
        assert pool.created_total >= 4
    assert containers(owner) == []


async def test_a_container_that_is_killed_is_our_failure_and_never_the_agents() -> None:
    owner = new_owner()
    async with running(config_of(exclude=(), sandbox=sandbox_section(owner, pool={"ready": 0}))) as service:
        trajectory = Trajectory(service)
        await trajectory.open("python")
        await trajectory.act(0, "<python>x = 1</python>")
        (container,) = containers(owner)
        process = await asyncio.create_subprocess_exec("docker", "kill", container, stdout=asyncio.subprocess.DEVNULL)
        await process.wait()
        await eventually(lambda: containers(owner) == [])
        answer = await trajectory.act(1, "<python>'x' in globals()</python>")
        assert error_of(answer.observations[0]) == "INFRA"
        await trajectory.close()
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


async def test_a_drained_service_ends_its_containers(tmp_path: Path) -> None:
    owner = new_owner()
    config = tmp_path / "tool.yaml"
    config.write_text(yaml.safe_dump({"server": {"port": 0}, "sandbox": sandbox_section(owner)}))
    service = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tool_service", "--config", str(config)), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert service.stdout is not None
    target = (await service.stdout.readline()).decode().removeprefix("listening on ").strip()
    async with ToolClient(target) as client:
        sessions = await asyncio.gather(*(client.open(f"t{i}", ["python"]) for i in range(3)))
        await asyncio.gather(*(session.act("<python>x = 1</python>") for session in sessions))
        assert len(containers(owner)) >= 3
        service.send_signal(signal.SIGTERM)
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
    assert await service.wait() == 0
    await eventually(lambda: containers(owner) == [])
