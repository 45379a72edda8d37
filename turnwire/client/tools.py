"""Client of the tool service: what is there, single calls, and sessions that live as long as a trajectory.

`ToolSession` owns the client's half of the rule that a turn is executed once: each turn has a number, and after a lost
connection the session is opened again with the same key, within its lease, and the unanswered turn is sent again; the
service executes it once and answers it the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
import grpc.aio

from turnwire.client.channel import (
    UNARY_TIMEOUT,
    Backoff,
    ServiceClient,
    duration,
    struct,
    translate,
    translated,
)
from turnwire.errors import (
    CancelledByPeerError,
    ExhaustedError,
    InfraError,
    InvalidRequestError,
    NotFoundError,
    TurnwireError,
    UnavailableError,
    WrongOrderError,
)
from turnwire.security.config import PLAINTEXT, ConnectionSecurity
from turnwire.telemetry import tracing
from turnwire.v1 import common_pb2, tool_pb2, tool_pb2_grpc

if TYPE_CHECKING:
    from turnwire.v1.tool_pb2_grpc import ToolServiceAsyncStub

logger = logging.getLogger(__name__)

Tools = Sequence[str | common_pb2.ToolBinding] | Mapping[str, Mapping[str, Any] | None]
"""Tools of a trajectory: names, bindings, or names with what this task gives each tool (its context)."""

DEFAULT_SILENCE = 900.0
"""Seconds after which a turn without any time limit of its own counts as lost."""

FAREWELL_SECONDS, FAREWELL_SECONDS_AT_END = 120.0, 2.0
"""How long a session that nobody waits for any more is waited for, to close it; and when the client itself closes."""


def bindings(tools: Tools) -> list[common_pb2.ToolBinding]:
    """Tools in any of the forms of `Tools`, as the wire has them."""
    if isinstance(tools, Mapping):
        return [common_pb2.ToolBinding(name=name, context=struct(context)) for name, context in tools.items()]
    if isinstance(tools, str):
        raise InvalidRequestError(f"tools is a list of names, as [{tools!r}]")
    return [common_pb2.ToolBinding(name=tool) if isinstance(tool, str) else tool for tool in tools]


def tool_call(tool: str, /, **arguments: Any) -> tool_pb2.ToolCall:
    """A structured call: `tool_call("python", code="1 + 1")`."""
    return tool_pb2.ToolCall(tool=tool, arguments=struct(arguments))


def text_of(observation: tool_pb2.Observation) -> str:
    """The text parts of an observation, joined."""
    return "".join(part.text for part in observation.content if part.WhichOneof("part") == "text")


class ToolClient(ServiceClient):
    """Asynchronous client of the tool service."""

    service = "turnwire.v1.ToolService"
    title = "tool service"
    balanced = True

    def __init__(self, target: str | grpc.aio.Channel, security: ConnectionSecurity = PLAINTEXT) -> None:
        super().__init__(target, security)
        self._stub: ToolServiceAsyncStub = tool_pb2_grpc.ToolServiceStub(self.channel)
        self._farewells: set[asyncio.Task[None]] = set()

    async def list_tools(self, timeout: float = UNARY_TIMEOUT) -> list[tool_pb2.ToolInfo]:
        """What is registered, and whether it is healthy."""
        answer = await self._unary(self._stub.ListTools(tool_pb2.ListToolsRequest(), timeout=timeout))
        return list(answer.tools)

    async def get_status(self, timeout: float = UNARY_TIMEOUT) -> tool_pb2.GetStatusResponse:
        """Sessions, turns, sandbox pools."""
        return await self._unary(self._stub.GetStatus(tool_pb2.GetStatusRequest(), timeout=timeout))

    async def ask_to_open(self, timeout: float = UNARY_TIMEOUT) -> None:
        """Return if `open` would be let in. Raises UnauthenticatedError or PermissionDeniedError where it would not,
        UnavailableError where nobody can say. Nothing is opened."""
        call = self._stub.Interact(timeout=timeout)
        with contextlib.suppress(InvalidRequestError), translated(self.peer):  # for the Open that does not come
            with contextlib.suppress(grpc.aio.InternalError):  # the call has ended before; `read` has its status
                await call.done_writing()
            await call.read()

    async def execute(
        self,
        tool: str,
        action: str | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        max_observation_bytes: int = 0,
    ) -> tool_pb2.ExecuteResponse:
        """One action with no state kept: `action` is text in the tool's syntax, or give a call's `arguments`.

        `timeout` limits the tool (seconds; unset: the tool's own limit); the call itself waits a little longer. A call
        that a lost connection left unanswered may be executed again.
        """
        if (action is None) == (arguments is None):
            raise InvalidRequestError("give either the action's text or a call's arguments")
        request = tool_pb2.ExecuteRequest(
            tool=common_pb2.ToolBinding(name=tool, context=struct(context)),
            timeout=duration(timeout),
            max_observation_bytes=max_observation_bytes,
        )
        if action is not None:
            request.text = action
        else:
            request.call.CopyFrom(tool_pb2.ToolCall(tool=tool, arguments=struct(arguments)))
        limit = DEFAULT_SILENCE if timeout is None else timeout + UNARY_TIMEOUT
        return await self._unary(self._stub.Execute(request, timeout=limit, metadata=tracing.call_metadata()))

    async def open(
        self,
        trajectory_id: str,
        tools: Tools,
        limits: tool_pb2.TrajectoryLimits | None = None,
        *,
        patience: float = 60.0,
    ) -> ToolSession:
        """Open a trajectory's session; use it with `async with`, or `close` it.

        While the service is full or out of reach, tries again for `patience` seconds. Raises NotFoundError for an
        unknown tool, InvalidRequestError for a context that the tool refuses, AlreadyExistsError for an id that is
        taken, ExhaustedError or UnavailableError when patience is over. Where it is cancelled or gives up while the
        service has not answered, the session is closed as soon as it is there.
        """
        open_message = tool_pb2.Open(
            trajectory_id=trajectory_id, session_key=secrets.token_hex(16), tools=bindings(tools), limits=limits
        )
        session = ToolSession(self._stub, open_message, self.peer)
        try:
            await session._connect(Backoff(patience))
        except (asyncio.CancelledError, UnavailableError):
            if session._unanswered:
                farewell = asyncio.create_task(session.close(FAREWELL_SECONDS))
                self._farewells.add(farewell)
                farewell.add_done_callback(self._farewells.discard)
            raise
        return session

    async def close(self) -> None:
        """Ends all calls of this client, unless the channel was given by the caller."""
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=FAREWELL_SECONDS_AT_END)
        for farewell in self._farewells:
            farewell.cancel()
        await asyncio.gather(*self._farewells, return_exceptions=True)
        await super().close()


class _StreamEndedError(Exception):
    """The stream is gone before the awaited answer came. `error` is its status; None after a clean end."""

    def __init__(self, error: TurnwireError | None) -> None:
        super().__init__(str(error))
        self.error = error


class _Stream:
    """One Interact stream. A task reads it, so that giving up on one answer leaves the stream usable for Close."""

    def __init__(self, stub: ToolServiceAsyncStub, peer: str) -> None:
        self._call = stub.Interact(metadata=tracing.call_metadata())
        self._peer = peer
        self._waiting: asyncio.Future[tool_pb2.InteractResponse | None] | None = None
        self._error: TurnwireError | None = None
        self._closed = False
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for response in self._call:
                if response.HasField("closed"):
                    self._closed = True
                    return
                self._answer(response)
        except grpc.aio.AioRpcError as error:
            self._error = translate(error, self._peer)
        except asyncio.CancelledError:
            pass  # ours: the call was cancelled by `end`
        finally:
            self._answer(None)

    def _answer(self, response: tool_pb2.InteractResponse | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(response)

    @property
    def ended(self) -> bool:
        return self._reader.done()

    async def exchange(self, request: tool_pb2.InteractRequest) -> tool_pb2.InteractResponse:
        """Send, and wait for the next response."""
        self._waiting = asyncio.get_running_loop().create_future()
        if not self.ended:
            try:
                await self._call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await asyncio.wait([self._reader])  # it has the status
        response = None if self.ended and not self._waiting.done() else await self._waiting
        if response is None:
            raise _StreamEndedError(self._error)
        return response

    async def close(self) -> None:
        """Send Close, and wait for Closed. An answer to an abandoned turn that comes before is dropped."""
        self._waiting = None
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader has the status
            await self._call.write(tool_pb2.InteractRequest(close=tool_pb2.Close()))
        await asyncio.wait([self._reader])
        if not self._closed:
            raise _StreamEndedError(self._error)

    async def end(self) -> None:
        """Cancel the call, and wait until nothing of it runs."""
        self._call.cancel()
        await asyncio.wait([self._reader])


class ToolSession:
    """A trajectory at the tool service: its tools, their state, its sandbox. Turns come one after the other.

    What the agent did wrong is in the observations. What `act` raises is never the agent's doing: treat it as failed
    infrastructure, and never learn from it.
    """

    def __init__(self, stub: ToolServiceAsyncStub, open_message: tool_pb2.Open, peer: str) -> None:
        self.trajectory_id = open_message.trajectory_id
        self.turns_done = 0
        """Turns answered."""
        self.lease = 0.0
        """Seconds in which a lost connection can be taken up again."""
        self._stub, self._open, self._peer = stub, open_message, peer
        self._stream: _Stream  # from the first _open_stream on
        self._usable = True
        self._closed = False
        self._unanswered = False
        """Whether an Open is on its way: its session may come to be at any time."""

    async def act(
        self, action: str | Sequence[tool_pb2.ToolCall], timeout: float | None = None
    ) -> tool_pb2.ObservationTurn:
        """Send one turn, and wait for its observations: one a call, in order, and none if the text holds no call.

        `timeout` limits the turn (seconds; unset: the trajectory's `turn_timeout`). Reconnects and sends the turn again
        within the lease. Raises InfraError when the session cannot be taken up again or nothing comes back for much
        longer than the limit; after any error, and after a cancelled turn, the session can only be closed.
        """
        if not self._usable:
            raise WrongOrderError(
                f"the session of {self.trajectory_id} is closed, busy with a turn, or had one that failed"
            )
        turn = tool_pb2.ActionTurn(turn=self.turns_done, traceparent=tracing.recorded())
        if isinstance(action, str):
            turn.text = action
        else:
            turn.calls.calls.extend(action)
        limit = timeout
        if timeout is not None:
            turn.timeout.FromNanoseconds(round(timeout * 1e9))
        elif self._open.limits.HasField("turn_timeout"):
            limit = self._open.limits.turn_timeout.ToTimedelta().total_seconds()
        self._usable = False
        try:
            async with asyncio.timeout(DEFAULT_SILENCE if limit is None else limit + self.lease + UNARY_TIMEOUT):
                observation = await self._answered(tool_pb2.InteractRequest(action=turn))
        except TimeoutError as error:
            raise InfraError(f"{self._peer}: no answer to turn {turn.turn} of {self.trajectory_id}") from error
        if observation.turn != turn.turn:
            raise InfraError(
                f"{self._peer}: turn {turn.turn} of {self.trajectory_id} was answered as {observation.turn}"
            )
        self.turns_done += 1
        self._usable = True
        return observation

    async def _answered(self, request: tool_pb2.InteractRequest) -> tool_pb2.ObservationTurn:
        backoff: Backoff | None = None
        while True:
            try:
                return (await self._stream.exchange(request)).observation
            except _StreamEndedError as ended:
                lost = self._reason(ended)
                if not isinstance(lost, UnavailableError | CancelledByPeerError | ExhaustedError):
                    raise lost from ended
            logger.info("session of %s: %s; taking it up again", self.trajectory_id, lost)
            backoff = backoff or Backoff(self.lease)
            try:
                await backoff.pause(lost)
                await self._connect(backoff)
            except (NotFoundError, UnavailableError, ExhaustedError, CancelledByPeerError) as error:
                raise InfraError(f"the session of {self.trajectory_id} is lost: {error}") from error

    async def _connect(self, backoff: Backoff) -> None:
        """Open the session, or open it again; as long as `backoff` allows while the service is full or out of reach."""
        reason: TurnwireError | None = None
        while True:
            try:
                await self._open_stream(backoff.left())
            except (UnavailableError, ExhaustedError, CancelledByPeerError) as error:
                # An attempt that was cut short by the end of patience says less than the one before.
                reason = reason if reason is not None and not backoff.left() else error
                await backoff.pause(reason)
            else:
                return

    async def _open_stream(self, seconds: float) -> None:
        # A stream whose Open is given up stays until `close`: to end it would leave the session to its lease.
        self._stream = _Stream(self._stub, self._peer)
        self._open.turns_done = self.turns_done
        self._unanswered = True
        try:
            async with asyncio.timeout(seconds):
                response = await self._stream.exchange(tool_pb2.InteractRequest(open=self._open))
        except _StreamEndedError as ended:
            self._unanswered = False
            raise self._reason(ended) from ended
        except TimeoutError as error:
            raise UnavailableError(f"{self._peer}: no answer to Open") from error
        self._unanswered = False
        self.lease = response.opened.lease.ToTimedelta().total_seconds()

    def _reason(self, ended: _StreamEndedError) -> TurnwireError:
        return ended.error or UnavailableError(f"{self._peer}: the stream was ended by the service")

    async def close(self, timeout: float = 10.0) -> None:
        """Release everything the trajectory holds, also a turn that still runs. Idempotent, and never raises what the
        service says: what cannot be closed is released by the service when the lease ends."""
        if self._closed:
            return
        self._closed, self._usable = True, False
        try:
            async with asyncio.timeout(timeout):
                try:
                    await self._stream.close()
                except _StreamEndedError:  # as after a turn that was cancelled while it was sent; another can say Close
                    await self._connect(Backoff(min(2.0, timeout)))
                    await self._stream.close()
        except (TurnwireError, _StreamEndedError, TimeoutError) as error:
            logger.info("session of %s could not be closed and ends with its lease: %s", self.trajectory_id, error)
        finally:
            await self._stream.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
