"""`turnwire view`: trajectories of a run, turn by turn."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.console import Console

from turnwire.cli import output, records, trajectory_view
from turnwire.cli.records import Choice, Record


@click.command("view")
@click.argument("run")
@click.option("--step", type=int, help="Trajectories of this step.  [default: the latest]")
@click.option("--index", type=int, help="Which of them, from 0.  [default: the one with the most tool calls]")
@click.option("--eval", "evaluation", is_flag=True, help="Of the evaluations, not of training.")
@click.option("--source", metavar="NAME", help="Only of this data source, as demo/sql.")
@click.option("--failed", is_flag=True, help="Only those with a reward below 1.")
@click.option("--all", "every", is_flag=True, help="All that fit, one after the other.")
@click.option("--tokens", is_flag=True, help="One line a token: id, mask, logprob, weight version.")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the picture to an HTML file.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Write the picture to an SVG file.")
@click.option("--runs-folder", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(
    *,
    run: str,
    step: int | None,
    index: int | None,
    evaluation: bool,
    source: str | None,
    failed: bool,
    every: bool,
    tokens: bool,
    as_json: bool,
    html: Path | None,
    svg: Path | None,
    runs_folder: Path,
) -> None:
    """Show a trajectory of RUN (its folder or id), turn by turn.

    Action tokens and observation tokens have different colours; logprobs, rewards, stop reasons and timings are there.
    """
    found = records.select(records.find_run(run, runs_folder), Choice(evaluation, step, source, failed))
    if index is not None and not 0 <= index < len(found):
        raise click.UsageError(f"--index {index}: there are {len(found)}, from 0 to {len(found) - 1}")
    chosen = records.most_telling(found) if index is None else index
    shown = found if every else [found[chosen]]
    if as_json:
        output.print_json(shown)
        return
    if html or svg:
        _export(shown, tokens, html, svg)
        return
    if every and output.console.is_terminal:
        os.environ.setdefault("LESS", "-R")
        with output.console.pager(styles=True):
            _print(output.console, shown, tokens)
        return
    _print(output.console, shown, tokens)
    if not every and len(found) > 1:
        output.notes.print(f"{chosen} of 0 to {len(found) - 1}; others with --index, or --all", style="dim")


def _print(console: Console, shown: list[Record], tokens: bool) -> None:
    for record in shown:
        console.print(trajectory_view.show(record, tokens=tokens))
        console.print()
    console.print(trajectory_view.legend())


def _export(shown: list[Record], tokens: bool, html: Path | None, svg: Path | None) -> None:
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=110, file=nowhere, force_terminal=True, color_system="truecolor")
        _print(console, shown, tokens)
    if html:
        console.save_html(str(html), clear=False)
        output.notes.print(f"wrote {html}")
    if svg:
        console.save_svg(str(svg), title="turnwire view", clear=False)
        output.notes.print(f"wrote {svg}")
