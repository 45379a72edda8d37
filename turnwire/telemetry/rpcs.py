"""Calls of a server, counted by method and code, and their spans.

Only methods that the server has: a name that a client makes up is not counted, so that labels are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from prometheus_client import Counter, Gauge, Histogram

from turnwire.handlers import wrapped_handler
from turnwire.telemetry import tracing
from turnwire.telemetry.metrics import SECONDS_BUCKETS, Labelled, MetricsServer

Context = grpc.aio.ServicerContext[Any, Any]


class RpcMetrics:
    """The families that every service has."""

    def __init__(self, server: MetricsServer) -> None:
        labels, registry = ("service", "method"), server.registry
        self._handled = Labelled(
            Counter(
                "turnwire_rpc_handled", "Calls that have ended, by status code.", (*labels, "code"), registry=registry
            )
        )
        self._running = Labelled(
            Gauge("turnwire_rpc_running", "Calls that run; a stream is one.", labels, registry=registry)
        )
        self._seconds = Labelled(
            Histogram(
                "turnwire_rpc_seconds",
                "What calls with one answer took; streams, which live as long as what they carry, are not in it.",
                labels,
                buckets=SECONDS_BUCKETS,
                registry=registry,
            )
        )

    @contextlib.contextmanager
    def call(self, name: str, context: Context, *, timed: bool) -> Iterator[None]:
        """Count what is inside as one call of `/service/method`."""
        service, _, method = name.lstrip("/").partition("/")
        running = self._running[service, method]
        running.inc()
        begin, code = time.perf_counter(), "OK"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except BaseException:
            status = context.code()
            code = status.name if isinstance(status, grpc.StatusCode) else "UNKNOWN"
            raise
        finally:
            running.dec()
            self._handled[service, method, code].inc()
            if timed:
                self._seconds[service, method].observe(time.perf_counter() - begin)


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """The outermost: what the others refuse is counted, too. A call with one answer that a traced caller makes is a
    span of its trace; streams make their own, for what they carry."""

    def __init__(self, metrics: RpcMetrics | None) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        name = handler_call_details.method
        caller = tracing.caller_of(handler_call_details.invocation_metadata)
        if handler.response_streaming:
            caller = ""
        if self._metrics is None and not caller:
            return handler
        return wrapped_handler(handler, lambda inner: self._watch(inner, name, caller, not handler.response_streaming))

    def _watch(self, inner: Callable[..., Any], name: str, caller: str, timed: bool) -> Callable[..., Any]:
        def counted(context: Context) -> contextlib.AbstractContextManager[None]:
            if self._metrics is None:
                return contextlib.nullcontext()
            return self._metrics.call(name, context, timed=timed)

        if inspect.isasyncgenfunction(inner):

            async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                with counted(context):
                    async with contextlib.aclosing(inner(request, context)) as responses:
                        async for response in responses:
                            yield response

            return stream

        async def call(request: Any, context: Context) -> Any:
            with counted(context):
                if not caller:
                    return await inner(request, context)
                with tracing.begin(name.lstrip("/"), caller):
                    return await inner(request, context)

        return call
