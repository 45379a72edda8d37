"""The rollout service's side of the tool service: what it has, whether it lets us in, and one trajectory's session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Sequence

from rollout_service.task import Task, TaskRefusedError
from turnwire.client.tools import ToolClient
from turnwire.config import nearest
from turnwire.errors import InvalidRequestError, NotFoundError, TurnwireError
from turnwire.v1 import tool_pb2

logger = logging.getLogger(__name__)

DIRECTORY_SECONDS = 30.0

RING_SECONDS, RING_TIMEOUT = 2.0, 5.0
"""Between two looks at whether a tool service that was away, or refused us, lets us in; and how long one may take."""


class ToolDirectory:
    """The tool service as it is known here.

    Stop strings by tool are asked for again after a while: a tool service may come back with another config. Whether it
    lets us in is asked at start, and again after each failure: a token, a role or a certificate that it refuses is not
    a trajectory's failure, and no trajectory with tools can be had before it is mended.
    """

    def __init__(self, client: ToolClient) -> None:
        self._client = client
        self._stops: dict[str, tuple[str, ...]] = {}
        self._asked_at = -DIRECTORY_SECONDS
        self._lock = asyncio.Lock()
        self._refusal = ""
        self._doubted = asyncio.Event()
        self._doorbell: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> str:
        """Why the tool service lets us do nothing, and what to do about it; empty where it does, or is not there."""
        if not self._refusal:
            return ""
        return (
            f"the tool service refuses the rollout service: {self._refusal}. Mend `client` in the rollout service's "
            "config, the files that it names (they are read again when they change), or what the tool service accepts"
        )

    async def start(self) -> None:
        """Ask whether we are let in, until `close`."""
        known = await self._ring()
        self._doorbell = asyncio.create_task(self._watch_door(known))

    async def close(self) -> None:
        """Ask no more."""
        if self._doorbell is not None:
            self._doorbell.cancel()
            await asyncio.wait([self._doorbell])

    def doubt(self) -> None:
        """Something failed: ask whether we are still let in."""
        self._doubted.set()

    async def _watch_door(self, known: bool) -> None:
        while True:
            if known:
                await self._doubted.wait()
            else:
                await asyncio.sleep(RING_SECONDS)
            self._doubted.clear()
            known = await self._ring()

    async def _ring(self) -> bool:
        """Whether we are let in now. `trouble` is up to date afterwards."""
        try:
            await self._client.ask_to_open(RING_TIMEOUT)
        except TurnwireError as error:
            self._refusal = await self._client.refusal(error)
            return False
        self._refusal = ""
        return True

    async def stop_strings(self, names: Sequence[str]) -> tuple[str, ...]:
        """Of these tools, each once. Raises TaskRefusedError for a tool that is not there."""
        async with self._lock:
            if time.monotonic() - self._asked_at > DIRECTORY_SECONDS or any(name not in self._stops for name in names):
                await self._ask(names)
        for name in names:
            if name not in self._stops:
                raise TaskRefusedError(f"unknown tool {name!r}; {nearest(name, list(self._stops))}")
        return tuple(dict.fromkeys(text for name in names for text in self._stops[name]))

    async def _ask(self, names: Sequence[str]) -> None:
        try:
            tools = await self._client.list_tools()
        except TurnwireError as error:
            self.doubt()
            if any(name not in self._stops for name in names):
                raise
            logger.warning("the tool service does not say what it has, so what it had stands: %s", error)
        else:
            self._stops = {tool.name: tuple(tool.stop_strings) for tool in tools}
        self._asked_at = time.monotonic()


class TrajectoryTools:
    """One trajectory's session at the tool service. It is opened while the first action is generated, so it costs no
    time; `close` in any case.

    Clients choose trajectory ids that are unique on their stream alone, so the session's id has a part of its own.
    """

    def __init__(self, client: ToolClient, task: Task) -> None:
        limits = tool_pb2.TrajectoryLimits()
        limits.turn_timeout.FromNanoseconds(round(task.limits.tool_timeout * 1e9))
        session_id = f"{task.trajectory_id}~{secrets.token_hex(4)}"
        self._opening = asyncio.create_task(client.open(session_id, list(task.tools), limits))

    async def act(self, text: str) -> tool_pb2.ObservationTurn:
        """One turn. Raises TaskRefusedError where the session was refused, a TurnwireError when the turn cannot be
        had: never the agent's doing."""
        try:
            session = await asyncio.shield(self._opening)
        except (InvalidRequestError, NotFoundError) as error:
            raise TaskRefusedError(error.message) from error
        return await session.act(text)

    async def close(self) -> None:
        """Release everything that the trajectory holds, also a turn that still runs, and a session that is not open
        yet: the client closes that one by itself."""
        self._opening.cancel()
        with contextlib.suppress(asyncio.CancelledError, TurnwireError):  # not opened: nothing to close here
            session = await self._opening
            await session.close()
