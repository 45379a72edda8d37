"""Traces: one trajectory is one trace, whichever services it crosses.

    sample                  the trainer: from asking for a trajectory until it is judged
      trajectory            the rollout service: one attempt
        session             the tool service: the trajectory's stream
        turn                the rollout service: generating, and the round trip to the tools
          execute           the tool service: the turn's calls

The context travels as W3C `traceparent`: in a RolloutTask, in an ActionTurn, and in the metadata of other calls.
Whoever begins a trace decides by `tracing.ratio` whether it is recorded, and all others do as it did. What is not
recorded costs next to nothing: `child` begins no span where the one above is not recorded.

Before `configure_tracing`, and where no endpoint is configured, nothing is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

import turnwire
from turnwire.telemetry.config import TracingConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

FLUSH_SECONDS = 5.0
"""How long a service that ends waits for its last spans to be taken."""

TRACEPARENT = "traceparent"

_tracer = trace.get_tracer("turnwire", turnwire.__version__)
_propagator = TraceContextTextMapPropagator()
_NOTHING: contextlib.AbstractContextManager[Span] = contextlib.nullcontext(INVALID_SPAN)


@contextlib.asynccontextmanager
async def traced(config: TracingConfig | None, service: str) -> AsyncIterator[None]:
    """Record this process's spans and send them, until the end of the block. Without a config: nothing."""
    if config is None:
        yield
        return
    # The SDK loads only where it is wanted.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio  # noqa: PLC0415

    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # else each try of each batch is a line
    resource = Resource.create({"service.name": f"turnwire-{service}", "service.version": turnwire.__version__})
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(config.ratio), resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{config.endpoint.rstrip('/')}/v1/traces", timeout=FLUSH_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await asyncio.to_thread(provider.shutdown)
        except TimeoutError:
            logger.warning("the last spans were not taken within %g s", FLUSH_SECONDS)


@contextlib.contextmanager
def _current(span: Span) -> Iterator[Span]:
    """Make a span the current one, and end it. Of an error it keeps the kind: messages may hold what a policy wrote."""
    token = contexts.attach(trace.set_span_in_context(span))
    try:
        yield span
    except Exception as error:
        span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        raise
    finally:
        contexts.detach(token)
        span.end()


def begin(name: str, caller: str = "", **attributes: AttributeValue) -> contextlib.AbstractContextManager[Span]:
    """A span under a caller's, given as its `traceparent`; without one it begins a trace, whatever surrounds it."""
    context = _propagator.extract({TRACEPARENT: caller}, contexts.Context())
    kind = SpanKind.SERVER if caller else SpanKind.INTERNAL
    return _current(_tracer.start_span(name, context, kind, _named(attributes)))


def child(name: str, caller: str = "", **attributes: AttributeValue) -> contextlib.AbstractContextManager[Span]:
    """A span under a caller's, or else under the current one; none where that one is not recorded."""
    if caller:
        return begin(name, caller, **attributes)
    if not trace.get_current_span().is_recording():
        return _NOTHING
    return _current(_tracer.start_span(name, attributes=_named(attributes)))


async def during(name: str, work: Awaitable[T]) -> T:
    """What `work` gives, awaited under a child span."""
    with child(name):
        return await work


def _named(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {f"turnwire.{key}": value for key, value in attributes.items()}


def describe(span: Span, **attributes: AttributeValue) -> None:
    """Set attributes, as they are known."""
    span.set_attributes(_named(attributes))


def traceparent() -> str:
    """The current span as W3C Trace Context has it; empty where there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get(TRACEPARENT, "")


def recorded() -> str:
    """The same, but empty also where the span is not recorded: for messages on a stream that has said so already."""
    return traceparent() if trace.get_current_span().is_recording() else ""


def call_metadata() -> tuple[tuple[str, str], ...]:
    """The current span as metadata of a call."""
    value = traceparent()
    return ((TRACEPARENT, value),) if value else ()


def caller_of(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """The `traceparent` in a call's metadata; empty where there is none."""
    for key, value in metadata or ():
        if key == TRACEPARENT:
            return str(value)
    return ""


def link(span: Span, contexts_of: Iterable[SpanContext]) -> None:
    """Name spans of other traces that this one has to do with."""
    if span.is_recording():
        for context in contexts_of:
            if context.is_valid:
                span.add_link(context)
