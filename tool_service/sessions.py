"""All trajectories at the service: who may open one, who drives it, when it is released.

Invariants:

- A session leaves this table only through `release`, which ends when nothing of it is left: running turn, sandbox,
  tools. Releases run in tasks of their own, so that a handler that is cancelled cannot leave one half done.
- Without a stream a session lives for its lease and no longer; with one, it is never silent for longer than the idle
  timeout.
- There are never more than `max_sessions`, those on a lease and those being released among them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from tool_service import wire
from tool_service.config import SessionsConfig, TurnLimits
from tool_service.registry import ToolRegistry
from tool_service.sandbox.patience import LATE_SECONDS, PatientTimer
from tool_service.sandboxes import Sandboxes
from tool_service.session import Counters, Session, Stream
from tool_service.telemetry import ToolMetrics
from tool_service.toolset import Binding, ToolSet
from turnwire.errors import (
    AlreadyExistsError,
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    WrongOrderError,
)
from turnwire.v1 import common_pb2, tool_pb2

logger = logging.getLogger(__name__)

_MAX_ID_BYTES = 1024
_RETRY_SECONDS = 1.0


class Sessions:
    """See the module's docstring."""

    def __init__(
        self,
        config: SessionsConfig,
        limits: TurnLimits,
        registry: ToolRegistry,
        shared: Mapping[str, Any],
        sandboxes: Sandboxes,
    ) -> None:
        """`shared`: by tool name, what its `setup` returned."""
        self.counters = Counters()
        self.metrics: ToolMetrics | None = None
        self.draining = False
        self._config = config
        self._limits = limits
        self._registry = registry
        self._shared = shared
        self._sandboxes = sandboxes
        self._sessions: dict[str, Session] = {}
        self._single_calls = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for silent streams."""
        self._reaper = asyncio.create_task(self._reap())

    # Counts, for GetStatus

    @property
    def most(self) -> int:
        return self._config.max_sessions

    @property
    def leased(self) -> int:
        return sum(session.stream is None for session in self._sessions.values())

    @property
    def open_count(self) -> int:
        return len(self._sessions) - self.leased

    # Life of a session

    async def open(self, message: tool_pb2.Open, stream: Stream) -> tuple[Session, bool]:
        """The session that a stream asks for, and whether it was there before.

        From here on the caller must `detach` the stream when it ends.
        """
        _check_open(message)
        session = self._sessions.get(message.trajectory_id)
        while session is not None and session.releasing is not None:
            await asyncio.shield(session.releasing)
            session = self._sessions.get(message.trajectory_id)
        if session is not None:
            _check_reopen(session, message)
        elif message.turns_done:
            raise NotFoundError(
                f"the session of trajectory {message.trajectory_id!r} is gone: "
                "it was closed, its lease is over, or the service was restarted"
            )
        resumed = session is not None
        if session is None:
            session = self._create(message)
        session.attach(stream)
        try:
            await session.ready()
        except BaseException as error:
            session.detach(stream)
            if isinstance(error, Exception):  # the tools refused their contexts: there is no session
                await asyncio.shield(self.release(session))
            raise
        if self.metrics is not None:
            self.metrics.opened(resumed)
        return session, resumed

    def _create(self, message: tool_pb2.Open) -> Session:
        self._check_room()
        limits = narrowed(self._limits, message.limits)
        tools = self.toolset(message.trajectory_id, message.tools)
        session = Session(message.trajectory_id, message.session_key, tools, limits, self)
        self._sessions[message.trajectory_id] = session
        return session

    def _check_room(self) -> None:
        if self.draining:
            raise UnavailableError("the service is draining: it takes no new trajectories", retry_after=_RETRY_SECONDS)
        if len(self._sessions) + self._single_calls >= self._config.max_sessions:
            raise ExhaustedError(
                f"all {self._config.max_sessions} sessions are in use (sessions.max_sessions)",
                retry_after=_RETRY_SECONDS,
            )

    def toolset(self, trajectory_id: str, bindings: Sequence[common_pb2.ToolBinding]) -> ToolSet:
        """New instances of the tools that a client names. Raises NotFoundError, InvalidRequestError."""
        checked: list[Binding] = []
        for binding in bindings:
            registered = self._registry.get_tool(binding.name)
            if any(other.registered is registered for other in checked):
                raise InvalidRequestError(f"tool {binding.name!r} is bound twice")
            context = registered.context(wire.plain(binding.context))
            checked.append(Binding(registered, context, self._shared.get(binding.name)))
        return ToolSet(trajectory_id, checked, self._sandboxes, self.metrics)

    def lease(self, session: Session) -> PatientTimer:
        """Release the session after the lease, unless the timer is cancelled."""
        return PatientTimer(time.monotonic() + self._config.lease_seconds, lambda: self.release(session))

    def release(self, session: Session) -> asyncio.Task[None]:
        """Begin to release everything that a session holds; the task ends when all is gone."""
        if session.releasing is None:
            session.releasing = self._spawn(self._release(session))
        return session.releasing

    async def _release(self, session: Session) -> None:
        try:
            await session.close()
        finally:
            del self._sessions[session.trajectory_id]

    async def single_call(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a call that keeps no state; it counts as a session. `work` is cancelled with the caller."""
        self._check_room()
        self._single_calls += 1
        self.counters.running += 1
        begin = time.monotonic()
        try:
            await work()
        finally:
            self._single_calls -= 1
            self.counters.running -= 1
            self.counters.total += 1
            if self.metrics is not None:
                self.metrics.turn(time.monotonic() - begin)

    def spawn_release(self, tools: ToolSet) -> asyncio.Task[None]:
        """Release the tools of a single call, whatever becomes of its caller."""
        return self._spawn(tools.close())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reap(self) -> None:
        """End streams that have been silent for too long: one task for all of them, not a timer a turn."""
        idle = self._config.idle_timeout_seconds
        pause = min(max(idle / 10, 0.02), 5.0)
        while True:
            looked_at = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            if now - looked_at - pause > LATE_SECONDS:
                continue  # it was us who stood still: what clients sent meanwhile is still to be read
            latest = now - idle
            for session in list(self._sessions.values()):
                if session.stream is None or session.busy or session.active_at > latest:
                    continue
                session.stream.end(DeadlineError(f"no turn within {idle:g} s (sessions.idle_timeout_seconds)"))
                self.release(session)

    async def close(self) -> None:
        """Release every session. Their streams should have ended."""
        self.draining = True
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
        for session in list(self._sessions.values()):
            self.release(session)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _check_open(message: tool_pb2.Open) -> None:
    for field in ("trajectory_id", "session_key"):
        size = len(getattr(message, field).encode())
        if not 0 < size <= _MAX_ID_BYTES:
            raise InvalidRequestError(f"Open.{field} must have 1 to {_MAX_ID_BYTES} bytes, not {size}")
    if not message.tools:
        raise InvalidRequestError("Open.tools must name at least one tool")


