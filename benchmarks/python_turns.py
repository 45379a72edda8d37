"""A stateful python turn through the whole tool service, against a fresh interpreter for each call."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable

from benchmarks.report import Result, cpu_seconds, ended_children_seconds
from benchmarks.services import services
from turnwire.client import ToolClient, text_of

CONCURRENT = 8
CODE = "import math, json, re, collections\ntotal = sum(i * i for i in range(100))\nprint(total)"
EXPECTED = "328350"


async def run(quick: bool) -> Result:
    seconds = 1.0 if quick else 8.0
    async with services(sandboxes=CONCURRENT).only_tools() as started, ToolClient(started.targets["tool"]) as client:
        sessions = await asyncio.gather(*(client.open(f"bench-{i}", ["python"]) for i in range(CONCURRENT)))

        async def turn(number: int) -> None:
            answer = await sessions[number].act(f"<python>{CODE}</python>")
            assert text_of(answer.observations[0]) == EXPECTED, answer

        stateful = await _measure(turn, seconds, lambda: cpu_seconds(os.getpid(), started.pids["tool"]))
        await asyncio.gather(*(session.close() for session in sessions))
    fresh = await _measure(_fresh_interpreter, seconds, lambda: cpu_seconds(os.getpid()) + ended_children_seconds())
    rows = [
        {"side": "stateful, through the tool service", **stateful},
        {"side": "fresh interpreter per call", **fresh},
        {"side": "ratio", **{key: max(stateful[key] / fresh[key], fresh[key] / stateful[key]) for key in stateful}},
    ]
    notes = [
        f"{CONCURRENT} trajectories at once. The fresh interpreter runs bare: no sandbox, no service, no state.",
        "Aim: 10 times.",
    ]
    return Result("Stateful python turn against a fresh interpreter per call", rows, notes, quick)


async def _fresh_interpreter(number: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output.decode().strip() == EXPECTED


async def _measure(
    turn: Callable[[int], Awaitable[None]], seconds: float, cpu_now: Callable[[], float]
) -> dict[str, float]:
    await asyncio.gather(*(turn(i) for i in range(CONCURRENT)))  # warm up
    done = 0
    cpu, begin = cpu_now(), time.perf_counter()

    async def drive(number: int) -> None:
        nonlocal done
        while time.perf_counter() < begin + seconds:
            await turn(number)
            done += 1

    await asyncio.gather(*(drive(i) for i in range(CONCURRENT)))
    elapsed = time.perf_counter() - begin
    return {"turns/s": done / elapsed, "CPU ms/turn": (cpu_now() - cpu) / done * 1e3}
