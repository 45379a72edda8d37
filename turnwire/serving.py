"""How every Turnwire service is served: one bootstrap for options, security, health, reflection, metrics and drain.

A service's `__main__` builds its servicer and awaits `serve`. SIGTERM and SIGINT drain: health turns NOT_SERVING, calls
that begin something are refused as UNAVAILABLE with the time to wait, running ones get `drain_seconds` to finish.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import grpc
import grpc.aio
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from turnwire.boundary import BoundaryInterceptor
from turnwire.errors import ConfigError, Problem
from turnwire.security.config import QuotasConfig, TlsConfig, is_loopback
from turnwire.security.gate import Gate
from turnwire.security.quotas import Quotas
from turnwire.security.tls import server_credentials
from turnwire.security.tokens import TokenTable
from turnwire.telemetry.config import LoggingConfig, MetricsServerConfig, TracingConfig
from turnwire.telemetry.metrics import MetricsServer
from turnwire.telemetry.rpcs import RpcInterceptor, RpcMetrics
from turnwire.telemetry.tracing import traced

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 0.5
"""Between two looks at how a service is."""

CONNECTION_AGE_MS = 600_000
"""After which a client makes a new connection for its next call: it finds replicas that have come since, and shows its
present certificate. Calls that run stay on the old one."""

STREAMS_PER_CONNECTION, MOST_PENDING, PENDING_SECONDS = 2**14, 2**16, 600
"""Far above what clients may have in flight, so that it is the gate that refuses what is too much, with a reason. gRPC
itself drops it without one: streams of a connection, and calls that have come and not been looked at (of its own accord
when they are 3,000, a burst's size, or 30 s old, as after the machine stood still; also those of clients who did
nothing wrong)."""

MOST_PROBES = 64
"""Calls in flight at the port for probes."""

LAST_WORDS_SECONDS = 1.0
"""How long what calls have answered may take to leave the house, after the last of them has ended."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a service listens.

    host, port: the address; port 0 takes a free one and prints it. Plaintext is served on loopback only,
        unless `allow_plaintext_beyond_loopback` says otherwise.
    tls: the certificate, and whether clients must show one; unset: plaintext.
    tokens: file of the bearer tokens that are taken, a list of {name, role, sha256}; unset: whoever can connect may do
        everything.
    quotas: how much of the service one client may take.
    probe_port: a second port on the same host, in plaintext, where grpc.health.v1 alone is served: for probes that
        speak no TLS, as those of Kubernetes.
    max_message_bytes: largest message received.
    max_concurrent_rpcs: calls in flight, of all clients together.
    drain_seconds: how long running calls may go on after SIGTERM.
    metrics: where Prometheus reads; unset: nowhere, and nothing is counted.
    tracing: where traces go; unset: there are none.
    logging: what is logged, and how.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    allow_plaintext_beyond_loopback: bool = False
    tls: TlsConfig | None = None
    tokens: str | None = None
    quotas: QuotasConfig = QuotasConfig()
    probe_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    max_message_bytes: Annotated[int, msgspec.Meta(ge=65536, le=2**31 - 1)] = 16 * 1024 * 1024
    max_concurrent_rpcs: Annotated[int, msgspec.Meta(ge=1)] = 4096
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    metrics: MetricsServerConfig | None = None
    tracing: TracingConfig | None = None
    logging: LoggingConfig = LoggingConfig()

    def __post_init__(self) -> None:
        if self.tls is not None or is_loopback(self.host):
            return
        if self.tokens is not None:
            raise ValueError(
                f"host {self.host!r} is not loopback and the traffic is plaintext, which would show all tokens; set tls"
            )
        if not self.allow_plaintext_beyond_loopback:
            raise ValueError(
                f"host {self.host!r} is not loopback and the traffic is plaintext; set tls, use 127.0.0.1, "
                "or set allow_plaintext_beyond_loopback: true if the network is yours alone"
            )


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