def _check_reopen(session: Session, message: tool_pb2.Open) -> None:
    if session.key != message.session_key:
        raise AlreadyExistsError(f"trajectory {session.trajectory_id!r} is open under another session_key")
    if message.turns_done > session.turns_done:
        raise WrongOrderError(
            f"Open.turns_done is {message.turns_done}, but trajectory {session.trajectory_id!r} "
            f"has had {session.turns_done} turns answered"
        )
    names = [binding.name for binding in message.tools]
    if names != session.tools.names:
        raise WrongOrderError(
            f"trajectory {session.trajectory_id!r} was opened with tools {session.tools.names}, not {names}"
        )


def narrowed(limits: TurnLimits, asked: tool_pb2.TrajectoryLimits) -> TurnLimits:
    """The limits of one trajectory. Raises InvalidRequestError for more than the service's."""
    changes: dict[str, Any] = {}
    for name, field in (("max_observation_bytes", "observation_bytes"), ("max_calls_per_turn", "calls_per_turn")):
        value = getattr(asked, name)
        if value > getattr(limits, field):
            raise InvalidRequestError(f"limits.{name} is {value}; this service allows {getattr(limits, field)}")
        if value:
            changes[field] = value
    if asked.HasField("turn_timeout"):
        seconds = wire.seconds_of(asked.turn_timeout, "limits.turn_timeout")
        if seconds > limits.max_turn_timeout_seconds:
            raise InvalidRequestError(
                f"limits.turn_timeout is {seconds:g} s; this service allows {limits.max_turn_timeout_seconds:g} s"
            )
        changes["turn_timeout_seconds"] = seconds
    return msgspec.structs.replace(limits, **changes) if changes else limits
