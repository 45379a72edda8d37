"""Settings of metrics, traces and logs, the same for each service."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class MetricsServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where Prometheus reads a service's metrics: `http://HOST:PORT/metrics`, without TLS and without a token.

    host: the address; `0.0.0.0` for a Prometheus on another machine, in a network that is yours alone.
    port: 0 takes a free one, which the log names.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 9464


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where traces go.

    endpoint: of an OTLP receiver over HTTP, as `http://collector:4318`; `/v1/traces` is added. What it wants beside,
        as headers, is in OpenTelemetry's own environment variables (OTEL_EXPORTER_OTLP_HEADERS).
    ratio: share of trajectories that are traced. A caller that traces decides for its trajectories.
    """

    endpoint: str
    ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {self.endpoint!r} is no URL; write http://HOST:4318")


class LoggingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is logged, to stderr.

    format: `text` for people; `json`, one object a line, with trajectory_id, run_id and trace_id where there is one.
    level: the least severe that is logged.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
