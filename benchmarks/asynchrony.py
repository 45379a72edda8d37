"""Trajectory-level asynchrony against a barrier per turn: same engine, same tasks, heavy-tailed tool latencies.

All sides drive the same services through Generate and Interact; only the schedule differs. A barrier generates one
action for every trajectory of a batch, then waits for every tool, then generates again. Without it each trajectory goes
on as soon as its own tool has answered; and a new one starts in the place of one that has ended.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Result, Row, cpu_seconds
from benchmarks.services import MODEL, services
from turnwire.client import RolloutClient, ToolClient, ToolSession, tool_call
from turnwire.v1 import common_pb2

CONCURRENCIES = (16, 64, 256)
BATCHES = {16: 3, 64: 3, 256: 2}
"""Times as many trajectories as run at once, by how many these are."""
TURNS = 4
ACTION_TOKENS = 6
OBSERVATION_TOKENS = 6
PROMPT_TOKENS = 24
PARETO_SHAPE, SHORTEST, LONGEST = 1.2, 0.03, 2.0
"""Latencies: a Pareto distribution from 30 ms on, cut at 2 s: median 53 ms, mean 120 ms, 1 % above 1.4 s."""


@dataclass
class Sides:
    """Clients of the services, and what tasks are made of."""

    rollout: RolloutClient
    tools: ToolClient
    vocabulary: int


async def run(quick: bool) -> Result:
    vocabulary = json.loads((Path(MODEL) / "config.json").read_text())["vocab_size"]
    rows: list[Row] = []
    async with (
        services(engine={"max_sequences": 256, "cached_sequences": 256}, rollout={"max_trajectories": 512}) as started,
        RolloutClient(started.targets["rollout"]) as rollout,
        ToolClient(started.targets["tool"]) as tools,
    ):
        sides = Sides(rollout, tools, vocabulary)
        await _refilled(sides, _tasks(16, 1, "warm", vocabulary), 16)
        for concurrent in CONCURRENCIES[: 1 if quick else None]:
            row: Row = {"concurrent": concurrent}
            for name, schedule in (("barrier", _barrier), ("batched", _batched), ("refilled", _refilled)):
                tasks = _tasks(concurrent, 1 if quick else BATCHES[concurrent], f"{name}-{concurrent}", vocabulary)
                cpu, begin = cpu_seconds(started.pids["rollout"]), time.perf_counter()
                await schedule(sides, tasks, concurrent)
                row[f"{name} s"] = time.perf_counter() - begin
                row[f"{name} engine CPU s"] = cpu_seconds(started.pids["rollout"]) - cpu
            row["speed-up, batched"] = row["barrier s"] / row["batched s"]
            row["speed-up, refilled"] = row["barrier s"] / row["refilled s"]
            rows.append(row)
    notes = [
        f"2 to 3 times as many trajectories as run at once, {TURNS} turns each, {ACTION_TOKENS} tokens a turn, tool "
        f"latencies Pareto({PARETO_SHAPE}) from {SHORTEST * 1e3:.0f} ms, cut at {LONGEST:g} s.",
        "barrier: all wait for the slowest tool of each turn. batched: no barrier within a batch, one between batches. "
        "refilled: none.",
        "Aim: 2 times or more at 64.",
    ]
    return Result("Trajectory-level asynchrony against a barrier per turn", rows, notes, quick)


@dataclass
class Task:
    """One trajectory: its prompt, and how long its tools take."""

    name: str
    seed: int
    token_ids: list[int]
    latencies: list[float]


def _tasks(concurrent: int, batches: int, name: str, vocabulary: int) -> list[Task]:
    """The same tasks for every schedule: only their names differ."""
    rng = random.Random(concurrent)
    return [
        Task(
            f"{name}-{number}",
            number,
            [rng.randrange(vocabulary // 2, vocabulary) for _ in range(PROMPT_TOKENS)],
            [min(LONGEST, SHORTEST * rng.paretovariate(PARETO_SHAPE)) for _ in range(TURNS)],
        )
        for number in range(concurrent * batches)
    ]


async def _generate(sides: Sides, task: Task, turn: int) -> None:
    sampling = common_pb2.SamplingParams(temperature=1.0, seed=task.seed * TURNS + turn)
    generation = await sides.rollout.generate(
        task.token_ids, ACTION_TOKENS, sampling=sampling, request_id=f"{task.name}-{turn}"
    )
    task.token_ids += generation.token_ids.tolist()
    task.token_ids += task.token_ids[:OBSERVATION_TOKENS]  # stands for the observation


async def _act(session: ToolSession, task: Task, turn: int) -> None:
    await session.act([tool_call("wait", seconds=task.latencies[turn])])


async def _trajectory(sides: Sides, task: Task) -> None:
    async with await sides.tools.open(task.name, ["wait"]) as session:
        for turn in range(TURNS):
            await _generate(sides, task, turn)
            await _act(session, task, turn)


async def _barrier(sides: Sides, tasks: list[Task], concurrent: int) -> None:
    for start in range(0, len(tasks), concurrent):
        batch = tasks[start : start + concurrent]
        sessions = await asyncio.gather(*(sides.tools.open(task.name, ["wait"]) for task in batch))
        for turn in range(TURNS):
            await asyncio.gather(*(_generate(sides, task, turn) for task in batch))
            await asyncio.gather(*(_act(session, task, turn) for session, task in zip(sessions, batch, strict=True)))
        await asyncio.gather(*(session.close() for session in sessions))


async def _batched(sides: Sides, tasks: list[Task], concurrent: int) -> None:
    for start in range(0, len(tasks), concurrent):
        await asyncio.gather(*(_trajectory(sides, task) for task in tasks[start : start + concurrent]))


async def _refilled(sides: Sides, tasks: list[Task], concurrent: int) -> None:
    places = asyncio.Semaphore(concurrent)

    async def run_one(task: Task) -> None:
        async with places:
            await _trajectory(sides, task)

    await asyncio.gather(*(run_one(task) for task in tasks))
