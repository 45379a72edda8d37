"""A stateful python turn through the whole tool service, against a fresh interpreter for each call."""

from __future__ import annotations

import asyncio
import os
import sys

from benchmarks.driving import CODE, EXPECTED, rate
from benchmarks.report import Result, cpu_seconds, ended_children_seconds
from benchmarks.services import services
from turnwire.client import ToolClient, text_of

CONCURRENT = 8


async def run(quick: bool) -> Result:
    seconds = 1.0 if quick else 8.0
    async with services(sandboxes=CONCURRENT).only_tools() as started, ToolClient(started.targets["tool"]) as client:
        sessions = await asyncio.gather(*(client.open(f"bench-{i}", ["python"]) for i in range(CONCURRENT)))

        async def turn(number: int) -> None:
            answer = await sessions[number].act(f"<python>{CODE}</python>")
            assert text_of(answer.observations[0]) == EXPECTED, answer

        pids = (os.getpid(), started.pids["tool"])
        stateful = await rate(turn, CONCURRENT, seconds, lambda: {pid: cpu_seconds(pid) for pid in pids})
        await asyncio.gather(*(session.close() for session in sessions))
    fresh = await rate(_fresh_interpreter, CONCURRENT, seconds, _cpu_of_fresh)
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


def _cpu_of_fresh() -> dict[int, float]:
    return {os.getpid(): cpu_seconds(os.getpid()) + ended_children_seconds()}


async def _fresh_interpreter(number: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output.decode().strip() == EXPECTED
