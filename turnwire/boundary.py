"""The edge of a server: what may come in, and what becomes of errors on the way out.

Each call is asked who it is before its message is looked at, and counted while it runs (`turnwire.security.gate`). What
it raises crosses the wire as `turnwire.errors` says; a bug is logged under an opaque id, and only that id is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf import message as protobuf_message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from turnwire.errors import ConfigError, InvalidRequestError, TurnwireError
from turnwire.handlers import wrapped_handler
from turnwire.security.gate import Context, Gate

logger = logging.getLogger(__name__)

_MESSAGE_BYTES, _PROBLEM_BYTES, _TRAILER_BYTES = 1200, 400, 6500
"""A status travels in the trailers, and gRPC refuses trailers above 8 KiB (by chance, up to 16): the rest is cut."""


_FIRST_MESSAGE_SECONDS = 1.0
"""How long a call that is refused may take to send its first message."""

_PUSHBACK_KEY = "grpc-retry-pushback-ms"


@dataclass(frozen=True)
class _Status(grpc.Status):
    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def status_of(error: TurnwireError) -> grpc.Status:
    """The gRPC status of an error, with its retry delay and field violations as google.rpc details.

    A long message is cut, and of very many violations the first are sent, with the number of the others.
    """
    status = status_pb2.Status(code=error.code.value[0], message=_cut(error.message, _MESSAGE_BYTES))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        _add_detail(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, ConfigError):
        request = error_details_pb2.BadRequest()
        # The message travels twice, percent-encoded and inside the details; those are base64.
        room = (_TRAILER_BYTES - len(urllib.parse.quote(status.message))) * 3 // 4 - status.ByteSize()
        for sent, problem in enumerate(error.problems):
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=_cut(problem.key, _PROBLEM_BYTES), description=_cut(problem.message, _PROBLEM_BYTES)
            )
            room -= violation.ByteSize() + 4
            if room < 0:
                request.field_violations.add(description=f"and {len(error.problems) - sent} more problems")
                break
            request.field_violations.append(violation)
        _add_detail(status, request)
    found = rpc_status.to_status(status)
    if error.retry_after is None:
        return found
    # What clients that retry by service config go by: gRPC itself does not read the details.
    pushback = (_PUSHBACK_KEY, str(int(error.retry_after * 1e3)))
    return _Status(found.code, found.details, (*found.trailing_metadata, pushback))


def _cut(text: str, size: int) -> str:
    """At most `size` bytes of UTF-8, with a mark where something is missing."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= size else data[: size - 3].decode("utf-8", "ignore") + "…"


def _add_detail(status: status_pb2.Status, message: Any) -> None:
    detail = any_pb2.Any()
    detail.Pack(message)
    status.details.append(detail)


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls in through the gate, and turns what they raise into a status, for all four kinds of method."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        try:
            client = self._gate.identify(method, handler_call_details.invocation_metadata)
        except TurnwireError as error:
            return _refusal(error, method)

        def guarded(inner: Callable[..., Any]) -> Callable[..., Any]:
            # A streaming method is an async generator, or a coroutine that reads and writes through its context.
            guard = _guard_stream if inspect.isasyncgenfunction(inner) else _guard_unary
            return guard(inner, method, self._gate, client)

        deserializer = _guard_deserializer(handler.request_deserializer, bool(handler.request_streaming))
        return wrapped_handler(handler, guarded, deserializer)


def _refusal(error: TurnwireError, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that answers with the error, whatever kind the method is: to the client all kinds look the same.

    It lets the first message come, and drops it: a client that is refused while it writes loses the reason.
    """

    async def refuse(requests: Any, context: Context) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_MESSAGE_SECONDS):
                await context.read()
        await _abort(context, error, method)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _guard_deserializer(inner: Callable[[bytes], Any] | None, streaming: bool) -> Callable[[bytes], Any] | None:
    """Bytes that are no message of the method are the client's fault; grpc would call it UNKNOWN, with a traceback."""
    if inner is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return inner(data)
        except protobuf_message.DecodeError as error:
            malformed = InvalidRequestError(f"not a message of this method: {error}")
            if streaming:
                raise malformed from error  # from the handler's own read
            return malformed  # nobody could catch it here; the guard raises it

    return deserialize


def _check_request(request: Any) -> None:
    """Raise what the deserializer of a call with a single request could only return."""
    if isinstance(request, InvalidRequestError):
        raise request


def _guard_unary(inner: Callable[..., Any], method: str, gate: Gate, client: str) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> Any:
        try:
            with gate.admitted(method, context, client):
                _check_request(request)
                return await inner(request, context)
        except Exception as error:  # noqa: BLE001 - the boundary: all that is raised must become a status
            await _abort(context, error, method)

    return call


def _guard_stream(inner: Callable[..., Any], method: str, gate: Gate, client: str) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            with gate.admitted(method, context, client):
                _check_request(request)
                async with contextlib.aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        yield response
        except Exception as error:  # noqa: BLE001 - the boundary: all that is raised must become a status
            await _abort(context, error, method)

    return call


async def _abort(context: Context, error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, TurnwireError):
        await context.abort_with_status(status_of(error))
    opaque = secrets.token_hex(8)
    logger.error("internal error %s in %s", opaque, method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error {opaque}; the service's log has it under this id")
