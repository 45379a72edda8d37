"""What the tool service exports: each of its metrics with what it says.

`ToolMetrics` counts what happens; `state` reads what is. Errors of calls are the names of `ErrorKind`, and OK.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from turnwire.telemetry.metrics import SECONDS_BUCKETS, Labelled, MetricsServer, gauge, gauges, total

if TYPE_CHECKING:
    from tool_service.sandboxes import Sandboxes
    from tool_service.sessions import Sessions


class ToolMetrics:
    """What happens."""

    def __init__(self, server: MetricsServer) -> None:
        registry = server.registry
        self._calls = Labelled(
            Histogram(
                "turnwire_tool_call_seconds",
                "Calls of tools that were answered, by tool (`unknown` for what is none) and error kind.",
                ["tool", "error"],
                buckets=SECONDS_BUCKETS,
                registry=registry,
            )
        )
        self._turn = Histogram(
            "turnwire_tool_turn_seconds",
            "Turns, with all their calls and the wait for a sandbox; single calls (Execute) are turns, too.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._sandbox_wait = Histogram(
            "turnwire_tool_sandbox_wait_seconds",
            "How long turns waited for their sandbox, whether they got it or not.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._opened = Labelled(
            Counter(
                "turnwire_tool_sessions_opened",
                "Streams that opened a session: a new one, or one that was resumed after a lost connection.",
                ["resumed"],
                registry=registry,
            )
        )

    def called(self, tool: str, error: str | None, seconds: float) -> None:
        """A call was answered. `tool` must be one that there is, or `unknown`."""
        self._calls[tool, error or "OK"].observe(seconds)

    def turn(self, seconds: float) -> None:
        """A turn is over."""
        self._turn.observe(seconds)

    def waited_for_sandbox(self, seconds: float) -> None:
        """A turn got its sandbox, or the refusal."""
        self._sandbox_wait.observe(seconds)

    def opened(self, resumed: bool) -> None:
        """A stream has its session."""
        self._opened[str(resumed).lower(),].inc()


def state(sessions: Sessions, sandboxes: Sandboxes) -> Iterable[Metric]:
    """What is."""
    sessions_by_state: dict[str, float] = {"open": sessions.open_count, "leased": sessions.leased}
    yield gauges(
        "turnwire_tool_sessions",
        "Sessions: `open` ones have a stream, `leased` ones wait for a reconnection.",
        "state",
        sessions_by_state,
    )
    yield gauge("turnwire_tool_sessions_max", "Sessions that there may be at once.", sessions.most)
    yield gauge("turnwire_tool_turns_running", "Turns that run.", sessions.counters.running)
    yield total("turnwire_tool_turns", "Turns answered.", sessions.counters.total)
    yield gauge("turnwire_tool_draining", "1 while no new sessions are taken.", sessions.draining)
    if not sandboxes.started:
        return
    pool, status = sandboxes.pool_stats(), sandboxes.status()
    sandboxes_by_state: dict[str, float] = {"ready": pool.ready, "in_use": pool.in_use, "creating": pool.creating}
    yield gauges("turnwire_tool_sandboxes", "Sandboxes that there are.", "state", sandboxes_by_state)
    yield gauge("turnwire_tool_sandboxes_max", "Sandboxes that there may be at once.", status.max)
    yield gauge("turnwire_tool_sandbox_waiting", "Turns that wait for a sandbox.", pool.waiting)
    yield total("turnwire_tool_sandboxes_created", "Sandboxes made.", status.created_total)
    yield total("turnwire_tool_sandbox_failures", "Sandboxes that could not be made.", pool.failures)
    yield total(
        "turnwire_tool_sandbox_leftovers_removed",
        "Leftovers of earlier processes that were found and removed.",
        status.leaks_removed_total,
    )
    yield gauge("turnwire_tool_sandbox_trouble", "1 while no further sandbox can be had.", bool(sandboxes.trouble))
