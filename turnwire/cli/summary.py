"""How a run ended: for people a table of before and after and what to try next, for programs the same as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from turnwire.cli import output
from turnwire.cli.progress import RunState, state_name
from turnwire.v1 import trainer_pb2

PLOT_NAME = "learning_curves.png"
"""In a run's folder."""


def print_summary(state: RunState) -> None:
    """What became of the run."""
    before, after = state.before_and_after()
    if after is not None:
        output.console.print(_table(before, after))
    elif before is not None:
        print_evaluation(before)
    print_failure(state)
    folder, command = output.near(state.folder) if state.folder else state.run_id, output.this_command()
    if state.folder:
        output.console.print(Text.assemble("run folder  ", (folder, "bold")), soft_wrap=True)
        if (plot := Path(state.folder) / PLOT_NAME).is_file():
            output.console.print(Text(f"plot        {output.near(plot)}"), soft_wrap=True)
    if state.state in (trainer_pb2.RUN_STATE_STOPPED, trainer_pb2.RUN_STATE_FAILED) and state.checkpoint:
        output.console.print(f"go on with  {command} train --resume {folder}", soft_wrap=True)
    if state.evaluations or state.step:
        output.console.print(f"see one     {command} view {folder}", soft_wrap=True)


def print_failure(state: RunState) -> None:
    """Why the run failed, if it did."""
    if state.state == trainer_pb2.RUN_STATE_FAILED:
        output.notes.print(Text.assemble(("the run failed: ", "bold red"), state.detail or "no reason was given"))


def print_evaluation(evaluation: trainer_pb2.Evaluation) -> None:
    """One evaluation, by domain."""
    table = output.table("domain", ">accuracy", ">tasks")
    for source, accuracy in sorted(evaluation.accuracy.items()):
        table.add_row(source, f"[bold]{accuracy:.3f}[/]", str(evaluation.tasks[source]))
    output.console.print(table)


def _table(before: trainer_pb2.Evaluation | None, after: trainer_pb2.Evaluation) -> Any:
    table = output.table("domain", ">before", ">after", ">gain", ">tasks")
    for source in sorted(after.accuracy):
        late = after.accuracy[source]
        early = before.accuracy[source] if before is not None and source in before.accuracy else None
        table.add_row(
            source,
            "" if early is None else f"{early:.3f}",
            f"[bold]{late:.3f}[/]",
            "" if early is None else f"[{'green' if late >= early else 'red'}]{late - early:+.3f}[/]",
            str(after.tasks[source]),
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
        "before": None if before is None else dict(sorted(before.accuracy.items())),
        "after": None if after is None else dict(sorted(after.accuracy.items())),
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
        "accuracy": dict(sorted(last.accuracy.items())),
        "tasks": dict(sorted(last.tasks.items())),
        "metrics": dict(sorted(last.metrics.items())),
    }


def _error(state: RunState) -> str:
    return state.detail if state.state == trainer_pb2.RUN_STATE_FAILED else ""