class Server:
    """A gRPC server with health and reflection. Use `serve` in a service's process, this class in tests and tools."""

    def __init__(self, config: ServerConfig, service_names: Sequence[str]) -> None:
        self._config = config
        self._names = [*service_names, ""]
        quotas = Quotas(config.quotas, config.max_concurrent_rpcs)
        self._gate = Gate(None if config.tokens is None else TokenTable(config.tokens), quotas)
        self.metrics = None if config.metrics is None else MetricsServer(config.metrics)
        calls = RpcInterceptor(None if self.metrics is None else RpcMetrics(self.metrics))
        self.grpc = grpc.aio.server(
            interceptors=[calls, BoundaryInterceptor(self._gate)],
            options=[
                *channel_options(config.max_message_bytes),
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
                ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
                ("grpc.server.max_pending_requests", MOST_PENDING),
                ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING),
                ("grpc.server_max_unrequested_time_in_server", PENDING_SECONDS),
            ],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc)
        self._trouble = ""
        self._probes: grpc.aio.Server | None = None
        self.port = 0

    @property
    def config(self) -> ServerConfig:
        """What it was made with."""
        return self._config

    @property
    def name(self) -> str:
        """Of its first service, as `tool` for turnwire.v1.ToolService."""
        return self._names[0].rpartition(".")[-1].removesuffix("Service").lower()

    @property
    def address(self) -> str:
        """host:port as clients use it."""
        return _address(self._config.host, self.port)

    async def start(self) -> None:
        """Bind and serve. Raises ConfigError if the address cannot be bound."""
        credentials = None if self._config.tls is None else server_credentials(self._config.tls)
        self.port = _listen(self.grpc, self._config.host, self._config.port, credentials, "server.port")
        if self.metrics is not None:
            self.metrics.start()
        if self._config.probe_port is not None:
            self._probes = grpc.aio.server(options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=MOST_PROBES)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
            _listen(self._probes, self._config.host, self._config.probe_port, None, "server.probe_port")
            await self._probes.start()
        await self.grpc.start()
        await self.set_serving(not self._trouble)

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, state)

    async def follow(self, trouble: Callable[[], str]) -> None:
        """Have grpc.health.v1 answer SERVING while `trouble` is empty; log it when it begins and when it is over. Until
        cancelled."""
        while True:
            found = trouble()
            if bool(found) != bool(self._trouble):
                logger.log(
                    logging.ERROR if found else logging.INFO, "%s", found or f"serving again; it was: {self._trouble}"
                )
                self._trouble = found
                await self.set_serving(not found)
            await asyncio.sleep(HEALTH_SECONDS)

    async def drain(self) -> None:
        """Take in nothing new: health says NOT_SERVING, and calls that begin something are told to try again."""
        self._gate.draining = True
        await self._health.enter_graceful_shutdown()

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain, and let running calls finish for `drain_seconds` (default: the config's)."""
        await self.drain()
        seconds = self._config.drain_seconds if drain_seconds is None else drain_seconds
        await self._gate.emptied(seconds)
        await self.grpc.stop(min(seconds, LAST_WORDS_SECONDS))
        if self._probes is not None:
            await self._probes.stop(0)
        if self.metrics is not None:
            await self.metrics.stop()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None, key: str) -> int:
    """The port that was bound. Raises ConfigError under `key`."""
    address = _address(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError([Problem(key, f"cannot listen on {address}: {error}")]) from error


async def serve(server: Server, on_drain: Callable[[], Awaitable[None]] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Prints one line `listening on HOST:PORT` to stdout, which is what a parent process waits for. `on_drain` is awaited
    before running calls are given their time, to stop taking in work.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with traced(server.config.tracing, server.name):
        await server.start()
        gc.collect()
        gc.freeze()  # what is there now stays: no later collection needs to walk through it
        sys.stdout.write(f"listening on {server.address}\n")
        sys.stdout.flush()
        await stopped.wait()
        logger.info("draining")
        await server.drain()
        if on_drain is not None:
            await on_drain()
        await server.stop()
