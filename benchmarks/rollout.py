"""Tokens per second of the engine alone, and of the whole service with tools, on the same work.

The service generates trajectories with tools first. Then the engine alone, in this process and without gRPC, tools or
agent loop, generates as many tokens from the same prompts, turn by turn, with the same observations between them.

What the service adds to a trajectory does not depend on the policy, and so the gap does. It is measured with a tiny
policy, and with the same made several times as deep by layers that compute and add nothing: the same tokens, at the
price of a larger policy.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks.accounting import processor_group
from benchmarks.report import Result, Row
from benchmarks.services import MODEL, services
from rollout_service.agent import _turn_sampling
from rollout_service.config import EngineConfig
from rollout_service.engines.base import GenerateJob, Sampling
from rollout_service.engines.transformers_engine import TransformersEngine
from trainer_service.data import demo_tasks
from turnwire.client import RolloutClient, rollout_limits, rollout_task
from turnwire.tensors import from_tensor
from turnwire.v1 import rollout_pb2

BATCH = 64
"""Sequences that generate at once, on both sides."""
IN_FLIGHT = 2 * BATCH
"""Trajectories in flight in the service: the batch stays full while tools run."""
DEPTH = 12
"""How many times as deep the second policy is."""

Generated = list[tuple[int, rollout_pb2.Segment]]

ENGINE: dict[str, Any] = {"threads": 1, "max_sequences": BATCH, "cached_sequences": IN_FLIGHT}


async def run(quick: bool) -> Result:
    tiny = _trained_model() or MODEL
    with tempfile.TemporaryDirectory(prefix="turnwire-bench-") as folder, processor_group() as group_seconds:
        deep = _deepened(tiny, Path(folder))
        rows = await _compare("tiny policy", tiny, group_seconds, *((96, 1) if quick else (384, 3)))
        rows += await _compare(f"{DEPTH} times as deep", deep, group_seconds, *((16, 1) if quick else (192, 1)))
    notes = [
        f"Trajectories of the demo's tasks; policy: {tiny}. One engine thread. Tokens: sampled ones, on both sides the "
        "same.",
        f"Both sides generate up to {BATCH} sequences at once; the service has {IN_FLIGHT} trajectories in flight.",
        "Row gap: what the service costs more than its engine alone. Aim: under 10 % of the tokens/s.",
    ]
    if group_seconds is None:
        notes.append("No control group could be made here: the sandboxes' processor time is missing.")
    return Result("Rollout: the engine alone, and the whole service", rows, notes, quick)


async def _compare(
    policy: str, model: str, group_seconds: Callable[[], float] | None, count: int, rounds: int
) -> list[Row]:
    """Rounds of both sides with one policy."""
    engine = TransformersEngine(EngineConfig(model=model, **ENGINE))
    limit = {"max_trajectories_per_stream": IN_FLIGHT}
    service, alone = Measured(), Measured()
    async with (
        services(sandboxes=IN_FLIGHT, engine=ENGINE, rollout=limit, model=model) as started,
        RolloutClient(started.targets["rollout"]) as client,
    ):
        await engine.start()
        await _through_engine(engine, await _through_service(client, max(8, count // 6), 0))  # warm up
        for number in range(1, rounds + 1):
            with service.measuring({**started.pids, "client": os.getpid()}, group_seconds):
                generated = await _through_service(client, count, number)
            with alone.measuring({"engine": os.getpid()}):
                alone.tokens += await _through_engine(engine, generated)
            service.tokens += sum(int(from_tensor(segment.loss_mask).sum()) for _, segment in generated)
            service.calls += sum(len(turn.results) for _, segment in generated for turn in segment.turns)
    await engine.close()
    trajectories = rounds * count
    rows = [service.row("whole service, with tools", trajectories), alone.row("engine alone", trajectories)]
    gap: Row = {"side": "gap", "tokens/s": 1 - rows[0]["tokens/s"] / rows[1]["tokens/s"]}
    if group_seconds is not None:
        more = (service.cpu.total() - alone.cpu.total()) * 1e3
        gap |= {"CPU ms/trajectory": more / trajectories, "CPU ms/tool call": more / service.calls}
    return [{"policy": policy, **row} for row in (*rows, gap)]


def _deepened(model: str, folder: Path) -> str:
    """The policy with DEPTH times as many layers. What is added computes all that a layer does, and adds zero."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    layers = policy.model.layers
    shipped = len(layers)
    for number in range(shipped, DEPTH * shipped):
        layer = copy.deepcopy(layers[number % shipped])
        layer.self_attn.layer_idx = number
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        layers.append(layer)
    policy.config.num_hidden_layers = len(layers)
    shutil.copytree(model, folder, dirs_exist_ok=True)
    policy.save_pretrained(folder)
    return str(folder)


@dataclass
class Measured:
    """One side, over all rounds."""

    tokens: int = 0
    calls: int = 0
    seconds: float = 0.0
    cpu: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def measuring(self, pids: dict[str, int], group_seconds: Callable[[], float] | None = None) -> Iterator[None]:
        """Add the time of what is inside: of these processes, and of sandboxes, which is what is left of the group."""

        def now() -> dict[str, float]:
            seconds = {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}
            if group_seconds is not None:
                seconds["sandboxes"] = group_seconds() - sum(seconds.values())
            return seconds

        before, begin = now(), time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin
        self.cpu.update({name: seconds - before[name] for name, seconds in now().items()})

    def row(self, side: str, trajectories: int) -> Row:
        """For the table."""
        facts = {"tokens": self.tokens, "seconds": self.seconds, "tool calls": self.calls or None}
        facts |= {"CPU ms/trajectory": self.cpu.total() * 1e3 / trajectories}
        facts |= {f"CPU s, {name}": seconds for name, seconds in self.cpu.items() if name != "trainer"}
        return {"side": side, "tokens/s": self.tokens / self.seconds, **facts}


async def _through_service(client: RolloutClient, count: int, round_number: int) -> Generated:
    """What was generated, with the seed of each trajectory: its task's number."""
    tasks = [demo_task(number, f"bench-{round_number}") for number in range(count)]
    ended = [event async for event in client.run(tasks) if isinstance(event, rollout_pb2.Trajectory)]
    return [(int(item.trajectory_id.rpartition("-")[2]), segment) for item in ended for segment in item.segments]


async def _through_engine(engine: TransformersEngine, generated: Generated) -> int:
    """The same requests with the same seeds, so the same tokens; tools answer in no time."""
    places = asyncio.Semaphore(BATCH)

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


def demo_task(number: int, name: str) -> rollout_pb2.RolloutTask:
    """The task of the demo of that number, which is its seed, too."""
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
