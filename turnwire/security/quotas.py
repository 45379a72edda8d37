"""How much of a server all clients together, and each, may take: calls in flight, and calls that begin in a second."""

from __future__ import annotations

import time
from dataclasses import dataclass

from turnwire.errors import ExhaustedError
from turnwire.security.config import QuotasConfig

RETRY_SECONDS = 1.0
"""When a client that has too many calls in flight may try again."""

_MOST_IDLE = 4096
"""Clients without a call in flight that are remembered for their rate."""


@dataclass(slots=True)
class Usage:
    """Of one client. `allowance`: calls that may begin now, as of the time `at`."""

    running: int
    allowance: float
    at: float


class Quotas:
    """Counts calls by client."""

    def __init__(self, config: QuotasConfig, total: int) -> None:
        """`total`: calls in flight, of all clients together."""
        self._total, self._running = total, 0
        self._streams = config.streams_of(total)
        self._rate, self._burst = config.requests_per_second, config.burst
        self._clients: dict[str, Usage] = {}

    def take(self, client: str) -> None:
        """Count a call that begins. Raises ExhaustedError, with the time to wait."""
        usage = self._clients.get(client)
        if usage is None:
            if len(self._clients) >= _MOST_IDLE:
                self._forget()
            usage = self._clients[client] = Usage(0, float(self._burst), time.monotonic())
        if usage.running >= self._streams:
            raise ExhaustedError(
                f"{client} has {usage.running} calls in flight, as many as a client may (server.quotas.streams)",
                retry_after=RETRY_SECONDS,
            )
        if self._running >= self._total:
            raise ExhaustedError(
                f"{self._running} calls are in flight, as many as may be (server.max_concurrent_rpcs)",
                retry_after=RETRY_SECONDS,
            )
        if self._rate is not None:
            now = time.monotonic()
            usage.allowance = min(float(self._burst), usage.allowance + (now - usage.at) * self._rate)
            usage.at = now
            if usage.allowance < 1:
                raise ExhaustedError(
                    f"{client} calls more often than {self._rate:g} times a second (server.quotas.requests_per_second)",
                    retry_after=(1 - usage.allowance) / self._rate,
                )
            usage.allowance -= 1
        usage.running += 1
        self._running += 1

    def give_back(self, client: str) -> None:
        """Count a call that has ended."""
        usage = self._clients[client]
        usage.running -= 1
        self._running -= 1
        if usage.running == 0 and self._rate is None:
            del self._clients[client]

    def _forget(self) -> None:
        """Those who have nothing in flight and would have their whole burst again."""
        now = time.monotonic()
        for client, usage in list(self._clients.items()):
            refilled = self._rate is None or usage.allowance + (now - usage.at) * self._rate >= self._burst
            if usage.running == 0 and refilled:
                del self._clients[client]
