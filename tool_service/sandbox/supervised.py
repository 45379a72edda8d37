"""One sandbox, seen from the service: a byte stream to its supervisor, whatever carries it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from tool_service.sandbox.base import (
    GRACE_SECONDS,
    JSON,
    FileRefused,
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxUnavailable,
    Turn,
    TurnResult,
    TurnStatus,
)
from tool_service.sandbox.inside import frames
from tool_service.sandbox.patience import PatientTimer

_READY_SECONDS = 30.0
_FILE_SECONDS = 60.0
_GONE_SECONDS = 30.0
_PING_SECONDS = 1.0
_RESET_SECONDS = 10.0


class _Answer(msgspec.Struct):
    """A supervisor's header; which fields are set depends on the request."""

    ready: bool = False
    over: bool = False
    failed: str = ""
    error: str = ""
    status: TurnStatus = TurnStatus.INFRA
    detail: str = ""
    exit_code: int | None = None
    signal: int | None = None
    stdout: int = 0
    stderr: int = 0
    total: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    restarted: bool = False


class _Lost(Exception):  # noqa: N818 - says what is the case
    """The connection ended before the answer."""


class _TooLate(Exception):  # noqa: N818 - says what is the case
    """No answer within the deadline."""


def _too_late(future: asyncio.Future[tuple[_Answer, bytes]]) -> None:
    if not future.done():
        future.set_exception(_TooLate())


