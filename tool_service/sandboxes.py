"""The service's supply of sandboxes: the configured backend and its warm pool."""

from __future__ import annotations

from tool_service.config import SandboxConfig
from tool_service.sandbox import PoolExhausted, ProcessBackend, ProcessConfig, Sandbox, SandboxError, WarmPool
from turnwire.errors import ExhaustedError
from turnwire.v1 import tool_pb2


class Sandboxes:
    """Takes and discards. `start` before anything else of the service, if there is a tool that needs a sandbox."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._backend = ProcessBackend(
            ProcessConfig(
                minimum_tier=config.minimum_tier,
                interpreter=config.interpreter,
                read_only_paths=config.read_only_paths,
            )
        )
        self._pool = WarmPool(
            self._backend,
            size=config.pool.ready,
            limits=config.limits,
            max_total=config.pool.max,
            max_waiting=config.pool.max_waiting,
            wait_seconds=config.pool.wait_seconds,
        )

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
            self.started = True
        except BaseException:  # cancelled or failed, the backend that has started must not outlive it
            await self.close()
            raise

    async def take(self) -> Sandbox:
        """A fresh sandbox. Raises ExhaustedError when none is free in time."""
        try:
            return await self._pool.take()
        except PoolExhausted as error:
            raise ExhaustedError(f"sandboxes: {error}", retry_after=error.retry_seconds) from error

    async def discard(self, sandbox: Sandbox) -> None:
        """End a sandbox that was taken; all of it is gone when this returns."""
        await self._pool.discard(sandbox)

    async def health(self) -> str:
        """Why no sandbox can be had; empty when one can."""
        stats = self._pool.stats()
        if stats.ready or stats.in_use:
            return ""
        if stats.last_error:
            return f"no sandbox can be made: {stats.last_error}"
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
        await self._pool.close()
        await self._backend.close()
