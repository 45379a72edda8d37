"""How every Turnwire client reaches its service: channel options, retries, timeouts, errors.

- A status of the service is raised as the class of `turnwire.errors` that it stands for, with the retry delay and the
  problems of a config that travelled with it (`translate`).
- Unary calls that are safe to repeat are retried by gRPC itself when the service cannot be reached or ends, and never
  wait longer than their timeout. Streams are resumed by the clients that know how (tool sessions, watching a run).
- Keepalive pings find a peer that is silently gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf import duration_pb2, struct_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from turnwire.client.handshake import why_refused
from turnwire.client.secured import SecuredChannel
from turnwire.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    PermissionDeniedError,
    Problem,
    TurnwireError,
    UnauthenticatedError,
    UnavailableError,
    error_class,
)
from turnwire.security.config import PLAINTEXT, ConnectionSecurity, shown_to_all
from turnwire.serving import channel_options

T = TypeVar("T")

UNARY_TIMEOUT = 30.0
"""Seconds a unary call may take, with its retries, where the method names no other limit."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message a client takes."""

_RETRIED = {
    "turnwire.v1.ToolService": ("ListTools", "Execute", "GetStatus"),
    "turnwire.v1.RolloutService": ("Score", "GetWeightInfo", "Pause", "Resume", "GetServerInfo"),
    "turnwire.v1.TrainerService": ("StartRun", "GetRun", "ListRuns", "StopRun"),
}

_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": service, "method": name} for service, names in _RETRIED.items() for name in names],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                # CANCELLED is what a call sees that reaches a service in the moment in which it ends.
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}

_LOST_WHILE_WRITING = "Internal error from Core"
"""What grpc.aio makes of a write that found the stream gone, whatever the reason; the true status is lost with it."""

_NO_ANSWER, _NOT_SERVING = "nothing came back in time", "it says"

_DETAILS_KEY = "grpc-status-details-bin"


def open_channel(
    target: str,
    security: ConnectionSecurity = PLAINTEXT,
    *,
    balanced: bool = False,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel to `host:port`. It connects when first used, and again whenever the connection is lost.

    Call it where an event loop runs; the channel belongs to that loop. Raises InvalidRequestError for what is not an
    address, and for a token that would travel in plaintext; ConfigError for files of `security` that cannot be used.
    `balanced`: where the name stands for several addresses, each call goes to the next one; else all go to the first.
    """
    if not target or target.startswith(":") or ":" not in target or " " in target:
        raise InvalidRequestError(f"{target!r} is not an address; write host:port, as 127.0.0.1:50051")
    balancing: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]} if balanced else {}
    options = [
        *channel_options(max_message_bytes),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG | balancing)),
        # A service that restarts is found again within seconds; gRPC's own limit is two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if security == PLAINTEXT:
        return grpc.aio.insecure_channel(target, options)
    if problem := shown_to_all(target, security):
        raise InvalidRequestError(problem)
    if security.server_name is not None:
        options.append(("grpc.ssl_target_name_override", security.server_name))

    def make(credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(target, options)
        return grpc.aio.secure_channel(target, credentials, options)

    return SecuredChannel(security, make)


class FailedCall(Protocol):
    """What `translate` reads of a failed call: `grpc.aio.AioRpcError` has it."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def translate(error: FailedCall, peer: str = "") -> TurnwireError:
    """The error of `turnwire.errors` that a status stands for. `peer` names the service in the message."""
    details, retry_after, problems = error.details() or error.code().name, None, []
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY:
            continue
        status = status_pb2.Status.FromString(value)
        for detail in status.details:
            retry, request = error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
            if detail.Unpack(retry):
                retry_after = retry.retry_delay.ToTimedelta().total_seconds()
            elif detail.Unpack(request):
                problems += [Problem(item.field, item.description) for item in request.field_violations]
    if error.code() is grpc.StatusCode.INTERNAL and details == _LOST_WHILE_WRITING:
        return UnavailableError(f"{peer}: the stream was lost while sending" if peer else "lost while sending")
    if problems:
        return ConfigError(problems, details.partition("\n")[0].rpartition(": ")[0] or "config")
    kind = error_class(error.code())
    if peer and issubclass(kind, UnavailableError | DeadlineError | UnauthenticatedError | PermissionDeniedError):
        details = f"{peer}: {details}"
    return kind(details, retry_after=retry_after)


@contextlib.contextmanager
def translated(peer: str = "") -> Iterator[None]:
    """Raises what gRPC raises inside as an error of `turnwire.errors`."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise translate(error, peer) from error


class Backoff:
    """Delays between attempts until a point in time: doubling from 50 ms to 2 s, with jitter."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._delay = 0.05

    def left(self) -> float:
        """Seconds left for further attempts."""
        return max(0.0, self._until - time.monotonic())

    async def pause(self, error: TurnwireError) -> None:
        """Sleep before the next attempt; raises `error` when that would be too late."""
        delay = error.retry_after if error.retry_after is not None else self._delay
        delay *= random.uniform(0.75, 1.25)
        self._delay = min(2.0, self._delay * 2)
        if delay >= self.left():
            raise error
        await asyncio.sleep(delay)


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """Seconds as the wire has them."""
    if seconds is None:
        return None
    result = duration_pb2.Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


def struct(values: Mapping[str, Any] | None) -> struct_pb2.Struct | None:
    """JSON values as the wire has them. Raises InvalidRequestError for what is not JSON."""
    if values is None:
        return None
    result = struct_pb2.Struct()
    try:
        result.update(values)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"only JSON values can be sent: {error} in {dict(values)!r}") from error
    return result


