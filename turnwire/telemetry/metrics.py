"""What Prometheus reads of a service, and the metrics that every service has.

Two kinds: what happens is counted as it happens (a counter, a histogram); what *is* is read when somebody asks, from
the service's own objects and on its event loop, so that it is kept once. A loop that does not answer fails the scrape,
which is then what is known of the service.

Names are `turnwire_<service>_<what>_<unit>`; those without a service are every service's, told apart by Prometheus's
own label `job`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import turnwire
from turnwire.errors import ConfigError, Problem
from turnwire.telemetry.config import MetricsServerConfig
from turnwire.telemetry.gpu import FIGURES, Gpus

logger = logging.getLogger(__name__)

STATE_SECONDS = 5.0
"""How long a scrape waits for the event loop."""

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""From a turn that waits for nothing to one that runs into its limit."""

Read = Callable[[], Iterable[Metric]]

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each, which nobody reads


def gauge(name: str, help_text: str, value: float) -> Metric:
    """A state without labels."""
    return GaugeMetricFamily(name, help_text, value=value)


def gauges(name: str, help_text: str, label: str, values: dict[str, float]) -> Metric:
    """A state by one label."""
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def total(name: str, help_text: str, value: float) -> Metric:
    """A count that its owner keeps."""
    return CounterMetricFamily(name, help_text, value=value)


class Labelled(dict[tuple[str, ...], Any]):
    """A family's children by the values of its labels, each looked up once."""

    def __init__(self, family: Counter | Gauge | Histogram) -> None:
        super().__init__()
        self._family = family

    def __missing__(self, labels: tuple[str, ...]) -> Any:
        child = self[labels] = self._family.labels(*labels)
        return child


class MetricsServer:
    """A service's registry, and the HTTP server that shows it. Make it where the event loop runs."""

    def __init__(self, config: MetricsServerConfig) -> None:
        self._config = config
        self._http: tuple[Any, threading.Thread] | None = None
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(_GpuCollector())
        self.registry.register(_DelayCollector(asyncio.get_running_loop()))
        Info("turnwire_build", "The version.", registry=self.registry).info({"version": turnwire.__version__})

    def export(self, read: Read) -> None:
        """Have `read` called on the event loop at each scrape, for what is so at that moment."""
        self.registry.register(_StateCollector(asyncio.get_running_loop(), read))

    @property
    def port(self) -> int:
        """The one that is listened on; 0 before `start`."""
        return 0 if self._http is None else int(self._http[0].server_port)

    def start(self) -> None:
        """Serve. Raises ConfigError where the address cannot be had."""
        host, port = self._config.host, self._config.port
        try:
            self._http = start_http_server(port, host, self.registry)
        except OSError as error:
            key = "host" if isinstance(error, socket.gaierror) else "port"
            message = f"cannot serve metrics on {host}:{port}: {error.strerror or error}"
            raise ConfigError([Problem(f"server.metrics.{key}", message)]) from error
        logger.info("metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self.port)

    async def stop(self) -> None:
        """Idempotent."""
        if self._http is not None:
            (http, thread), self._http = self._http, None
            await asyncio.to_thread(http.shutdown)
            http.server_close()
            await asyncio.to_thread(thread.join)


def _on_loop(loop: asyncio.AbstractEventLoop, read: Read) -> list[Metric]:
    """What `read` gives, on the loop's own thread."""

    async def reading() -> list[Metric]:
        return list(read())

    future = asyncio.run_coroutine_threadsafe(reading(), loop)
    try:
        return future.result(STATE_SECONDS)
    except (TimeoutError, CancelledError) as error:
        future.cancel()
        raise RuntimeError(f"the event loop did not answer within {STATE_SECONDS:g} s") from error


class _StateCollector(Collector):
    """What a service's own objects say."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Read) -> None:
        self._loop, self._read = loop, read

    def collect(self) -> Iterable[Metric]:
        return _on_loop(self._loop, self._read)


class _DelayCollector(Collector):
    """How busy the loop is: all that the service does waits as long."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        asked, help_text = time.perf_counter(), "How long the event loop took to turn to this scrape."
        return _on_loop(
            self._loop, lambda: [gauge("turnwire_loop_delay_seconds", help_text, time.perf_counter() - asked)]
        )


class _GpuCollector(Collector):
    """The machine's devices, read where the scrape runs."""

    def __init__(self) -> None:
        self._gpus = Gpus()

    def collect(self) -> Iterable[Metric]:
        devices = self._gpus.read()
        for name, help_text in FIGURES.items():
            values = {str(index): device[name] for index, device in enumerate(devices) if name in device}
            yield gauges(f"turnwire_gpu_{name}", help_text, "gpu", values)
