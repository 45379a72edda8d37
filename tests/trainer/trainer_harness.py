"""Builders for the trainer's tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer_service.batch import TokenSequence
from trainer_service.config import RunConfig
from trainer_service.data.task import Message, Task
from trainer_service.groups import Judged
from trainer_service.rewards.base import Attempt, Score, ToolOutcome, TurnText
from trainer_service.rollouts import Sampled
from turnwire.config import convert
from turnwire.tensors import to_tensor
from turnwire.v1 import common_pb2, rollout_pb2

REPOSITORY = Path(__file__).parents[2]

DEMO = [
    {"kind": "procedural", "generator": "demo", "arguments": {"domain": domain, "split": "train"}, "size": 50}
    for domain in ("python", "sql", "search")
]
HELD_OUT = [
    {"kind": "procedural", "generator": "demo", "arguments": {"domain": domain, "split": "heldout"}, "size": 4}
    for domain in ("python", "sql", "search")
]


def run_values(model: Path | str, /, **sections: Any) -> dict[str, Any]:
    """A small run's config as plain values; keys of `sections` are dotted names written with `__`."""
    values: dict[str, Any] = {
        "name": "test",
        "model": {"path": str(model)},
        "data": {"train": DEMO, "eval": HELD_OUT},
        "reward": {"name": "exact_match"},
        "rollout": {
            "group_size": 4,
            "final_answer": {},
            "limits": {"max_turns": 3, "max_action_tokens": 24, "max_trajectory_tokens": 200},
            "retry": {"first_delay_seconds": 0.05, "max_delay_seconds": 0.2, "patience_seconds": 60},
        },
        "training": {"steps": 3, "prompts_per_step": 4, "threads": 1},
        "metrics": {"tensorboard": False},
    }
    for name, value in sections.items():
        place = values
        *path, last = name.split("__")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = {**place.get(last, {}), **value} if isinstance(value, Mapping) else value
    return values


def run_config(model: Path | str = "nowhere", /, **sections: Any) -> RunConfig:
    """The same as a RunConfig."""
    return convert(run_values(model, **sections), RunConfig)


def sequences(count: int, seed: int = 0) -> list[TokenSequence]:
    """Random sequences of several turns: prompts, actions and observations of different lengths."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        prompt = int(rng.integers(3, 9))
        mask = [0] * prompt
        for turn in range(int(rng.integers(1, 4))):
            mask += [0] * int(rng.integers(2, 6)) if turn else []
            mask += [1] * int(rng.integers(1, 7))
        flags = np.array(mask, np.uint8)
        ids = rng.integers(1, 112, len(flags)).astype(np.int32)
        logprobs = (-rng.uniform(0.1, 3, len(flags)) * flags).astype(np.float32)
        result.append(TokenSequence(ids, prompt, flags, logprobs))
    return result


def task(ground_truth: Any = "42", data_source: str = "test", task_id: str = "t", **extra: Any) -> Task:
    """A task."""
    return Task(task_id, (Message("user", "?"),), data_source, ground_truth, extra=extra)


def attempt(answer: str | None, *outcomes: ToolOutcome) -> Attempt:
    """A trajectory of one turn."""
    return Attempt((TurnText("action", "observation", outcomes),), answer)


def judged(sequence: TokenSequence, reward: float, key: str = "k", parts: Mapping[str, float] | None = None) -> Judged:
    """A judged trajectory around a sequence."""
    segment = rollout_pb2.Segment(
        token_ids=to_tensor(sequence.token_ids),
        prompt_length=sequence.prompt_length,
        loss_mask=to_tensor(sequence.mask),
        logprobs=to_tensor(sequence.logprobs),
    )
    ones = np.flatnonzero(sequence.mask)
    segment.weight_spans.extend(rollout_pb2.WeightSpan(start=at, end=at + 1, version=1) for at in ones)
    trajectory = rollout_pb2.Trajectory(
        trajectory_id=key, stop_reason=common_pb2.STOP_REASON_FINAL_ANSWER, segments=[segment], final_answer="x"
    )
    sampled = Sampled(trajectory, attempt("x"), tries=1, seconds=0.1)
    return Judged(key, task(), sampled, Score(reward, dict(parts or {})))
