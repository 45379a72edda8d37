"""The service's supply of sandboxes: the configured backend, its warm pool, and the search for leftovers."""

from __future__ import annotations

import asyncio
import logging

from tool_service.config import SandboxConfig
from tool_service.sandbox import (
    PoolExhausted,
    PoolStats,
    ProcessBackend,
    ProcessConfig,
    Sandbox,
    SandboxBackend,
    SandboxError,
    WarmPool,
)
from turnwire.errors import ExhaustedError
from turnwire.v1 import tool_pb2

logger = logging.getLogger(__name__)

_RENEW_SECONDS = 1.0
"""Between two looks at whether sandboxes are alive, and can be had."""


def backend_of(config: SandboxConfig) -> SandboxBackend:
    """The configured backend, not started yet. Raises SandboxUnavailable for settings that cannot be."""
    if config.backend == "docker":
        from tool_service.sandbox.docker import DockerBackend  # noqa: PLC0415 - its SDK is heavy

        return DockerBackend(config.docker, owner=config.owner)
    return ProcessBackend(
        ProcessConfig(
            minimum_tier=config.minimum_tier,
            interpreter=config.process.interpreter,
            read_only_paths=config.process.read_only_paths,
        )
    )


class Sandboxes:
    """Takes and discards. `start` before anything else of the service, if there is a tool that needs a sandbox."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._backend = backend_of(config)
        self._pool = WarmPool(
            self._backend,
            size=config.pool.ready,
            limits=config.limits,
            max_total=config.pool.max,
            max_waiting=config.pool.max_waiting,
            wait_seconds=config.pool.wait_seconds,
            recycle=config.pool.policy == "recycle",
        )
        self._upkeep: list[asyncio.Task[None]] = []
        self.started = False

    @property
    def tier(self) -> str:
        """What this machine gives, as "isolated"."""
        return self._backend.tier.name.lower()

    async def start(self) -> None:
        """Raises SandboxUnavailable when the machine gives less than the configured tier."""
        await self._backend.start()
        try:
            await self._pool.start()
            self._upkeep = [asyncio.create_task(self._sweep()), asyncio.create_task(self._renew())]
            self.started = True
        except BaseException:  # cancelled or failed, the backend that has started must not outlive it
            await self.close()
            raise

    async def _sweep(self) -> None:
        """Until cancelled. Services of this owner can die while this one lives."""
        while True:
            await asyncio.sleep(self._config.sweep_seconds)
            try:
                await self._backend.sweep()
            except SandboxError as error:
                logger.warning("leftovers could not be looked for: %s", error)

    async def _renew(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            self._pool.renew()

    async def take(self) -> Sandbox:
        """A fresh sandbox. Raises ExhaustedError when none is free in time."""
        try:
            return await self._pool.take()
        except PoolExhausted as error:
            raise ExhaustedError(f"sandboxes: {error}", retry_after=error.retry_seconds) from error

    async def discard(self, sandbox: Sandbox) -> None:
        """Give back a sandbox that was taken: nothing of its use is left when this returns."""
        await self._pool.discard(sandbox)

    def pool_stats(self) -> PoolStats:
        """How the pool is."""
        return self._pool.stats()

    @property
    def trouble(self) -> str:
        """Why no further sandbox can be had, as far as is known; empty when nothing speaks against it."""
        stats = self._pool.stats()
        return f"no sandbox can be made: {stats.last_error}" if stats.last_error and not stats.ready else ""

    async def health(self) -> str:
        """Why no sandbox can be had; empty when one can."""
        stats = self._pool.stats()
        if self.trouble or stats.ready or stats.in_use:
            return self.trouble
        try:
            await self.discard(await self.take())
        except (ExhaustedError, SandboxError) as error:
            return f"no sandbox can be had: {error}"
        return ""

    def status(self) -> tool_pb2.SandboxPoolStatus:
        """For GetStatus."""
        pool, backend = self._pool.stats(), self._backend.stats()
        return tool_pb2.SandboxPoolStatus(
            backend=self._backend.name,
            tier=self.tier,
            ready=pool.ready,
            in_use=pool.in_use,
            max=self._config.pool.max,
            waiting=pool.waiting,
            created_total=backend.created,
            leaks_removed_total=backend.leaked_removed,
        )

    async def close(self) -> None:
        """End every sandbox and the backend."""
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        await self._pool.close()
        await self._backend.close()
