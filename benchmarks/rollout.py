"""Tokens per second of the engine alone, and of the whole service with tools, on the same work.

The service generates trajectories with tools first. Then the engine alone, in this process and without gRPC, tools or
agent loop, generates as many tokens from the same prompts, turn by turn, with the same observations between them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Result, Row, cpu_seconds
from benchmarks.services import MODEL, services
from rollout_service.agent import _turn_sampling
from rollout_service.config import EngineConfig
from rollout_service.engines.base import GenerateJob, Sampling
from rollout_service.engines.transformers_engine import TransformersEngine
from trainer_service.data import demo_tasks
from turnwire.client import RolloutClient, rollout_limits, rollout_task
from turnwire.tensors import from_tensor
from turnwire.v1 import rollout_pb2

CONCURRENT = 64
Generated = list[tuple[int, rollout_pb2.Segment]]

ENGINE: dict[str, Any] = {"threads": 1, "max_sequences": CONCURRENT, "cached_sequences": 2 * CONCURRENT}


async def run(quick: bool) -> Result:
    count, rounds = (96, 1) if quick else (384, 3)
    model = _trained_model() or MODEL
    engine = TransformersEngine(EngineConfig(model=model, **ENGINE))
    limit = {"max_trajectories_per_stream": CONCURRENT}
    service, alone = Measured(), Measured()
    async with (
        services(sandboxes=2 * CONCURRENT, engine=ENGINE, rollout=limit, model=model) as started,
        RolloutClient(started.targets["rollout"]) as client,
    ):
        await engine.start()
        await _through_engine(engine, await _through_service(client, count, 0))  # warm up
        for number in range(1, rounds + 1):
            with service.measuring({**started.pids, "client": os.getpid()}):
                generated = await _through_service(client, count, number)
            with alone.measuring({"engine": os.getpid()}):
                alone.tokens += await _through_engine(engine, generated)
            service.tokens += sum(int(from_tensor(segment.loss_mask).sum()) for _, segment in generated)
            service.calls += sum(len(turn.results) for _, segment in generated for turn in segment.turns)
    await engine.close()
    rows = [service.row("whole service, with tools"), alone.row("engine alone")]
    gap: Row = {"side": "gap", "tokens/s": 1 - rows[0]["tokens/s"] / rows[1]["tokens/s"]}
    notes = [
        f"{rounds} rounds of {count} trajectories of the demo's tasks, {CONCURRENT} at once; policy: {model}.",
        "One engine thread. Tokens are sampled ones, the same on both sides.",
        "Aim: a gap under 10 %.",
    ]
    return Result("Rollout: the engine alone, and the whole service", [*rows, gap], notes, quick)


@dataclass
class Measured:
    """One side, over all rounds."""

    tokens: int = 0
    calls: int = 0
    seconds: float = 0.0
    cpu: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def measuring(self, pids: dict[str, int]) -> Iterator[None]:
        """Add the time of what is inside."""
        before, begin = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin
        self.cpu.update({name: cpu_seconds(pid) - before[name] for name, pid in pids.items()})

    def row(self, side: str) -> Row:
        """For the table."""
        facts = {"tokens": self.tokens, "seconds": self.seconds, "tool calls": self.calls or None}
        facts |= {f"CPU s, {name}": seconds for name, seconds in self.cpu.items() if name != "trainer"}
        return {"side": side, "tokens/s": self.tokens / self.seconds, **facts}


async def _through_service(client: RolloutClient, count: int, round_number: int) -> Generated:
    """What was generated, with the seed of each trajectory: its task's number."""
    tasks = [_task(number, f"bench-{round_number}") for number in range(count)]
    ended = [event async for event in client.run(tasks) if isinstance(event, rollout_pb2.Trajectory)]
    return [(int(item.trajectory_id.rpartition("-")[2]), segment) for item in ended for segment in item.segments]


async def _through_engine(engine: TransformersEngine, generated: Generated) -> int:
    """The same requests with the same seeds, so the same tokens; tools answer in no time."""
    places = asyncio.Semaphore(CONCURRENT)

    async def replay(key: str, segment: rollout_pb2.Segment, seed: int) -> int:
        ids, produced = from_tensor(segment.token_ids, np.int32), 0
        async with places:
            for turn in segment.turns:
                job = GenerateJob(
                    request_id=f"{key}-{turn.index}",
                    prompt=ids[: turn.action_start],
                    max_tokens=turn.action_end - turn.action_start,
                    sampling=_turn_sampling(Sampling(seed=seed), turn.index),
                    sequence_key=key,
                )
                produced += sum([len(delta.token_ids) async for delta in engine.generate(job)])
            engine.release(key)
        return produced

    jobs = (replay(f"replay-{number}", segment, seed) for number, (seed, segment) in enumerate(generated))
    return sum(await asyncio.gather(*jobs))


def _trained_model() -> str | None:
    """The newest policy that the demo has trained here: it calls tools, the shipped one mostly guesses."""
    found = sorted(Path("runs").glob("demo-*/checkpoints/step-*/model"), key=lambda path: path.stat().st_mtime)
    return str(found[-1]) if found else None


def _task(number: int, name: str) -> rollout_pb2.RolloutTask:
    task = demo_tasks.generate(demo_tasks.DOMAINS[number % 3], "train", number, 0)
    return rollout_task(
        f"{name}-{number}",
        [{"role": message.role, "content": message.content} for message in task.messages],
        task.tools,
        temperature=1.0,
        seed=number,
        limits=rollout_limits(max_turns=4, max_action_tokens=96, max_observation_tokens=128, max_trajectory_tokens=384),
        answer_tags=("<answer>", "</answer>"),
    )
