"""What benchmarks of tool calls share: the code that is run, how often it can be run, and how soon the first time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from benchmarks.report import Row, percentile
from turnwire.client import ToolClient, text_of

CODE = "import math, json, re, collections\ntotal = sum(i * i for i in range(100))\nprint(total)"
EXPECTED = "328350"

Turn = Callable[[int], Awaitable[None]]
"""One turn of the trajectory of that number."""


async def rate(turn: Turn, trajectories: int, seconds: float, cpu_now: Callable[[], dict[int, float]]) -> Row:
    """Every trajectory begins its next turn as soon as the last is over. `cpu_now`: seconds used so far, by process;
    those count that are there at the begin and at the end."""
    await asyncio.gather(*(turn(number) for number in range(trajectories)))  # warm up
    done = 0
    cpu, begin = cpu_now(), time.perf_counter()

    async def drive(number: int) -> None:
        nonlocal done
        while time.perf_counter() < begin + seconds:
            await turn(number)
            done += 1

    await asyncio.gather(*(drive(number) for number in range(trajectories)))
    elapsed = time.perf_counter() - begin
    used = sum(after - cpu[pid] for pid, after in cpu_now().items() if pid in cpu)
    return {"turns/s": done / elapsed, "CPU ms/turn": used / done * 1e3}


async def first_observations(client: ToolClient, ready: int, count: int, aims_ms: tuple[float, float]) -> list[Row]:
    """From opening a trajectory to its first observation, each time when `ready` sandboxes are ready again; as rows
    for the p50 and the p99."""
    seconds = []
    for number in range(count):
        while sum(pool.ready for pool in (await client.get_status()).pools) < ready:  # noqa: ASYNC110 - of a service
            await asyncio.sleep(0.05)
        begin = time.perf_counter()
        session = await client.open(f"first-{number}", ["python"])
        answer = await session.act(f"<python>{CODE}</python>")
        seconds.append(time.perf_counter() - begin)
        assert text_of(answer.observations[0]) == EXPECTED, answer
        await session.close()
    return [
        {
            "figure": f"open + first observation, warm pool, p{share * 100:.0f} ms",
            "value": percentile(seconds, share) * 1e3,
            "aim": aim,
        }
        for share, aim in zip((0.5, 0.99), aims_ms, strict=True)
    ]