class SupervisedSandbox(Sandbox, asyncio.Protocol):
    """`request_kill(id)` asks the backend, which must call `gone` when nothing is left. `own_death` is
    the status of a turn whose sandbox died by itself: where a program cannot reach its supervisor it is our failure.
    `why_silent(id)` says what, other than a program, keeps a supervisor from answering; empty if nothing does.
    `ask_for_cause(id, seconds)` finds out whether a sandbox that died by itself within the last `seconds` had run out
    of memory: its program's doing, whichever process the kernel has chosen. `begin_again` is what a supervisor is told
    that begins anew after a reset."""

    def __init__(
        self,
        sandbox_id: str,
        request_kill: Callable[[str], None],
        own_death: TurnStatus,
        why_silent: Callable[[str], Awaitable[str]] | None = None,
        ask_for_cause: "Callable[[str, float], asyncio.Future[bool]] | None" = None,
        *,
        begin_again: bytes = b"",
    ) -> None:
        self.id = sandbox_id
        self._request_kill = request_kill
        self._why_silent = why_silent
        self._ask_for_cause = ask_for_cause
        self._begin_again = begin_again
        self._out_of_memory: asyncio.Future[bool] | None = None
        """Whether it died of that: asked for when it had died, until a turn has been told."""
        self._early: _Answer | None = None
        """What was said before anybody listened: that it is ready, or why not, while its starter was still busy."""
        self._heard = 0.0
        """When it last said something."""
        self._own_death = own_death
        self._decoder = frames.Decoder()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[_Answer, bytes]] | None = None
        self._lost = False
        self._kill_asked = False
        self._infra = False
        self._why_not_gone = ""
        self._gone = asyncio.Event()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        try:
            self._decoder.feed(data)
            while (frame := self._decoder.next()) is not None:
                self._take_in(msgspec.json.decode(frame[0], type=_Answer), frame[1])
        except (frames.FrameError, msgspec.DecodeError):
            self._infra = True
            self._drop()

    def _take_in(self, answer: _Answer, blob: bytes) -> None:
        if answer.over:  # a process of it does not die, and that is the program's doing
            self._own_death = TurnStatus.SESSION_LOST
            self._drop()
        elif self._answer is None:
            self._early = answer
        elif not self._answer.done():
            self._answer.set_result((answer, blob))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._ask_for_cause and self._heard and not (self._kill_asked or self._infra):
            self._out_of_memory = self._ask_for_cause(self.id, time.monotonic() - self._heard)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_Lost())

    # life

    @property
    def alive(self) -> bool:
        return not self._lost and not self._kill_asked

    def gone(self, infra: bool, why_not: str = "") -> None:
        """Nothing of it is left; or, with `why_not`, nobody can tell for now. `infra`: the backend died, not just this
        sandbox."""
        self._infra = self._infra or infra
        self._why_not_gone = why_not
        self._drop()
        self._gone.set()

    def _drop(self) -> None:
        self._lost = True
        if self._transport is not None:
            self._transport.abort()

    def _abort(self) -> None:
        """Begin to kill, without waiting."""
        if not self._kill_asked:
            self._kill_asked = True
            if not self._gone.is_set():
                self._request_kill(self.id)
            self._drop()

    async def kill(self) -> None:
        self._abort()
        try:
            await asyncio.wait_for(self._gone.wait(), _GONE_SECONDS)
        except TimeoutError as error:
            raise SandboxError(f"sandbox {self.id} is not gone after {_GONE_SECONDS:g} s") from error
        if self._why_not_gone:
            raise SandboxError(f"sandbox {self.id} may not be gone: {self._why_not_gone}")

    async def wait_ready(self) -> None:
        """Until the supervisor says so. Raises `SandboxUnavailable`."""
        try:
            answer = self._early or (await self._ask(None, b"", _READY_SECONDS))[0]
        except (_Lost, _TooLate) as error:
            raise SandboxUnavailable(f"the sandbox did not start: {type(error).__name__.strip('_')}") from error
        if not answer.ready:
            raise SandboxUnavailable(f"the sandbox could not be made: {answer.failed}")

    async def _ask(self, header: dict[str, Any] | None, blob: bytes, seconds: float) -> tuple[_Answer, bytes]:
        """Send a request (None: only listen) and wait for the answer, `seconds` at most. A late timer loses against an
        answer that is already here. Cancelling it kills the sandbox."""
        if self._lost or self._transport is None:
            raise _Lost
        if self._answer is not None:
            raise RuntimeError(f"sandbox {self.id} is busy: calls must not overlap")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[_Answer, bytes]] = loop.create_future()
        self._answer = future
        timer = PatientTimer(loop.time() + seconds, lambda: _too_late(future))
        try:
            if header is not None:
                self._transport.write(frames.encode(header, blob))
            return await future
        except asyncio.CancelledError:
            self._abort()
            raise
        finally:
            timer.cancel()
            self._answer = None

    # work

    async def run(self, turn: Turn) -> TurnResult:
        begun = time.monotonic()
        header = {
            "op": "turn",
            "runtime": turn.runtime,
            "payload": turn.payload,
            "timeout": turn.timeout,
            "cpu_seconds": turn.cpu_seconds,
            "output_bytes": turn.output_bytes,
        }
        try:
            answer, blob = await self._ask(header, b"", turn.timeout + GRACE_SECONDS)
        except (frames.FrameError, TypeError, ValueError) as error:
            return TurnResult(TurnStatus.INFRA, detail=f"the turn cannot be sent: {error}")
        except _TooLate:
            wall = time.monotonic() - begun
            why = await self._why_silent(self.id) if self._why_silent else ""
            self._abort()
            if why:
                return TurnResult(TurnStatus.INFRA, wall_seconds=wall, detail=why)
            return TurnResult(
                TurnStatus.TIMEOUT,
                wall_seconds=wall,
                detail="the supervisor did not answer in time; the whole sandbox was killed",
            )
        except _Lost:
            wall = time.monotonic() - begun
            return TurnResult(await self._status_of_loss(), wall_seconds=wall, detail="the sandbox is gone")
        stdout, stderr = blob[: answer.stdout], blob[answer.stdout : answer.stdout + answer.stderr]
        status, detail = answer.status, answer.detail
        value: JSON = None
        raw = blob[answer.stdout + answer.stderr :]
        if raw:
            try:
                value = msgspec.json.decode(raw)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                status, detail = TurnStatus.SESSION_LOST, "the worker's value is not JSON"
                self._abort()
        return TurnResult(
            status=status,
            stdout=stdout,
            stderr=stderr,
            value=value,
            exit_code=answer.exit_code,
            signal=answer.signal,
            truncated=answer.total > len(stdout) + len(stderr),
            total_bytes=answer.total,
            wall_seconds=answer.wall,
            cpu_seconds=answer.cpu,
            restarted=answer.restarted,
            detail=detail,
        )

    async def _status_of_loss(self) -> TurnStatus:
        if self._infra:
            return TurnStatus.INFRA
        if self._kill_asked:
            return TurnStatus.SESSION_LOST
        if self._out_of_memory is not None and await asyncio.shield(self._out_of_memory):
            self._out_of_memory, self._own_death = None, TurnStatus.SESSION_LOST  # for the turns after this one
            return TurnStatus.MEMORY
        return self._own_death

    async def put_file(self, path: str, data: bytes) -> None:
        await self._file({"op": "put", "path": path}, data)

    async def get_file(self, path: str, max_bytes: int) -> bytes:
        return await self._file({"op": "get", "path": path, "max_bytes": max_bytes}, b"")

    async def ping(self) -> bool:
        try:
            await self._ask({"op": "ping"}, b"", _PING_SECONDS)
        except (_Lost, _TooLate):
            self._abort()
            return False
        return True

    async def reset(self) -> str:
        try:
            answer, _ = await self._ask({"op": "reset"}, b"", _RESET_SECONDS)
            if answer.error or self._transport is None:
                return answer.error
            self._transport.write(self._begin_again)
            answer, _ = await self._ask(None, b"", _READY_SECONDS)
        except (_Lost, _TooLate):
            self._abort()
            return "the sandbox is gone"
        return answer.failed

    async def _file(self, header: dict[str, Any], data: bytes) -> bytes:
        try:
            answer, blob = await self._ask(header, data, _FILE_SECONDS)
        except (_Lost, _TooLate) as error:
            self._abort()
            raise SandboxError(f"sandbox {self.id} is gone") from error
        if answer.error:
            raise FileRefused(f"{header['path']!r}: {answer.error}")
        return blob


def limits_as_dict(limits: SandboxLimits) -> dict[str, Any]:
    """For the far side, which has no msgspec."""
    return {name: getattr(limits, name) for name in limits.__struct_fields__}