class ServiceClient:
    """What the three clients have in common. `target` is `host:port`, or a channel that the caller closes; `security`
    is for the former."""

    service = ""
    """Full name of the gRPC service."""
    title = "service"
    """What messages to people call it."""
    balanced = False
    """Whether any replica can serve any call."""

    def __init__(self, target: str | grpc.aio.Channel, security: ConnectionSecurity = PLAINTEXT) -> None:
        self._owns_channel = isinstance(target, str)
        self.target, self._security = target if isinstance(target, str) else "", security
        self.channel = open_channel(target, security, balanced=self.balanced) if isinstance(target, str) else target
        self.peer = f"{self.title} at {self.target}" if self.target else self.title
        self._health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def _unary(self, call: Awaitable[T]) -> T:
        with translated(self.peer):
            return await call

    async def is_healthy(self, timeout: float = 5.0) -> bool:
        """Whether the service says that it is serving (grpc.health.v1). False also when it cannot be reached."""
        return not await self._trouble(timeout)

    async def _trouble(self, timeout: float) -> str:
        """Why the service does not serve us; empty if it does."""
        request = health_pb2.HealthCheckRequest(service=self.service)
        try:
            answer = await self._health.Check(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return _NO_ANSWER if late else error.details() or error.code().name
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return ""
        return f"{_NOT_SERVING} {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"

    async def wait_until_ready(self, timeout: float = 30.0) -> None:
        """Return as soon as the service serves. Raises UnavailableError after `timeout` seconds."""
        end, reason = time.monotonic() + timeout, _NO_ANSWER
        while trouble := await self._trouble(max(0.1, min(2.0, end - time.monotonic()))):
            reason = reason if trouble == _NO_ANSWER else trouble
            if time.monotonic() > end:
                does = "serves" if reason.startswith(_NOT_SERVING) else "answers"
                where = self.target or "this channel"
                advice = await self._why_refused() or "is it running? `turnwire up` starts all three services here"
                raise UnavailableError(f"no {self.title} {does} at {where}: {reason}; {advice}")
            await asyncio.sleep(0.05)

    async def refusal(self, error: TurnwireError) -> str:
        """Why the service will never do what this client asks, where a call's error means that: tokens, roles,
        certificates. Empty where the error may pass by itself."""
        if isinstance(error, UnauthenticatedError | PermissionDeniedError):
            return error.message
        reason = await self._why_refused() if isinstance(error, UnavailableError) else ""
        return f"{self.peer}: {reason}" if reason else ""

    async def _why_refused(self) -> str:
        return await why_refused(self.target, self._security) if self.target else ""

    async def close(self) -> None:
        """Ends all calls of this client, unless the channel was given by the caller."""
        if self._owns_channel:
            await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


async def call_error(call: Any, peer: str) -> TurnwireError:
    """The error of a stream that ended: for a write that found it finished."""
    code = await call.code()
    metadata = await call.trailing_metadata()
    details = await call.details()
    if code is grpc.StatusCode.OK:
        return UnavailableError(f"{peer}: the stream was ended by the service")
    return translate(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=details), peer)


async def translated_stream(call: Any, peer: str) -> AsyncIterator[Any]:
    """The messages of a stream, with its status raised as an error of `turnwire.errors`."""
    with translated(peer):
        async for message in call:
            yield message
