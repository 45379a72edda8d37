"""A gigabyte of stdout from one trajectory: the service's memory, how it ends, and what a neighbour notices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

import psutil

from benchmarks.report import Result, Row, percentile
from benchmarks.services import services
from tool_service.config import SandboxConfig
from tool_service.sandbox import SandboxLimits
from turnwire.client import ToolClient, ToolSession, text_of
from turnwire.v1 import common_pb2, tool_pb2

GIGABYTE = 10**9
PIECE = 2**20
CANARY = "<python>sum(i * i for i in range(100))</python>"
EXPECTED = "328350"
CANARY_PAUSE = 0.01
"""Seconds between an answer and the canary's next turn: a policy has to write it."""
MEMORY_SECONDS = 0.05


async def run(quick: bool) -> Result:
    seconds = 0.5 if quick else 8.0
    rows = [
        await _measured("limits as they come", SandboxLimits().flood_bytes, seconds),
        await _measured("a limit that lets it pass", 2 * GIGABYTE, seconds),
    ]
    notes = [
        "One trajectory prints a gigabyte, in as many turns as its limit of output (flood_bytes) makes of it; and that "
        f"again until {seconds:g} s are over.",
        f"The canary is another trajectory of the same service, with a python turn every {CANARY_PAUSE * 1e3:g} ms.",
        "Memory is the service's own resident memory at its highest, less what it was before.",
        "Aim: bounded memory, a typed result, the canary's p99 under 2 times.",
    ]
    return Result("A flood of stdout beside a canary", rows, notes, quick)


async def _measured(name: str, flood_bytes: int, seconds: float) -> Row:
    sandbox = SandboxConfig(limits=SandboxLimits(flood_bytes=flood_bytes))
    async with (
        services(sandbox=sandbox).only_tools() as started,
        ToolClient(started.targets["tool"]) as client,
        await client.open("canary", ["python"]) as canary,
        await client.open("flood", ["python"]) as flood,
    ):
        service = psutil.Process(started.pids["tool"])
        await canary.act(CANARY)
        begin = time.perf_counter()
        quiet = await _canary(canary, lambda: time.perf_counter() > begin + seconds)
        before = service.memory_info().rss
        flooding = asyncio.create_task(_flood(flood, flood_bytes, seconds))
        highest = asyncio.create_task(_highest(service))
        beside = await _canary(canary, flooding.done)
        highest.cancel()
        ends, rate = await flooding
        return {
            "flood": name,
            "turns": ", ".join(f"{count} {end}" for end, count in ends.items()),
            "MB/s": rate / 1e6,
            "service memory +MB": (max(await highest, before) - before) / 1e6,
            "canary p50 ms alone": percentile(quiet, 0.5) * 1e3,
            "beside": percentile(beside, 0.5) * 1e3,
            "p99 ms alone": percentile(quiet, 0.99) * 1e3,
            "p99 beside": percentile(beside, 0.99) * 1e3,
            "p99 times": percentile(beside, 0.99) / percentile(quiet, 0.99),
        }


async def _canary(session: ToolSession, over: Callable[[], bool]) -> list[float]:
    """Seconds of each turn until `over`."""
    found = []
    while not over():
        begin = time.perf_counter()
        answer = await session.act(CANARY)
        found.append(time.perf_counter() - begin)
        assert text_of(answer.observations[0]) == EXPECTED, answer
        await asyncio.sleep(CANARY_PAUSE)
    return found


async def _flood(session: ToolSession, flood_bytes: int, seconds: float) -> tuple[Counter[str], float]:
    """How its turns ended, and bytes a second: whole gigabytes, until the time is over."""
    ends: Counter[str] = Counter()
    begin = time.perf_counter()
    printed = 0
    while time.perf_counter() < begin + seconds:
        left = GIGABYTE
        while left > 0:
            code = f"import os\nfor _ in range({-(-left // PIECE)}): os.write(1, bytes({PIECE}))"
            answer = (await session.act(f"<python>{code}</python>", timeout=120.0)).observations[0]
            ends[_end_of(answer)] += 1
            left -= flood_bytes if answer.error else left
        printed += GIGABYTE
    return ends, printed / (time.perf_counter() - begin)


def _end_of(answer: tool_pb2.Observation) -> str:
    if answer.error:
        return common_pb2.ErrorKind.Name(answer.error).removeprefix("ERROR_KIND_")
    return "OK, truncated" if answer.truncated else "OK"


async def _highest(process: psutil.Process) -> int:
    """Resident bytes of a process at their highest, until cancelled."""
    highest = 0
    with contextlib.suppress(asyncio.CancelledError):  # that is its end
        while True:
            highest = max(highest, process.memory_info().rss)
            await asyncio.sleep(MEMORY_SECONDS)
    return highest
