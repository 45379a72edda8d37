"""What TLS, tokens, metrics and traces add to a turn at 64 trajectories, against services with none of them.

First a tool service alone, with a tool that does nothing and with a stateful Python turn: there a turn is hardly more
than its way there and back. Then the whole rollout service, where a turn is what it is in training: generated, and
answered by tools. Short rounds of all sides in turn, and medians over the rounds of what each side has by what the one
without anything has in the same round, so that what else the machine does hits all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.driving import CODE
from benchmarks.report import Result, Row, cpu_seconds, percentile
from benchmarks.rollout import demo_task
from benchmarks.services import services
from turnwire.client import RolloutClient, ToolClient
from turnwire.client.tools import ToolSession
from turnwire.security.config import PLAINTEXT, ConnectionSecurity, TlsConfig
from turnwire.serving import ServerConfig
from turnwire.telemetry import tracing
from turnwire.telemetry.config import MetricsServerConfig, TracingConfig
from turnwire.v1 import rollout_pb2

CONCURRENT = 64
DEFAULT_RATIO = 0.1
WHOLE = "rollout"
ACTIONS = {"nothing": "<nothing>how much does a turn cost</nothing>", "python": f"<python>{CODE}</python>"}

_SINK = """
import http.server
class Sink(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""Takes spans and throws them away, in a process of its own."""


@dataclass
class Side:
    """One way to serve, and what was measured of it by work, a round each."""

    name: str
    server: ServerConfig = field(default_factory=ServerConfig)
    security: ConnectionSecurity = PLAINTEXT
    ratio: float = 0.0
    """Share of the client's trajectories that are traced."""
    whole: bool = False
    """Whether it is measured with the whole rollout service, too."""
    targets: dict[str, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    rounds: dict[str, list[Round]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Round:
    """Turns a second, the middle of their seconds, and processor seconds of each, of all processes but sandboxes."""

    rate: float
    middle: float
    cpu: float


def _sides(made: Path, endpoint: str) -> list[Side]:
    tls = TlsConfig(certificate=f"{made}/tool.crt", key=f"{made}/tool.key", client_ca=f"{made}/ca.crt")
    known = ConnectionSecurity(ca=f"{made}/ca.crt", certificate=f"{made}/trainer.crt", key=f"{made}/trainer.key")
    tokens, token = f"{made}/tokens.yaml", f"{made}/trainer.token"
    metrics, traces = MetricsServerConfig(port=0), TracingConfig(endpoint=endpoint)
    everything = ServerConfig(tls=tls, tokens=tokens, metrics=metrics, tracing=traces)
    shown = ConnectionSecurity(ca=known.ca, certificate=known.certificate, key=known.key, token_file=token)
    return [
        Side("none of them", whole=True),
        Side("none of them, again", whole=True),
        Side("mutual TLS", ServerConfig(tls=tls), known),
        Side("tokens", ServerConfig(tokens=tokens), ConnectionSecurity(token_file=token)),
        Side("metrics", ServerConfig(metrics=metrics)),
        Side("traces of 1 in 10", ServerConfig(tracing=traces), ratio=DEFAULT_RATIO),
        Side("traces of all", ServerConfig(tracing=traces), ratio=1.0, whole=True),
        Side("all, traces of 1 in 10", everything, shown, DEFAULT_RATIO, whole=True),
    ]


async def run(quick: bool) -> Result:
    seconds, rounds = (0.2, 1) if quick else (0.5, 12)
    async with contextlib.AsyncExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnwire-bench-")))
        making = await asyncio.create_subprocess_exec(
            "deploy/certificates/make", str(made), stdout=asyncio.subprocess.DEVNULL
        )
        assert await making.wait() == 0
        sink = await asyncio.create_subprocess_exec(sys.executable, "-c", _SINK, stdout=asyncio.subprocess.PIPE)
        stack.push_async_callback(sink.wait)
        stack.callback(sink.terminate)
        assert sink.stdout is not None
        endpoint = f"http://127.0.0.1:{int(await sink.stdout.readline())}"
        await stack.enter_async_context(tracing.traced(TracingConfig(endpoint=endpoint, ratio=1.0), "bench"))
        sides = _sides(made, endpoint)
        for side in sides:
            started = services(
                sandboxes=CONCURRENT,
                tool={"server": side.server},
                rollout={"server": side.server, "client": side.security},
                engine={"threads": 1, "max_sequences": CONCURRENT},
            )
            await stack.enter_async_context(started if side.whole else started.only_tools())
            side.targets = started.targets
            side.pids = (os.getpid(), *started.pids.values())
        for work in ACTIONS:
            await _rounds(sides, work, rounds, lambda side, work=work: _turns(side, work, seconds))
        await _rounds([side for side in sides if side.whole], WHOLE, max(1, rounds // 3), _trajectories)
    rows = [_row(side, sides[0], work) for work in (*ACTIONS, WHOLE) for side in sides if side.rounds[work]]
    notes = [
        f"{CONCURRENT} trajectories. Nothing and python: rounds of {seconds:g} s with the tool service alone; each "
        "sends its next turn when the last is answered. Rollout: tasks of the demo through rollout and tool service.",
        "Client and services are one process each. Traces: the client begins spans as the service above would, one a "
        "turn; a receiver takes and drops them.",
        "`none of them, again` is the same as the first: what it differs by is what cannot be measured here.",
        "Aim: all of them together under 5 %.",
    ]
    return Result("What security and observation add to a turn", rows, notes, quick)


async def _rounds(
    sides: list[Side], work: str, rounds: int, one_round: Callable[[Side], Coroutine[Any, Any, Round]]
) -> None:
    for number in range(rounds + 1):  # the first warms up
        for side in sides if number % 2 else sides[::-1]:
            measured = await one_round(side)
            if number:
                side.rounds[work].append(measured)


async def _turns(side: Side, tool: str, seconds: float) -> Round:
    """Turns of a tool, at the tool service alone."""
    latencies: list[float] = []
    async with ToolClient(side.targets["tool"], side.security) as client:
        begun = asyncio.Event()
        ready = [asyncio.get_running_loop().create_future() for _ in range(CONCURRENT)]

        async def trajectory(number: int) -> None:
            with _trace(side, number):
                session = await client.open(f"{tool}-{number}-{secrets.token_hex(4)}", [tool])
                try:
                    await _turn(session, tool)
                    ready[number].set_result(None)
                    await begun.wait()
                    end = time.perf_counter() + seconds
                    while (start := time.perf_counter()) < end:
                        await _turn(session, tool)
                        latencies.append(time.perf_counter() - start)
                finally:
                    await session.close()

        async with asyncio.TaskGroup() as group:
            for number in range(CONCURRENT):
                group.create_task(trajectory(number))
            await asyncio.wait(ready)
            cpu, begin = cpu_seconds(*side.pids), time.perf_counter()
            begun.set()
        elapsed, cpu = time.perf_counter() - begin, cpu_seconds(*side.pids) - cpu
    return Round(len(latencies) / elapsed, percentile(latencies, 0.5), cpu / len(latencies))


async def _trajectories(side: Side) -> Round:
    """Turns of whole trajectories, with the same tasks and seeds each time."""
    async with RolloutClient(side.targets["rollout"], side.security) as client:
        tasks = []
        for number in range(2 * CONCURRENT):
            with _trace(side, number):
                tasks.append(demo_task(number, f"overhead-{secrets.token_hex(4)}"))
        cpu, begin = cpu_seconds(*side.pids), time.perf_counter()
        turns = [event.turn async for event in client.run(tasks) if isinstance(event, rollout_pb2.TurnFinished)]
        elapsed, cpu = time.perf_counter() - begin, cpu_seconds(*side.pids) - cpu
    spent = [turn.timings.generate.ToTimedelta() + turn.timings.tool.ToTimedelta() for turn in turns]
    seconds = [one.total_seconds() for one in spent]
    return Round(len(turns) / elapsed, percentile(seconds, 0.5), cpu / len(turns))


async def _turn(session: ToolSession, tool: str) -> None:
    with tracing.child("turn"):
        await session.act(ACTIONS[tool])


def _trace(side: Side, number: int) -> contextlib.AbstractContextManager[Any]:
    """As a caller that has decided which of its trajectories are traced; without traces, nothing."""
    if not side.ratio:
        return contextlib.nullcontext()
    recorded = number % round(1 / side.ratio) == 0
    return tracing.begin("trajectory", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{int(recorded):02x}")


def _row(side: Side, plain: Side, work: str) -> Row:
    rounds, without = side.rounds[work], plain.rounds[work]

    def by_plain(figure: Callable[[Round], float]) -> float:
        return median(figure(one) / figure(other) for one, other in zip(rounds, without, strict=True))

    return {
        "work": work,
        "with": side.name,
        "turns/s": median(one.rate for one in rounds),
        "of none": by_plain(lambda one: one.rate),
        "p50 ms": median(one.middle for one in rounds) * 1e3,
        "p50 of none": by_plain(lambda one: one.middle),
        "CPU ms/turn": median(one.cpu for one in rounds) * 1e3,
        "CPU of none": by_plain(lambda one: one.cpu),
    }
