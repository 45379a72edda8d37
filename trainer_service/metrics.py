"""What a step did, in numbers: computed here, written as JSON lines and as TensorBoard events.

Names: `reward/<data_source>`, `tool_use/<data_source>` (share of trajectories with a tool call), `turns/mean`,
`stop/<REASON>` and `error/<KIND>` (shares of trajectories and of tool calls), `tokens/…`, `staleness/…` (updates
between sampling and training), `time/…_seconds`, `groups/…`, `trajectories/…`, and what the learner reports (`loss`,
`entropy`, `kl/…`, `clip_fraction`, `gradient_norm`, `learning_rate`, `logprob_gap/mean`: engine against trainer on the
trained tokens).

An evaluation has the first five of these as well, and for each data source `accuracy/…`, `tasks/…` (how many it is the
mean over) and `failed/…` (trajectories that are not in it). A source of which nothing could be judged has no accuracy.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer_service.files import AppendFile
from trainer_service.groups import Failed, Group, Judged
from turnwire.telemetry.gpu import Gpus


class MetricsWriter:
    """metrics.jsonl and, if wanted, event files. Steps come once: resuming cuts back to the checkpoint."""

    def __init__(self, file: AppendFile, tensorboard: Path | None, next_step: int) -> None:
        self._file = file
        self._events: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - heavy, and only if wanted

            self._events = SummaryWriter(str(tensorboard), purge_step=next_step, flush_secs=10)

    def write(self, kind: str, step: int, metrics: Mapping[str, float], **details: Any) -> None:
        """`kind` is `step` or `evaluation`. `details` are what is no number: they are in the JSON alone."""
        self._file.write({"kind": kind, "step": step, "time": round(time.time(), 3), **metrics, **details})
        if self._events is not None:
            prefix = "evaluation/" if kind == "evaluation" else ""
            for name, value in metrics.items():
                self._events.add_scalar(prefix + name, value, step)

    def flush(self) -> None:
        """What is written is with the operating system from here on."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def step_metrics(groups: Sequence[Group], updates_at: Callable[[int], int], version: int) -> dict[str, float]:
    """Of a batch that is trained on when `version` updates are done. `updates_at` turns the engine's versions into
    ours.
    """
    members = [member for group in groups for member in group.members]
    judged = [member for member in members if isinstance(member, Judged)]
    failed = sum(isinstance(member, Failed) for member in members)
    metrics = {
        **trajectory_metrics(judged),
        **_tokens(judged),
        "trajectories/failed": float(failed),
        "trajectories/retried": float(sum(member.sampled.tries > 1 for member in judged)),
    }
    spans = [
        span for member in judged for segment in member.sampled.trajectory.segments for span in segment.weight_spans
    ]
    sampled = sum(span.end - span.start for span in spans)
    if sampled:
        ages = [(version - updates_at(span.version), span.end - span.start) for span in spans]
        metrics["staleness/mean"] = sum(age * tokens for age, tokens in ages) / sampled
        metrics["staleness/max"] = float(max(age for age, _ in ages))
    return metrics


def trajectory_metrics(judged: Iterable[Judged]) -> dict[str, float]:
    """Rewards, tool use, stop reasons, errors of tool calls."""
    rewards: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    used: dict[str, list[float]] = defaultdict(list)
    stops: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    calls, turns = 0, []
    for member in judged:
        attempt = member.sampled.attempt
        outcomes = attempt.outcomes()
        rewards[member.task.data_source].append(member.score.value)
        used[member.task.data_source].append(float(bool(outcomes)))
        for name, value in member.score.parts.items():
            parts[name].append(value)
        stops[attempt.stop_reason] += 1
        turns.append(len(attempt.turns))
        calls += len(outcomes)
        errors.update(outcome.error for outcome in outcomes if outcome.error)
    count = len(turns)
    if not count:
        return {}
    return {
        "reward/mean": _mean(value for values in rewards.values() for value in values),
        **{f"reward/{source}": _mean(values) for source, values in sorted(rewards.items())},
        **{f"reward_part/{name}": _mean(values) for name, values in sorted(parts.items())},
        "tool_use/mean": _mean(value for values in used.values() for value in values),
        **{f"tool_use/{source}": _mean(values) for source, values in sorted(used.items())},
        "turns/mean": _mean(turns),
        **{f"stop/{name}": number / count for name, number in sorted(stops.items())},
        **{f"error/{name}": number / calls for name, number in sorted(errors.items())},
    }


def _tokens(judged: Iterable[Judged]) -> dict[str, float]:
    segments = [segment for member in judged for segment in member.sampled.trajectory.segments]
    total = sum(segment.token_ids.shape[0] for segment in segments)
    prompt = sum(segment.prompt_length for segment in segments)
    sampled = sum(span.end - span.start for segment in segments for span in segment.weight_spans)
    if not total:
        return {}
    return {
        "tokens/total": float(total),
        "tokens/sampled": float(sampled),
        "tokens/mask_fraction": sampled / total,
        "tokens/observation_fraction": (total - prompt - sampled) / total,
        "tokens/longest": float(max(segment.token_ids.shape[0] for segment in segments)),
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


class GpuMeter:
    """Utilisation, memory and power of the machine's GPUs. Without a GPU it says nothing."""

    def __init__(self) -> None:
        self._gpus = Gpus()

    def read(self) -> dict[str, float]:
        """Figures of now, by device. What a device does not tell is left out."""
        return {
            f"gpu/{number}/{name}": device[figure] / unit
            for number, device in enumerate(self._gpus.read())
            for name, figure, unit in _GPU_FIGURES
            if figure in device
        }


_GPU_FIGURES = (
    ("utilization", "utilization_ratio", 1),
    ("memory_gib", "memory_used_bytes", 2**30),
    ("power_watts", "power_watts", 1),
)
