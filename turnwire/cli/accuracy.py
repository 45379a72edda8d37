"""Accuracies for people and programs, so that one over fewer tasks never looks like one over all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnwire.cli import output
from turnwire.v1 import trainer_pb2


def sources(*evaluations: trainer_pb2.Evaluation | None) -> list[str]:
    """Data sources that were evaluated, those without an accuracy too."""
    return sorted({name for item in evaluations if item is not None for name in (*item.accuracy, *item.failures)})


def text(evaluation: trainer_pb2.Evaluation | None, source: str) -> str:
    """As `0.900`; `0.900*` if trajectories failed; `none` if all of them did; empty if there were none."""
    if evaluation is None or source not in sources(evaluation):
        return ""
    if source not in evaluation.accuracy:
        return "none*"
    return f"{evaluation.accuracy[source]:.3f}{'*' if source in evaluation.failures else ''}"


def gain(before: trainer_pb2.Evaluation | None, after: trainer_pb2.Evaluation, source: str) -> float | None:
    """After minus before, where both are known."""
    if before is None or source not in before.accuracy or source not in after.accuracy:
        return None
    return after.accuracy[source] - before.accuracy[source]


def tasks(evaluation: trainer_pb2.Evaluation, source: str) -> str:
    """How many tasks an accuracy is over: `20`, or `16 of 20`."""
    judged, lost = evaluation.tasks[source], evaluation.failures[source].tasks if source in evaluation.failures else 0
    return f"{judged} of {judged + lost}" if lost else str(judged)


def footnotes(*evaluations: trainer_pb2.Evaluation | None) -> Iterator[str]:
    """What the stars mean, one line each."""
    for evaluation in filter(None, evaluations):
        for source, failures in sorted(evaluation.failures.items()):
            when = f"after step {evaluation.step}" if evaluation.step else "before training"
            how = f"over {tasks(evaluation, source)} tasks" if evaluation.tasks[source] else "no accuracy"
            yield f"* {source} {when}: {failures.trajectories} trajectories failed, {how}; the first: {failures.reason}"


def as_json(evaluation: trainer_pb2.Evaluation) -> dict[str, float | None]:
    """By data source; null where there is none."""
    return {name: evaluation.accuracy.get(name) for name in sources(evaluation)}


def failures_json(evaluation: trainer_pb2.Evaluation | None) -> dict[str, Any]:
    """By data source, what failed; only sources of which something did."""
    return (
        {} if evaluation is None else {name: output.plain(item) for name, item in sorted(evaluation.failures.items())}
    )
