"""A tool service on each sandbox backend that this machine has, and turns of one trajectory as an agent sees them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

import docker_harness
import pytest
import tool_harness as harness
from google.protobuf import duration_pb2
from tool_harness import Service, Trajectory, binding

from turnwire.v1 import tool_pb2

BACKENDS = [
    pytest.param("process", marks=pytest.mark.needs("isolated-sandbox")),
    pytest.param("docker", marks=pytest.mark.needs("docker")),
]

_numbers = itertools.count()


@contextlib.asynccontextmanager
async def service_on(backend: str, **sections: Any) -> AsyncIterator[Service]:
    """The tools that work in files and processes, on a backend."""
    sandbox: dict[str, Any] = {"backend": backend, "pool": {"ready": 2}}
    if backend == "docker":
        sandbox |= {
            "docker": docker_harness.as_dict(docker_harness.docker_config()),
            "owner": docker_harness.new_owner(),
        }
    config = harness.config_of(exclude=("sql",), sandbox={**sandbox, **sections.pop("sandbox", {})}, **sections)
    async with harness.running(config) as running:
        yield running


async def turns(
    service: Service, tool: str, *actions: str, context: Mapping[str, Any] | None = None, seconds: int = 20
) -> list[tool_pb2.Observation]:
    """Actions of one trajectory, a turn each."""
    trajectory = Trajectory(service, f"{tool}-{next(_numbers)}")
    await trajectory.open(binding(tool, context))
    said = []
    for turn, action in enumerate(actions):
        answer = await trajectory.act(
            turn, f"<{tool}>{action}</{tool}>", timeout=duration_pb2.Duration(seconds=seconds)
        )
        said.append(answer.observations[0])
    await trajectory.close()
    return said
