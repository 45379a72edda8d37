"""The trainer: where a step's time goes in a real run, and its learner against a bare torch loop on the same batch."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import Result, Row
from benchmarks.services import services
from trainer_service.batch import SequenceBatch, TokenSequence
from trainer_service.config import RunConfig
from trainer_service.learner import Experience, Learner
from trainer_service.policy import Policy
from turnwire.client import TrainerClient
from turnwire.config import apply_overrides, convert, dump, read_yaml
from turnwire.v1 import trainer_pb2

THREADS = 1
REPEATS = 3


async def run(quick: bool) -> Result:
    steps = 3 if quick else 6
    overrides = [
        f"training.steps={steps}",
        "evaluation.before=false",
        "evaluation.after=false",
        "metrics.trajectories_per_step=100000",
        "algorithm.filter_zero_variance=false",
        f"training.threads={THREADS}",
    ]
    values = apply_overrides(read_yaml(Path("configs/demo.yaml"))["run"], overrides)
    config = convert(values, RunConfig)
    split, folder = await _run_steps(config)
    torch.set_num_threads(THREADS)
    experience = await asyncio.to_thread(_last_batch, folder)
    tokens = sum(len(sequence) for sequence in experience.sequences)
    learner = await asyncio.to_thread(_seconds, _learner(config, experience))
    bare = await asyncio.to_thread(_seconds, _bare_loop(config, experience))
    rows: list[Row] = [
        {"side": "learner (verl's GRPO and loss, metrics)", "tokens/s": tokens / learner, "s/step": learner},
        {"side": "bare torch loop (cross-entropy, AdamW)", "tokens/s": tokens / bare, "s/step": bare},
        {"side": "ratio", "tokens/s": bare / learner, "s/step": learner / bare},
    ]
    total = split["step"]
    shares = ", ".join(
        f"{name} {seconds:.2f} s ({seconds / total:.0%})" for name, seconds in sorted(split.items()) if name != "step"
    )
    notes = [
        f"A step of the demo with all three services on this machine takes {total:.2f} s on average: {shares}.",
        f"Both sides: the same {len(experience.sequences)} sequences of {tokens} tokens, {THREADS} thread.",
        "Aim: 0.9 of the bare loop.",
    ]
    return Result("Trainer: learner against a bare torch loop", rows, notes, quick)


async def _run_steps(config: RunConfig) -> tuple[dict[str, float], Path]:
    """Mean seconds of a step by part, over all steps but the first, and the run's folder."""
    seen: list[dict[str, float]] = []
    async with (
        services(sandboxes=160, engine={"threads": 1}) as started,
        TrainerClient(started.targets["trainer"]) as client,
    ):
        run_id = time.strftime("bench-%Y%m%d-%H%M%S")
        run = await client.start_run(run_id, dump(config))
        async for event in client.watch_run(run_id):
            if event.HasField("step"):
                seen.append(dict(event.step.metrics))
        ended = await client.get_run(run_id)
        assert ended.state == trainer_pb2.RUN_STATE_FINISHED, ended.error
    prefix, suffix = "time/", "_seconds"
    names = [name for name in seen[-1] if name.startswith(prefix)]
    split = {
        name.removeprefix(prefix).removesuffix(suffix): float(np.mean([step.get(name, 0.0) for step in seen[1:]]))
        for name in names
    }
    return split, Path(run.folder)


def _last_batch(folder: Path) -> Experience:
    """The last step's trajectories, those that were trained on."""
    with (folder / "trajectories" / "train.jsonl").open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    kept = [item for item in records if item["step"] == records[-1]["step"] and not item["filtered"]]
    groups = {name: number for number, name in enumerate(dict.fromkeys(item["task_id"] for item in kept))}
    segments = [item["segments"][0] for item in kept]
    return Experience(
        sequences=[
            TokenSequence(
                np.array(segment["token_ids"], np.int32),
                segment["prompt_length"],
                np.array(segment["loss_mask"], np.uint8),
                np.array(segment["logprobs"], np.float32),
            )
            for segment in segments
        ],
        rewards=[item["reward"] for item in kept],
        groups=[groups[item["task_id"]] for item in kept],
    )


def _seconds(step: Callable[[], Any]) -> float:
    """The median of a few steps, after one that is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


def _learner(config: RunConfig, experience: Experience) -> Callable[[], Any]:
    learner = Learner(config, Policy(config.model))
    return lambda: learner.learn(experience)


def _bare_loop(config: RunConfig, experience: Experience) -> Callable[[], None]:
    """What anybody would write first: weighted cross-entropy of the sampled tokens, clip, AdamW."""
    policy = Policy(config.model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    batch = SequenceBatch(experience.sequences)
    total = float(batch.mask_BR.sum())

    def step() -> None:
        rows = range(len(batch.sequences))
        for micro in batch.micro_batches(rows, config.training.tokens_per_micro_batch, policy.device):
            logits = policy.model(input_ids=micro.input_ids, logits_to_keep=micro.kept_logits, use_cache=False).logits
            loss = (
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1)[micro.source].float(), micro.labels, reduction="sum"
                )
                / total
            )
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optimizer.gradient_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
