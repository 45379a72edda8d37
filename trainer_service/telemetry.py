"""What the trainer service exports: each of its metrics with what it says.

All of it is read at the scrape. The figures of a step are those of metrics.jsonl, of the step that was finished last,
in the run that this process has worked on last; each is under the label `run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from turnwire.enums import short_name
from turnwire.telemetry.metrics import gauges
from turnwire.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    from trainer_service.runs import Run, Runs

FIGURES = {
    "reward/mean": ("reward_mean", "Mean reward of a batch."),
    "turns/mean": ("turns_mean", "Mean number of turns of a trajectory."),
    "tokens/mask_fraction": ("mask_fraction_ratio", "Share of a batch's tokens that the policy sampled."),
    "tokens/sampled": ("sampled_tokens", "Tokens of a batch that the policy sampled."),
    "tokens/longest": ("longest_trajectory_tokens", "Longest trajectory of a batch."),
    "tokens_per_second": ("tokens_per_second", "Tokens of a batch by the time of its step."),
    "staleness/mean": ("staleness_mean_updates", "Updates between sampling and training, mean over tokens."),
    "staleness/max": ("staleness_max_updates", "Updates between sampling and training, at most."),
    "trajectories/retried": ("batch_retried_trajectories", "Trajectories of a batch that took more than one attempt."),
    "trajectories/failed": ("batch_failed_trajectories", "Trajectories of a batch that are missing: they failed."),
    "trajectories/filtered": ("batch_filtered_trajectories", "Trajectories of a batch left out on purpose."),
    "time/step_seconds": ("step_seconds", "A whole step."),
    "time/waiting_seconds": ("waiting_seconds", "Waiting for the batch."),
    "time/sync_seconds": ("sync_seconds", "Sending the weights, until the engine has them in use."),
    "sync/pause_seconds": ("sync_pause_seconds", "How long the engine stood still for it."),
    "sync/bytes": ("sync_bytes", "Size of the weights sent."),
    "canary/mean_gap": ("canary_mean_gap", "Gap of log-probability between engine and trainer, mean."),
    "canary/worst_gap": ("canary_worst_gap", "The same, at the worst token."),
    "canary/share_of_limit": ("canary_limit_ratio", "The gap by what is allowed; above 1 the run stops."),
    "logprob_gap/mean": ("logprob_gap_mean", "Gap of log-probability on the trained tokens."),
    "loss": ("loss", "Loss."),
    "entropy": ("entropy", "Entropy of the policy, mean over sampled tokens."),
    "kl/old": ("kl_old", "Divergence from the policy that sampled."),
    "kl/reference": ("kl_reference", "Divergence from the starting policy."),
    "clip_fraction": ("clip_fraction_ratio", "Share of tokens whose ratio was cut."),
    "gradient_norm": ("gradient_norm", "Norm of the gradient before it is cut."),
    "learning_rate": ("learning_rate", "Learning rate."),
    "update_skipped": ("update_skipped_ratio", "Share of updates left out because the gradient was not finite."),
}
"""By name in metrics.jsonl."""

FAMILIES = {
    "reward/": ("reward", "source", "Mean reward of a batch, by data source."),
    "tool_use/": ("tool_use_ratio", "source", "Share of trajectories with a tool call, by data source."),
    "stop/": ("stop_ratio", "stop_reason", "Share of trajectories, by stop reason."),
    "error/": ("tool_error_ratio", "error", "Share of tool calls that ended so, by error kind."),
}
"""The same, of figures that are one of many: by what their names begin with."""


class Standing(msgspec.Struct, frozen=True):
    """How a run is right now."""

    in_flight: int
    """Trajectories at the rollout service."""
    infra_failures: int
    """Attempts that infrastructure failed, since this process works on the run."""
    books: dict[str, int]
    """Trajectories that have ended, by state."""


def state(runs: Runs) -> Iterable[Metric]:
    """What is."""
    states = Counter(run.file.state.removeprefix("RUN_STATE_") for run in runs.list())
    counts: dict[str, float] = {name: float(states[name]) for name in map(_state_name, pb.RunState.values()) if name}
    yield gauges("turnwire_trainer_runs", "Runs that this service knows, by state.", "state", counts)
    yield from _of_run(runs.current)


def _state_name(state: pb.RunState.ValueType) -> str:
    return short_name(pb.RunState, state) if state else ""


def _progress(run: Run | None) -> float | None:
    """The time of the last event that is not only a notice."""
    if run is None:
        return None
    kinds = ("step", "evaluation", "evaluation_progress", "checkpoint", "state")
    events = (run.events.latest(kind) for kind in kinds)
    return max(event.time.ToNanoseconds() / 1e9 for event in events if event is not None)


def _of_run(run: Run | None) -> Iterable[Metric]:
    """Of the current run; without one the families are there, and empty."""
    name = "" if run is None else run.file.run_id

    def one(metric: str, help_text: str, value: float | None) -> Metric:
        return _by("", metric, help_text, {} if value is None else {"": value})

    def _by(label: str, metric: str, help_text: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(f"turnwire_trainer_{metric}", help_text, labels=["run", label] if label else ["run"])
        for key, value in values.items():
            family.add_metric([name, key] if label else [name], value)
        return family

    yield one("run_live", "1 while the run is worked on.", None if run is None else run.live)
    yield one("step", "Steps done.", None if run is None else run.message().step)
    yield one("steps_planned", "Steps that the run is to have.", None if run is None else run.file.total_steps)

    standing = None if run is None or run.training is None else run.training.standing()
    yield one(
        "trajectories_in_flight",
        "Trajectories at the rollout service.",
        None if standing is None else standing.in_flight,
    )
    failures = CounterMetricFamily(
        "turnwire_trainer_infra_failures", "Attempts at a trajectory that infrastructure failed.", labels=["run"]
    )
    ended = CounterMetricFamily(
        "turnwire_trainer_trajectories",
        "Trajectories that have ended, by state in the ledger; they are booked with their step.",
        labels=["run", "state"],
    )
    if standing is not None:
        failures.add_metric([name], standing.infra_failures)
        for key, value in standing.books.items():
            ended.add_metric([name, key], value)
    yield failures
    yield ended

    finished = None if run is None else run.events.latest("step")
    figures: Mapping[str, float] = {} if finished is None else finished.step.metrics
    yield one("last_progress_timestamp_seconds", "When the run last got on, since the epoch.", _progress(run))
    for figure, (metric, help_text) in FIGURES.items():
        yield one(metric, help_text, figures.get(figure))
    for prefix, (metric, label, help_text) in FAMILIES.items():
        values = {
            key.removeprefix(prefix): value
            for key, value in figures.items()
            if key.startswith(prefix) and not key.endswith("/mean")
        }
        yield _by(label, metric, help_text, values)
    evaluated = None if run is None else run.events.latest("evaluation")
    accuracy: Mapping[str, float] = {} if evaluated is None else evaluated.evaluation.accuracy
    yield _by("source", "accuracy_ratio", "Mean reward in the last evaluation, by data source.", accuracy)
