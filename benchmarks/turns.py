"""What a turn costs around the tool: Interact with a tool that does nothing, against bare gRPC streams that echo."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from benchmarks.report import Result, cpu_seconds, percentile
from benchmarks.services import services
from turnwire.client import ToolClient
from turnwire.client.channel import open_channel

CONCURRENCIES = (1, 16, 64, 512)
ACTION = "<nothing>how much does a turn cost</nothing>"

Turn = Callable[[], Awaitable[Any]]


async def run(quick: bool) -> Result:
    seconds = 0.5 if quick else 4.0
    rows = []
    echo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.echo"), stdout=asyncio.subprocess.PIPE
    )
    assert echo.stdout is not None
    echo_target = (await echo.stdout.readline()).decode().strip()
    try:
        async with services().only_tools() as started:
            for concurrent in CONCURRENCIES:
                with_tool = await _measure(
                    _sessions(started.targets["tool"]), concurrent, seconds, started.pids["tool"]
                )
                bare = await _measure(_echoes(echo_target), concurrent, seconds, echo.pid)
                rows.append(
                    {
                        "concurrent": concurrent,
                        **with_tool,
                        "bare turns/s": bare["turns/s"],
                        "bare p99 ms": bare["p99 ms"],
                        "turns/s of bare": with_tool["turns/s"] / bare["turns/s"],
                    }
                )
    finally:
        echo.terminate()
        await echo.wait()
    notes = [
        "Client and service are one process each. Bare: a grpc.aio server that echoes the action's bytes.",
        "Aim: 5,000 turns/s at 64 on 2 cores.",
    ]
    return Result("Turn round trip through Interact, tool that does nothing", rows, notes, quick)


async def _measure(opened: Callable[[int], Any], concurrent: int, seconds: float, service_pid: int) -> dict[str, float]:
    """Every trajectory sends its next turn as soon as the last is answered."""
    latencies: list[float] = []
    async with opened(concurrent) as turns:

        async def drive(turn: Turn, end: float) -> None:
            while (start := time.perf_counter()) < end:
                await turn()
                latencies.append(time.perf_counter() - start)

        await asyncio.gather(*(drive(turn, time.perf_counter() + seconds / 4) for turn in turns))  # warm up
        latencies.clear()
        cpu, begin = cpu_seconds(os.getpid(), service_pid), time.perf_counter()
        await asyncio.gather(*(drive(turn, begin + seconds) for turn in turns))
        elapsed = time.perf_counter() - begin
        cpu = cpu_seconds(os.getpid(), service_pid) - cpu
    return {
        "turns/s": len(latencies) / elapsed,
        "p50 ms": percentile(latencies, 0.5) * 1e3,
        "p99 ms": percentile(latencies, 0.99) * 1e3,
        "CPU ms/turn": cpu / len(latencies) * 1e3,
    }


def _sessions(target: str) -> Callable[[int], Any]:
    @asynccontextmanager
    async def opened(count: int) -> AsyncIterator[list[Turn]]:
        async with ToolClient(target) as client:
            sessions = await asyncio.gather(*(client.open(f"bench-{count}-{i}", ["nothing"]) for i in range(count)))
            try:
                yield [functools.partial(session.act, ACTION) for session in sessions]
            finally:
                await asyncio.gather(*(session.close() for session in sessions))

    return opened


def _echoes(target: str) -> Callable[[int], Any]:
    @asynccontextmanager
    async def opened(count: int) -> AsyncIterator[list[Turn]]:
        channel = open_channel(target)
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/bench.Echo/Echo")
        calls = [method() for _ in range(count)]

        def turn(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> Turn:
            async def go() -> None:
                await call.write(ACTION.encode())
                await call.read()

            return go

        try:
            yield [turn(call) for call in calls]
        finally:
            await channel.close()

    return opened
