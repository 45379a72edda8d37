"""What an idle session costs the tool service in memory, as their number grows, against a bare gRPC stream."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import grpc.aio
import psutil

from benchmarks.report import Result, Row
from benchmarks.services import services
from tool_service.config import SessionsConfig
from turnwire.client import ToolClient
from turnwire.client.channel import open_channel
from turnwire.security.config import QuotasConfig
from turnwire.serving import ServerConfig

STEPS = (0, 1000, 2500, 5000, 7500, 10_000)
QUICK_STEPS = (0, 100, 200)
OPENING_AT_ONCE = 64
ACTION = "<nothing>before it falls idle</nothing>"
AIM_KB = 200.0


async def run(quick: bool) -> Result:
    steps = QUICK_STEPS if quick else STEPS
    echo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.echo"), stdout=asyncio.subprocess.PIPE
    )
    assert echo.stdout is not None
    echo_target = (await echo.stdout.readline()).decode().strip()
    try:
        bare = await _of_streams(echo_target, echo.pid, steps)
    finally:
        echo.terminate()
        await echo.wait()
    async with (
        services(tool=_room_for(steps[-1] + 1)).only_tools() as started,
        ToolClient(started.targets["tool"]) as client,
    ):
        ours, after = await _of_sessions(client, started.pids["tool"], steps)
        again, _ = await _of_sessions(client, started.pids["tool"], (0, steps[-1]))
    rows: list[Row] = [
        {
            "sessions": count,
            "service MB": memory / 1e6,
            "KB a session since the row above": (memory - before) / (count - fewer) / 1e3,
            "KB a bare stream": (bare_memory - bare_before) / (count - fewer) / 1e3,
        }
        for (fewer, count), (before, memory), (bare_before, bare_memory) in zip(
            pairwise(steps), pairwise(ours), pairwise(bare), strict=True
        )
    ]
    notes = [
        "Resident memory of the service. A session: opened over one channel, one turn answered, then silent.",
        f"From none to {steps[-1]:,}: {(ours[-1] - ours[0]) / steps[-1] / 1e3:.0f} KB a session, and "
        f"{(bare[-1] - bare[0]) / steps[-1] / 1e3:.0f} KB a bare stream of a server that echoes.",
        f"Before the first {ours[0] / 1e6:.0f} MB, after all closed {after / 1e6:.0f} MB (the allocator keeps it), "
        f"with as many opened again {again[-1] / 1e6:.0f} MB.",
        f"Aim: under {AIM_KB:g} KB a session, flat.",
    ]
    return Result("Memory of idle sessions", rows, notes, quick)


def _room_for(count: int) -> dict[str, Any]:
    return {
        "sessions": SessionsConfig(max_sessions=count),
        "server": ServerConfig(max_concurrent_rpcs=count + 100, quotas=QuotasConfig(streams=count + 50)),
    }


async def _of_sessions(client: ToolClient, pid: int, steps: tuple[int, ...]) -> tuple[list[int], int]:
    """Resident bytes of the service at each step; and after all sessions were closed."""
    sessions: list[Any] = []

    async def open_one(number: int) -> None:
        session = await client.open(f"idle-{number}", ["nothing"])
        await session.act(ACTION)
        sessions.append(session)

    found = await _grow(open_one, pid, steps)
    await asyncio.gather(*(session.close() for session in sessions))
    return found, _memory(pid)


async def _of_streams(target: str, pid: int, steps: tuple[int, ...]) -> list[int]:
    channel = open_channel(target)
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/bench.Echo/Echo")
    calls: list[grpc.aio.StreamStreamCall[bytes, bytes]] = []

    async def open_one(_: int) -> None:
        call = method()
        calls.append(call)
        for _turn in range(2):  # as a session's Open and its turn
            await call.write(ACTION.encode())
            await call.read()

    try:
        return await _grow(open_one, pid, steps)
    finally:
        await channel.close()


async def _grow(open_one: Callable[[int], Awaitable[None]], pid: int, steps: tuple[int, ...]) -> list[int]:
    await open_one(-1)  # the connection, and what is made once
    found = [_memory(pid)]
    for fewer, count in pairwise(steps):
        for begin in range(fewer, count, OPENING_AT_ONCE):
            await asyncio.gather(*(open_one(number) for number in range(begin, min(count, begin + OPENING_AT_ONCE))))
        found.append(_memory(pid))
    return found


def _memory(pid: int) -> int:
    resident: int = psutil.Process(pid).memory_info().rss
    return resident
