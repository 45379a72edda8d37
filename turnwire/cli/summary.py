"""How a run ended: for people a table of before and after and what to try next, for programs the same as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from turnwire.cli import accuracy, output
from turnwire.cli.progress import RunState, state_name
from turnwire.v1 import trainer_pb2

PLOT_NAME = "learning_curves.png"
"""In a run's folder."""


def print_summary(state: RunState, there: str = "") -> None:
    """What became of the run. `there`: the options that reach its trainer, if that was not started for it."""
    before, after = state.before_and_after()
    if after is not None:
        output.console.print(_table(before, after))
        _print_footnotes(before, after)
    elif before is not None:
        print_evaluation(before)
    print_failure(state)
    folder, command = output.near(state.folder) if state.folder else state.run_id, output.this_command()
    if state.folder:
        output.console.print(Text.assemble("run folder  ", (folder, "bold")), soft_wrap=True)
        if (plot := Path(state.folder) / PLOT_NAME).is_file():
            output.console.print(Text(f"plot        {output.near(plot)}"), soft_wrap=True)
    if state.state in (trainer_pb2.RUN_STATE_STOPPED, trainer_pb2.RUN_STATE_FAILED) and state.checkpoint:
        output.console.print(f"go on with  {command} train --resume {folder}{there}", soft_wrap=True)
    if state.evaluations or state.step:
        output.console.print(f"see one     {command} view {folder}", soft_wrap=True)


def print_failure(state: RunState) -> None:
    """Why the run failed, if it did."""
    if state.state == trainer_pb2.RUN_STATE_FAILED:
        output.notes.print(Text.assemble(("the run failed: ", "bold red"), state.detail or "no reason was given"))


def print_evaluation(evaluation: trainer_pb2.Evaluation) -> None:
    """One evaluation, by domain."""
    table = output.table("domain", ">accuracy", ">tasks")
    for source in accuracy.sources(evaluation):
        table.add_row(source, Text(accuracy.text(evaluation, source), "bold"), accuracy.tasks(evaluation, source))
    output.console.print(table)
    _print_footnotes(evaluation)


def _print_footnotes(*evaluations: trainer_pb2.Evaluation | None) -> None:
    for line in accuracy.footnotes(*evaluations):
        output.console.print(Text(line, "yellow"), soft_wrap=True)


def _table(before: trainer_pb2.Evaluation | None, after: trainer_pb2.Evaluation) -> Any:
    table = output.table("domain", ">before", ">after", ">gain", ">tasks")
    for source in accuracy.sources(before, after):
        gain = accuracy.gain(before, after, source)
        table.add_row(
            source,
            accuracy.text(before, source),
            Text(accuracy.text(after, source), "bold"),
            "" if gain is None else Text(f"{gain:+.3f}", "green" if gain >= 0 else "red"),
            accuracy.tasks(after, source),
        )
    return table


def summary_json(state: RunState) -> dict[str, Any]:
    """What became of the run, for programs."""
    before, after = state.before_and_after()
    return {
        "run_id": state.run_id,
        "state": state_name(state.state),
        "error": _error(state),
        "folder": state.folder,
        "step": state.step,
        "total_steps": state.total_steps,
        "before": None if before is None else accuracy.as_json(before),
        "after": None if after is None else accuracy.as_json(after),
        "failures": {"before": accuracy.failures_json(before), "after": accuracy.failures_json(after)},
        "metrics": dict(sorted(state.metrics.items())),
        "checkpoint": state.checkpoint,
    }


def evaluation_json(state: RunState) -> dict[str, Any]:
    """What an evaluation found, for programs."""
    last = state.evaluations[-1] if state.evaluations else trainer_pb2.Evaluation()
    return {
        "run_id": state.run_id,
        "state": state_name(state.state),
        "error": _error(state),
        "folder": state.folder,
        "accuracy": accuracy.as_json(last),
        "tasks": dict(sorted(last.tasks.items())),
        "failures": accuracy.failures_json(last),
        "metrics": dict(sorted(last.metrics.items())),
    }


def _error(state: RunState) -> str:
    return state.detail if state.state == trainer_pb2.RUN_STATE_FAILED else ""
