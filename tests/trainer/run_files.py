"""What runs left in their folders, read and compared."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import testing

VOLATILE = ("time", "tokens_per_second", "sync/pause_seconds", "rollouts/infra_failures", "trajectories/retried", "gpu")
"""Beginnings of metrics that tell how long something took, and what had to be done again."""


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file."""
    with path.open() as file:
        yield from map(json.loads, file)


def steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a run."""
    return [entry for entry in lines(folder / "metrics.jsonl") if entry["kind"] == "step"]


def ledger(folder: Path) -> list[dict[str, Any]]:
    """What became of each trajectory, in order."""
    return list(lines(folder / "ledger.jsonl"))


def same_run(one: Path, other: Path) -> None:
    """Both runs trained on the same trajectories in the same order with the same losses, evaluated the same, and wrote
    everything down once."""
    assert ledger(other) == ledger(one)
    for left, right in zip(_metrics(one), _metrics(other), strict=True):
        for name in ("kind", "failures"):
            assert right.pop(name, None) == left.pop(name, None)
        assert right == pytest.approx(left, rel=1e-4, abs=1e-5), left["step"]
    for name in ("train", "eval"):
        for left, right in zip(_trajectories(one, name), _trajectories(other, name), strict=True):
            logprobs, advantage = right.pop("logprobs"), right.pop("advantage")
            assert logprobs == pytest.approx(left.pop("logprobs"), abs=1e-4)
            assert advantage == pytest.approx(left.pop("advantage"), abs=1e-4)
            assert right == left
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    for key in ("steps", "evaluations", "accuracy", "ledger"):
        assert summaries[1][key] == summaries[0][key], key
    assert _scalars(other) == _scalars(one)
    assert not [*other.glob("*.safetensors*"), *(other / "checkpoints").glob(".*")]
    last = [max((folder / "checkpoints").glob("step-*")) for folder in (one, other)]
    assert last[0].name == last[1].name
    weights = [load_file(folder / "model" / "model.safetensors") for folder in last]
    testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in entry.items() if not name.startswith(VOLATILE)}
        for entry in lines(folder / "metrics.jsonl")
    ]


def _trajectories(folder: Path, name: str) -> list[dict[str, Any]]:
    """What was sampled and trained on, of each kept trajectory."""
    return [
        {
            **{key: entry[key] for key in ("step", "task_id", "stop_reason", "final_answer", "reward", "filtered")},
            "token_ids": [segment["token_ids"] for segment in entry["segments"]],
            "loss_mask": [segment["loss_mask"] for segment in entry["segments"]],
            "weight_versions": [segment["weight_versions"] for segment in entry["segments"]],
            "logprobs": [value for segment in entry["segments"] for value in segment["logprobs"]],
            "advantage": entry["advantage"],
        }
        for entry in lines(folder / "trajectories" / f"{name}.jsonl")
    ]


def _scalars(folder: Path) -> dict[str, list[int]]:
    """The steps that TensorBoard shows, by tag."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    seen: dict[str, list[int]] = defaultdict(list)
    for tag in events.Tags()["scalars"]:
        seen[tag] = [event.step for event in events.Scalars(tag)]
    return seen
