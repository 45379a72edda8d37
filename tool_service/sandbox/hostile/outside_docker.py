"""The same for the docker backend: an engine's own word on which containers there are."""

from __future__ import annotations

from typing import ClassVar

from tool_service.sandbox.base import SandboxBackend
from tool_service.sandbox.docker import DockerBackend
from tool_service.sandbox.docker_config import endpoint_of
from tool_service.sandbox.docker_container import OWNER
from tool_service.sandbox.docker_engine import Engine
from tool_service.sandbox.hostile.outside import Outside


class OutsideOfEngine(Outside):
    """Over a connection of its own, so that the backend's own books are not what is asked."""

    slack: ClassVar[dict[str, int]] = {**Outside.slack, "descriptors": 12}
    """An engine's client keeps a few connections open, one a thread at most."""

    def __init__(self, backend: SandboxBackend) -> None:
        if not isinstance(backend, DockerBackend):
            raise TypeError(f"{backend.name} has no engine")
        self._endpoint = endpoint_of(backend.config)
        self._engine = Engine(self._endpoint, 1, backend.config.control_seconds)
        self._owner = backend.facts["owner"]

    async def start(self) -> None:
        await self._engine.connect()

    async def look(self) -> dict[str, int]:
        label = {"label": f"{OWNER}={self._owner}"}
        found = await self._engine.call(self._engine.client.containers, all=True, filters=label)
        return {**await super().look(), "containers": len(found)}

    def processes_of(self, uid: int) -> list[int]:
        """Of an engine elsewhere they cannot be seen, and users of that number here are others."""
        return super().processes_of(uid) if self._endpoint.unix_path else []

    def close(self) -> None:
        self._engine.close()
