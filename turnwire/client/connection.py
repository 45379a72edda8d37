"""`connect_async`: clients of the services that are named, ready for use."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from turnwire.client.channel import ServiceClient
from turnwire.client.rollout import RolloutClient
from turnwire.client.tools import ToolClient
from turnwire.client.trainer import TrainerClient
from turnwire.errors import InvalidRequestError
from turnwire.security.config import PLAINTEXT, ConnectionSecurity


def missing(name: str) -> InvalidRequestError:
    """What is raised for a client of a service whose address was not given."""
    return InvalidRequestError(f"connect was given no address for {name}; call connect({name}='host:port')")


class AsyncConnection:
    """Clients of the services whose addresses were given. Use it with `async with`, which waits until they serve."""

    def __init__(
        self,
        tools: str | None,
        rollout: str | None,
        trainer: str | None,
        timeout: float,
        security: ConnectionSecurity = PLAINTEXT,
    ) -> None:
        if not (tools or rollout or trainer):
            raise InvalidRequestError("give the address of at least one service: tools=, rollout= or trainer=")
        self._targets = (tools, rollout, trainer)
        self._timeout, self._security = timeout, security
        self._tools: ToolClient | None = None
        self._rollout: RolloutClient | None = None
        self._trainer: TrainerClient | None = None

    @property
    def tools(self) -> ToolClient:
        """Client of the tool service."""
        if self._tools is None:
            raise missing("tools")
        return self._tools

    @property
    def rollout(self) -> RolloutClient:
        """Client of the rollout service."""
        if self._rollout is None:
            raise missing("rollout")
        return self._rollout

    @property
    def trainer(self) -> TrainerClient:
        """Client of the trainer service."""
        if self._trainer is None:
            raise missing("trainer")
        return self._trainer

    def _clients(self) -> list[ServiceClient]:
        return [client for client in (self._tools, self._rollout, self._trainer) if client is not None]

    async def __aenter__(self) -> Self:
        tools, rollout, trainer = self._targets
        try:
            self._tools = ToolClient(tools, self._security) if tools else None
            self._rollout = RolloutClient(rollout, self._security) if rollout else None
            self._trainer = TrainerClient(trainer, self._security) if trainer else None
            for client in self._clients():
                await client.wait_until_ready(self._timeout)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all channels."""
        for client in self._clients():
            await client.close()


def connect_async(
    *,
    tools: str | None = None,
    rollout: str | None = None,
    trainer: str | None = None,
    security: ConnectionSecurity = PLAINTEXT,
    timeout: float = 10.0,
) -> AsyncConnection:
    """Asynchronous clients for `host:port` addresses: `async with turnwire.connect_async(tools=…) as there:`.

    `security`: how the services are known, and what is shown to them; without it, plaintext.
    Raises UnavailableError, on entering, if a service does not serve within `timeout` seconds.
    """
    return AsyncConnection(tools, rollout, trainer, timeout, security)
