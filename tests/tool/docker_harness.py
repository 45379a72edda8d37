"""What tests of the docker backend share: an accepted configuration, turns, and a look at the engine from outside."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import docker
import msgspec
from waiting import PATIENCE

from tool_service.sandbox import Sandbox, Turn, TurnResult
from tool_service.sandbox.docker import DockerBackend
from tool_service.sandbox.docker_config import DockerConfig
from tool_service.sandbox.docker_container import OWNER
from tool_service.sandbox.docker_runtime import runc_version


@functools.cache
def client() -> docker.DockerClient:
    return docker.from_env()


@functools.cache
def accepted_runtime() -> str:
    """This engine's runc, whatever its number: what runs in these tests is our own."""
    return runc_version(client().version())


def docker_config(**changes: Any) -> DockerConfig:
    return DockerConfig(**{"accept_runtime_version": accepted_runtime(), **changes})


def new_owner() -> str:
    """So that tests that run beside each other see their own containers alone."""
    return f"test-{secrets.token_hex(6)}"


@contextlib.asynccontextmanager
async def running_backend(owner: str = "", **changes: Any) -> AsyncIterator[DockerBackend]:
    """A started backend. Nothing of it may be left afterwards."""
    owner = owner or new_owner()
    backend = DockerBackend(docker_config(**changes), owner=owner)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()
    assert containers(owner) == []


def containers(owner: str) -> list[str]:
    """Ids of what the engine has of an owner, in whatever state."""
    listed = client().api.containers(all=True, filters={"label": f"{OWNER}={owner}"})
    return [container["Id"] for container in listed]


def container_of(sandbox: Sandbox) -> Any:
    return client().containers.get(f"turnwire-sandbox-{sandbox.id}")


async def python(sandbox: Sandbox, code: str, seconds: float = PATIENCE) -> TurnResult:
    return await sandbox.run(Turn("python", {"code": code}, seconds))


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether a condition that is looked up in a thread comes true in time."""
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


@contextlib.contextmanager
def foreign_container(labels: dict[str, str], script: str = "exec sleep 600", **options: Any) -> Iterator[Any]:
    """Somebody else's, made of the same image, doing nothing."""
    command = ["sh", "-c", script]
    made = client().containers.run(
        DockerConfig().image, command, labels=labels, detach=True, network_mode="none", stop_signal="SIGKILL", **options
    )
    try:
        yield made
    finally:
        with contextlib.suppress(docker.errors.NotFound):
            made.remove(force=True)


def as_dict(config: DockerConfig) -> dict[str, Any]:
    """As a service's configuration has it."""
    found: dict[str, Any] = msgspec.to_builtins(config)
    return found
