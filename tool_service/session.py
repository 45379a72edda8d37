"""One trajectory at the service: its turns, in order, each executed once.

Invariants:

- A turn runs in a task of the session's own, not in the handler of the stream that brought it: a client that is cut off
  finds its answer when it comes back within the lease.
- A turn's number is its identity. While a turn runs, its number waits for its answer and every other is refused at
  once. Between turns, the number of the last answered turn gets that answer again; every other but the next is refused.
- At most one stream drives a session. A new one ends the old one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

import grpc.aio
from opentelemetry.trace import Span

from tool_service.config import TurnLimits
from tool_service.parsers import MAX_CALLS
from tool_service.sandbox.patience import PatientTimer
from tool_service.telemetry import ToolMetrics
from tool_service.toolset import ToolSet
from tool_service.wire import seconds_of
from turnwire.enums import short_name
from turnwire.errors import InvalidRequestError, TakenOverError, TurnwireError, WrongOrderError
from turnwire.telemetry import tracing
from turnwire.v1 import common_pb2, tool_pb2


class Counters:
    """Turns of the whole service."""

    def __init__(self) -> None:
        self.running = 0
        self.total = 0


WRITE_SECONDS = 1.0
"""How long a stream that is to end may still hang in a write, because its client does not read."""


TurnTask: TypeAlias = "asyncio.Task[tool_pb2.InteractResponse | TurnwireError]"
"""A turn, running or over. A turn that was refused gives the error rather than raising it."""


class Stream:
    """The stream that drives a session: what its handler reads and writes through, and how others end it."""

    def __init__(
        self,
        task: asyncio.Task[Any],
        read: Callable[[], Awaitable[Any]],
        write: Callable[[tool_pb2.InteractResponse], Awaitable[None]],
    ) -> None:
        """`task`: the handler's."""
        self._task = task
        self._read = read
        self._write = write
        self._ahead: asyncio.Future[Any] | None = None
        self.writing = False
        self.error: TurnwireError | None = None
        """Why somebody else ended it."""

    async def read(self, turn: TurnTask | None = None) -> Any:
        """The next message, or grpc's EOF.

        Given a turn that runs, waits for its end, too: None when it is over before a message came. The end of the
        stream is then told only after the turn. A read that was begun cannot be given up without losing what it reads,
        so it is kept for the next call.
        """
        if turn is None and self._ahead is None:
            return await self._read()
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(self._read())
        if turn is not None:
            await asyncio.wait((turn, self._ahead), return_when=asyncio.FIRST_COMPLETED)
            if not turn.done() and self._ahead.result() is grpc.aio.EOF:
                await asyncio.wait((turn,))
            if turn.done():
                return None
        ahead, self._ahead = self._ahead, None
        return await ahead

    def stop_reading(self) -> None:
        """Its handler has ended."""
        if self._ahead is not None:
            self._ahead.cancel()

    async def write(self, response: tool_pb2.InteractResponse) -> None:
        """Send. Raises the error with which the stream was ended meanwhile."""
        self.writing = True
        await self._write(response)
        self.writing = False
        if self.error is not None:
            raise self.error

    def end(self, error: TurnwireError) -> None:
        """Make its handler raise `error`. grpc cannot send a status while a message is being sent, so a write is first
        given time; then the handler is cancelled, and the client learns nothing."""
        if self.error is not None:
            return
        self.error = error
        if self.writing:
            asyncio.get_running_loop().call_later(WRITE_SECONDS, self._task.cancel)
        else:
            self._task.cancel()


class Owner(Protocol):
    """What a session tells the one who keeps it."""

    counters: Counters
    metrics: ToolMetrics | None

    def lease(self, session: Session) -> PatientTimer:
        """Release the session after the lease, unless the timer is cancelled."""


