"""What is left of a run for people: `summary.json` and `learning_curves.png`.

`summary.json`: run_id, name, seed, seconds, steps, parameters, accuracy {source: {before, after}}, evaluations (by
step, {source: accuracy}), evaluation_failures (by step, {source: {trajectories, tasks, reason}}: what accuracies leave
out), ledger (trajectories by state, and the reasons of `failures`), config. `seconds` is the wall time from start to
end, evaluations included; of a resumed run, of all its processes together. What is not known is null.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trainer_service.accuracy import Failures
from trainer_service.config import RunConfig

if TYPE_CHECKING:
    from trainer_service.record import RunRecord

Evaluations = Mapping[int, Mapping[str, float | None]]
EvaluationFailures = Mapping[int, Mapping[str, Failures]]
_SMOOTH = 0.5
"""Weight of the newest step in the drawn curve; the raw values stay visible behind it."""


def before_and_after(evaluations: Evaluations) -> dict[str, dict[str, float | None]]:
    """By data source, the evaluation before training (of step 0) and the last one after a step; None: there is none."""
    before, last = evaluations.get(0, {}), max(evaluations, default=0)
    after = evaluations[last] if last > 0 else {}
    return {source: {"before": before.get(source), "after": after.get(source)} for source in sorted({*before, *after})}


def summary(
    run_id: str, config: RunConfig, *, steps: int, parameters: int, record: RunRecord, books: dict[str, Any]
) -> dict[str, Any]:
    """What summary.json holds."""
    return {
        "run_id": run_id,
        "name": config.name,
        "seed": config.seed,
        "seconds": round(record.seconds, 2),
        "steps": steps,
        "parameters": parameters,
        "accuracy": before_and_after(record.evaluations),
        "evaluations": {str(step): accuracy for step, accuracy in sorted(record.evaluations.items())},
        "evaluation_failures": {
            str(step): {source: msgspec.structs.asdict(failures) for source, failures in of_step.items()}
            for step, of_step in sorted(record.evaluation_failures.items())
        },
        "ledger": {**record.ledger.counts(), "failures": books["failures"]},
        "config": msgspec.to_builtins(config),
    }


def read_series(metrics: Path) -> dict[str, list[tuple[int, float]]]:
    """Every metric of the steps in a metrics.jsonl, by name."""
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with metrics.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            if entry.pop("kind") == "step":
                step = entry.pop("step")
                for name, value in entry.items():
                    series[name].append((step, value))
    return series


def draw_curves(
    metrics: Path, evaluations: Evaluations, failures: EvaluationFailures, title: str, target: Path
) -> None:
    """Reward and tool use per data source over the steps, and accuracy on held-out tasks before and after. A star marks
    an accuracy that is not over all trajectories.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - heavy, and only at the end

    series = read_series(metrics)
    sources = sorted(
        name.removeprefix("reward/") for name in series if name.startswith("reward/") and name != "reward/mean"
    )
    colours = dict(zip(sources, _colours(len(sources)), strict=True))
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    reward, used, accuracy = figure.subplots(1, 3, width_ratios=[1.25, 1.25, 1])
    for axis, prefix, heading in ((reward, "reward", "training reward"), (used, "tool_use", "share that used a tool")):
        for source in sources:
            points = series.get(f"{prefix}/{source}", [])
            steps, values = [step for step, _ in points], [value for _, value in points]
            axis.plot(steps, values, color=colours[source], alpha=0.2, linewidth=1)
            axis.plot(steps, _smooth(values), color=colours[source], linewidth=2, label=source)
        axis.set_title(heading, loc="left", fontsize=11)
        axis.set_xlabel("step")
        axis.set_ylim(-0.02, max(1.02, axis.get_ylim()[1]))
    if sources:
        reward.legend(frameon=False, loc="lower right")
    partial = {"before": failures.get(0, {}), "after": failures.get(max(evaluations, default=0), {})}
    _bars(accuracy, before_and_after(evaluations), partial, colours)
    for axis in (reward, used, accuracy):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25, linewidth=0.7)
        axis.set_axisbelow(True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.savefig(str(target), dpi=150)


def _bars(
    axis: Any,
    accuracy: Mapping[str, Mapping[str, float | None]],
    partial: Mapping[str, Mapping[str, Failures]],
    colours: Mapping[str, str],
) -> None:
    note = "\n* some trajectories failed and are left out" if any(partial.values()) else ""
    axis.set_title(f"held-out accuracy, before and after{note}", loc="left", fontsize=11)
    for place, (source, values) in enumerate(accuracy.items()):
        colour = colours.get(source, "#777777")
        for offset, when, alpha in ((-0.2, "before", 0.4), (0.2, "after", 1.0)):
            value = values[when]
            if value is None:
                continue
            axis.bar(place + offset, value, width=0.36, color=colour, alpha=alpha)
            text = f"{value:.2f}{'*' if source in partial[when] else ''}"
            axis.text(place + offset, value + 0.02, text, ha="center", va="bottom", fontsize=9)
    axis.set_xticks(range(len(accuracy)), [source.rpartition("/")[2] for source in accuracy])
    axis.set_ylim(0, 1.12)


def _smooth(values: list[float]) -> list[float]:
    result: list[float] = []
    for value in values:
        result.append(value if not result else _SMOOTH * value + (1 - _SMOOTH) * result[-1])
    return result


def _colours(count: int) -> list[str]:
    palette = [
        "#0072B2",
        "#D55E00",
        "#009E73",
        "#CC79A7",
        "#E69F00",
        "#56B4E9",
        "#7A5195",
        "#666666",
    ]  # told apart by all
    return [palette[number % len(palette)] for number in range(count)]
