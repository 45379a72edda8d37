"""Section J of the hostile inputs, on both backends: what clients and agents do to the service, in their numbers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import grpc.aio
import pytest
from service_process import DOCKER, PROCESS, ServiceProcess, answer, clients, gone, in_all, serving, start_in_mid_turn
from tool_harness import Trajectory, error_of, retry_seconds, texts
from waiting import eventually

OPENS, POOL, QUEUE = 1000, 8, 192


@pytest.mark.parametrize(
    ("backend", "policy"),
    [pytest.param("process", "discard", marks=PROCESS.marks), pytest.param("docker", "recycle", marks=DOCKER.marks)],
)
async def test_a_thousand_trajectories_at_once_are_queued_within_the_bound_and_beyond_it_told_when_to_come_back(
    tmp_path: Path, backend: str, policy: str
) -> None:
    """J1: a pool of 8 for 1,000. Each is served or refused in typed words, none is lost."""
    pool = {"ready": POOL, "max": POOL, "max_waiting": QUEUE, "wait_seconds": 120, "policy": policy}
    sessions = {"lease_seconds": 60}
    async with serving(tmp_path, backend, sandbox={"pool": pool}, sessions=sessions) as service:
        trajectories = [Trajectory(service, str(number)) for number in range(OPENS)]
        await asyncio.gather(*(trajectory.open("python") for trajectory in trajectories))
        for trajectory in trajectories[:POOL]:
            assert texts(await trajectory.act(0, "<python>'mine'</python>")) == ["'mine'"]

        served: list[str] = []
        refused: list[grpc.aio.AioRpcError] = []

        async def ask(trajectory: Trajectory) -> None:
            try:
                served.extend(texts(await trajectory.act(0, f"<python>x = {trajectory.id}; x</python>", patience=120)))
                await trajectory.close()
            except grpc.aio.AioRpcError as error:
                refused.append(error)

        asking = [asyncio.create_task(ask(trajectory)) for trajectory in trajectories[POOL:]]
        await eventually(lambda: len(refused) == OPENS - POOL - QUEUE)
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert min(map(retry_seconds, refused)) > 0
        assert ((await service.pool()).waiting, served) == (QUEUE, [])

        for trajectory in trajectories[:POOL]:
            await trajectory.close()
        await asyncio.gather(*asking)
        assert len(set(served)) == QUEUE
        again = Trajectory(service, str(OPENS - 1))
        assert (await again.open("python")).resumed, "what was refused has done nothing, and may come back"
        assert texts(await again.act(0, "<python>6 * 7</python>")) == ["42"]
        assert (await service.pool()).in_use <= POOL


async def kill_in_mid_turn(service: ServiceProcess, maker: asyncio.subprocess.Process, count: int, ready: int) -> None:
    """Kill clients, all at once. Nothing of them may be left, and the pool is back at its size."""
    pids = await start_in_mid_turn(service, maker, count, each=1)
    traces = await in_all(service, count)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await service.quiet(ready)
    await gone(traces)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("backend", "count", "ready"),
    [
        pytest.param("process", 100, 4, marks=PROCESS.marks),
        pytest.param("docker", 20, 2, marks=DOCKER.marks),
    ],
)
async def test_clients_that_are_killed_in_mid_turn_leave_nothing(
    tmp_path: Path, thorough: bool, backend: str, count: int, ready: int
) -> None:
    """J2, and the 1,000 clients that are killed -9, `count` at a time. With containers, of which the engine makes a few
    a second, they are 60 unless the run is a thorough one."""
    batches = 3 if backend == "docker" and not thorough else 1000 // count
    memory = []
    pool = {"ready": ready, "max": 256, "wait_seconds": 150}
    async with serving(tmp_path, backend, sandbox={"pool": pool}) as service, clients(service) as maker:
        await kill_in_mid_turn(service, maker, count, ready)
        before = service.footprint()  # with what is made once
        for _ in range(batches - 1):
            memory.append(service.memory())
            await kill_in_mid_turn(service, maker, count, ready)
        await eventually(lambda: service.footprint() == before)
        # It swings by what one batch needs; what stayed of each client would add up.
        assert service.memory() < max(memory[:3]) + 8 * 2**20


HOSTILE = {
    "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass": {"TIMEOUT", "MEMORY"},
    "import os\nx = []\nos.fork()\nwhile True: x.append(bytearray(1 << 20))": {"MEMORY", "TIMEOUT"},
    "while True: print('x' * 1_000_000)": {"OUTPUT_LIMIT", "TIMEOUT"},
}
"""Bombs of processes, memory and output, and how they may end: by whichever limit is reached first."""
TAKEN_ALONG = "SESSION_LOST"
"""How the turn after one ends whose sandbox had more processes than could be ended in a second."""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("backend", "slots"),
    [pytest.param("process", 64, marks=PROCESS.marks), pytest.param("docker", 8, marks=DOCKER.marks)],
)
async def test_a_canary_is_served_while_every_other_slot_is_hostile(tmp_path: Path, backend: str, slots: int) -> None:
    """J8. What the agents did is told to them, and is never called our failure."""
    limits = {"memory_bytes": 64 << 20, "processes": 32}
    pool = {"ready": slots + 1, "max": slots + 1}
    async with serving(tmp_path, backend, sandbox={"pool": pool, "limits": limits}) as service:
        canary = Trajectory(service, "canary")
        await canary.open("python")
        assert texts(await canary.act(0, "<python>n = 0</python>")) == [""]
        hostile = [Trajectory(service, str(number)) for number in range(slots)]
        await asyncio.gather(*(trajectory.open("python") for trajectory in hostile))
        turn = 0
        for round_, (code, ends) in enumerate(HOSTILE.items()):
            fields = {"timeout": {"seconds": 1}}
            bombs = asyncio.gather(*(one.act(round_, f"<python>{code}</python>", **fields) for one in hostile))
            while not bombs.done():
                turn += 1
                answered = await canary.act(turn, "<python>n += 1; n</python>")
                assert texts(answered) == [str(turn)]
            assert {error_of(ended.observations[0]) for ended in bombs.result()} <= ends | (
                {TAKEN_ALONG} if round_ else set()
            ), code
        assert turn > len(HOSTILE)
        assert (await service.pool()).in_use == slots + 1
        await asyncio.gather(*(trajectory.close() for trajectory in hostile))
        assert await answer(service, "6 * 7") == "42"
