"""How every Turnwire service is served: one bootstrap for options, error mapping, health, reflection and drain.

A service's `__main__` builds its servicer and awaits `serve`. Errors cross the wire as `turnwire.errors` says; bugs are
logged under an opaque id, and only that id is sent. SIGTERM and SIGINT drain: health turns NOT_SERVING, new calls are
refused as UNAVAILABLE, running ones get `drain_seconds` to finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress
import logging
import secrets
import signal
import sys
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any

import grpc
import grpc.aio
import msgspec
from google.protobuf import any_pb2, duration_pb2
from google.protobuf import message as protobuf_message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from turnwire.errors import ConfigError, InvalidRequestError, Problem, TurnwireError

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 0.5
"""Between two looks at how a service is."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a service listens.

    host, port: the address; port 0 takes a free one and prints it. Plaintext is served on loopback only,
        unless `allow_plaintext_beyond_loopback` says otherwise.
    max_message_bytes: largest message received.
    drain_seconds: how long running calls may go on after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    allow_plaintext_beyond_loopback: bool = False
    max_message_bytes: Annotated[int, msgspec.Meta(ge=65536, le=2**31 - 1)] = 16 * 1024 * 1024
    max_concurrent_rpcs: Annotated[int, msgspec.Meta(ge=1)] = 4096
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] = 10.0

    def __post_init__(self) -> None:
        if not self.allow_plaintext_beyond_loopback and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is not loopback and the traffic is plaintext; "
                "use 127.0.0.1, or set allow_plaintext_beyond_loopback: true if the network is yours alone"
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def channel_options(max_message_bytes: int) -> list[tuple[str, int | str]]:
    """Options that servers and clients share. The server accepts pings as often as the client sends them."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


_MESSAGE_BYTES, _PROBLEM_BYTES, _TRAILER_BYTES = 1200, 400, 6500
"""A status travels in the trailers, and gRPC refuses trailers above 8 KiB (by chance, up to 16): the rest is cut."""


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
    return rpc_status.to_status(status)


def _cut(text: str, size: int) -> str:
    """At most `size` bytes of UTF-8, with a mark where something is missing."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= size else data[: size - 3].decode("utf-8", "ignore") + "…"


def _add_detail(status: status_pb2.Status, message: Any) -> None:
    detail = any_pb2.Any()
    detail.Pack(message)
    status.details.append(detail)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a method raises into a status, for all four kinds of method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[bool(handler.request_streaming), bool(handler.response_streaming)]
        inner: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        # A streaming method is an async generator, or a coroutine that reads and writes through its context.
        wrapped = (_guard_stream if inspect.isasyncgenfunction(inner) else _guard_unary)(inner, method)
        deserializer = _guard_deserializer(handler.request_deserializer, bool(handler.request_streaming))
        return make(wrapped, deserializer, handler.response_serializer)


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


def _guard_unary(inner: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            _check_request(request)
            return await inner(request, context)
        except Exception as error:  # noqa: BLE001 - the boundary: all that is raised must become a status
            await _abort(context, error, method)

    return call


def _guard_stream(inner: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            _check_request(request)
            async with contextlib.aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001 - the boundary: all that is raised must become a status
            await _abort(context, error, method)

    return call


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, TurnwireError):
        await context.abort_with_status(status_of(error))
    opaque = secrets.token_hex(8)
    logger.error("internal error %s in %s", opaque, method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error {opaque}; the service's log has it under this id")


class Server:
    """A gRPC server with health and reflection. Use `serve` in a service's process, this class in tests and tools."""

    def __init__(self, config: ServerConfig, service_names: Sequence[str]) -> None:
        self._config = config
        self._names = [*service_names, ""]
        self.grpc = grpc.aio.server(
            interceptors=[ErrorInterceptor()],
            options=[*channel_options(config.max_message_bytes), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=config.max_concurrent_rpcs,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc)
        self.port = 0

    @property
    def address(self) -> str:
        """host:port as clients use it."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"{host}:{self.port}"

    async def start(self) -> None:
        """Bind and serve. Raises ConfigError if the address cannot be bound."""
        try:
            self.port = self._config.port
            self.port = self.grpc.add_insecure_port(self.address)
        except RuntimeError as error:
            raise ConfigError([Problem("server.port", f"cannot listen on {self.address}: {error}")]) from error
        await self.grpc.start()
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, state)

    async def follow(self, trouble: Callable[[], str]) -> None:
        """Have grpc.health.v1 answer SERVING while `trouble` is empty; log it when it begins and when it is over. Until
        cancelled."""
        told = ""
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            found = trouble()
            if bool(found) != bool(told):
                logger.log(logging.ERROR if found else logging.INFO, "%s", found or f"serving again; it was: {told}")
                told = found
                await self.set_serving(not found)

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Refuse new calls, let running ones finish for `drain_seconds` (default: the config's)."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(self._config.drain_seconds if drain_seconds is None else drain_seconds)


async def serve(server: Server, on_drain: Callable[[], Awaitable[None]] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Prints one line `listening on HOST:PORT` to stdout, which is what a parent process waits for. `on_drain` is awaited
    before running calls are given their time, to stop taking in work.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await server.start()
    sys.stdout.write(f"listening on {server.address}\n")
    sys.stdout.flush()
    await stopped.wait()
    logger.info("draining")
    await server.set_serving(False)
    if on_drain is not None:
        await on_drain()
    await server.stop()


def configure_logging(level: str = "INFO") -> None:
    """Log lines to stderr, for a service's process."""
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