class Session:
    """See the module's docstring. Made and released by `Sessions`."""

    def __init__(self, trajectory_id: str, key: str, tools: ToolSet, limits: TurnLimits, owner: Owner) -> None:
        self.trajectory_id = trajectory_id
        self.key = key
        self.tools = tools
        self.turns_done = 0
        self.stream: Stream | None = None
        self.active_at = time.monotonic()
        """When the session last answered; on the monotonic clock."""
        self.releasing: asyncio.Task[None] | None = None
        self._limits = limits
        self._owner = owner
        self._running: TurnTask | None = None
        self._answered: TurnTask | None = None
        """The last one."""
        self._lease: PatientTimer | None = None
        self._ready: asyncio.Task[TurnwireError | None] = asyncio.create_task(self._reset())

    @property
    def busy(self) -> bool:
        """Whether the client waits for us, rather than we for the client."""
        return self._running is not None or not self._ready.done()

    async def _reset(self) -> TurnwireError | None:
        try:
            await self.tools.reset()
        except TurnwireError as error:
            return error
        finally:
            self.active_at = time.monotonic()
        return None

    async def ready(self) -> None:
        """Wait until the tools are reset. Raises what a tool says against its context."""
        error = await asyncio.shield(self._ready)
        if error is not None:
            raise error

    def attach(self, stream: Stream) -> None:
        """Let a stream drive this session; the one that did ends with TakenOverError."""
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        if self.stream is not None:
            self.stream.end(TakenOverError(f"another stream has taken over trajectory {self.trajectory_id!r}"))
        self.stream = stream
        self.active_at = time.monotonic()

    def detach(self, stream: Stream) -> None:
        """The stream has ended. Unless another one drives the session, its lease begins."""
        if self.stream is not stream:
            return
        self.stream = None
        if self.releasing is None:
            self._lease = self._owner.lease(self)

    def act(self, action: tool_pb2.ActionTurn) -> TurnTask:
        """Begin a turn, or find the one of that number. It is not the caller's to cancel.

        Raises WrongOrderError for a turn that is not possible now.
        """
        number = action.turn
        if self._running is None and self._answered is not None and number == self.turns_done - 1:
            self.active_at = time.monotonic()
            return self._answered
        if number != self.turns_done:
            state = f"the next is {self.turns_done}" if self._running is None else f"turn {self.turns_done} is running"
            raise WrongOrderError(f"turn {number} of trajectory {self.trajectory_id!r} is out of order: {state}")
        if self._running is None:
            self._running = asyncio.create_task(self._turn(action, self._seconds(action)))
        return self._running

    def _seconds(self, action: tool_pb2.ActionTurn) -> float:
        if action.WhichOneof("action") is None:
            raise InvalidRequestError(f"turn {action.turn} has neither text nor calls")
        if not action.HasField("timeout"):
            return self._limits.turn_timeout_seconds
        return min(seconds_of(action.timeout, "ActionTurn.timeout"), self._limits.max_turn_timeout_seconds)

    async def _turn(self, action: tool_pb2.ActionTurn, seconds: float) -> tool_pb2.InteractResponse | TurnwireError:
        counters, metrics = self._owner.counters, self._owner.metrics
        counters.running += 1
        begin = time.monotonic()
        try:
            response = tool_pb2.InteractResponse()
            answer = response.observation
            answer.turn = action.turn
            with tracing.child("execute", action.traceparent) as span:
                await run_action(self.tools, action, seconds, self._limits, answer)
                if span.is_recording():
                    _describe(span, answer)
            elapsed = time.monotonic() - begin
            answer.elapsed.nanos, answer.elapsed.seconds = int(elapsed % 1 * 1e9), int(elapsed)
            if metrics is not None:
                metrics.turn(elapsed)
            self._answered = self._running
            self.turns_done += 1
            counters.total += 1
        except TurnwireError as error:
            return error
        else:
            return response
        finally:
            self._running = None
            self.active_at = time.monotonic()
            counters.running -= 1

    async def close(self) -> None:
        """Stop what runs and release what is held. Never raises; by `Sessions.release` only."""
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        tasks = [task for task in (self._running, self._ready) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.tools.close()
        self._answered = None


def _describe(span: Span, answer: tool_pb2.ObservationTurn) -> None:
    found = answer.observations
    errors = [short_name(common_pb2.ErrorKind, one.error) for one in found if one.error]
    tracing.describe(span, turn=answer.turn, tools=[one.tool for one in found])
    if errors:
        tracing.describe(span, errors=errors)


async def run_action(
    tools: ToolSet,
    action: tool_pb2.ActionTurn | tool_pb2.ExecuteRequest,
    seconds: float,
    limits: TurnLimits,
    answer: tool_pb2.ObservationTurn | tool_pb2.ExecuteResponse,
) -> None:
    """Find the calls in an action, whichever form it has, and execute them into `answer`."""
    kind = action.WhichOneof("action")
    if kind == "text":
        size = len(action.text) if action.text.isascii() else len(action.text.encode())
        if size > limits.action_bytes:
            observation = answer.observations.add(call_id="0", error=common_pb2.ERROR_KIND_INVALID_ACTION)
            text = f"invalid action: it is {size} bytes long; at most {limits.action_bytes} are read"
            observation.content.add().text = text
            observation.full_bytes = len(text)
            return
        actions = tools.actions_in_text(action.text)
    elif isinstance(action, tool_pb2.ActionTurn):
        if len(action.calls.calls) > MAX_CALLS:
            raise InvalidRequestError(f"a turn of {len(action.calls.calls)} calls; at most {MAX_CALLS} are read")
        actions = [tools.action_of_call(call) for call in action.calls.calls]
    else:
        actions = [tools.action_of_call(action.call)]
    if actions:
        await tools.run(
            answer.turn if isinstance(answer, tool_pb2.ObservationTurn) else 0, actions, seconds, limits, answer
        )
