"""What `turnwire sandbox check` shows: progress, a table, the facts, and a last line that says it all."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from tool_service.sandbox.hostile import CASES, GROUPS, Outcome, Report
from turnwire.cli import output
from turnwire.cli.progress import clock

_CASES = {case.id: case for case in CASES}
_LINE_SECONDS = 20.0
"""Between two lines of progress, where there is no terminal to draw on."""
_PROBLEM_CHARACTERS = 600


class Progress:
    """A bar on a terminal, a line now and then elsewhere; what does not hold is told at once in both."""

    def __init__(self) -> None:
        self._done = self._failed = 0
        self._last_line = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=output.notes, transient=True, disable=not output.notes.is_terminal)
        self._task = self._bar.add_task("making a first sandbox", total=None)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, outcome: Outcome, total: int) -> None:
        """One case more, of `total`."""
        self._done += 1
        self._bar.update(self._task, description=_alone(outcome.at_once), completed=self._done, total=total)
        if outcome.problems:
            self._failed += 1
            output.notes.print(f"{outcome.case} does not hold", style="red", soft_wrap=True)
        if not output.notes.is_terminal and time.monotonic() - self._last_line > _LINE_SECONDS:
            self._last_line = time.monotonic()
            output.notes.print(f"{self._done} of {total}, {self._failed} do not hold")


def show(report: Report, verbose: bool) -> None:
    """For people."""
    output.console.print(_by_case(report) if verbose else _by_group(report))
    _show_failures(report)
    facts = output.table("limits", "as found, and as seen from inside a sandbox")
    for name, fact in report.facts.items():
        facts.add_row(name, fact)
    output.console.print(facts)
    if report.not_promised and verbose:
        output.console.print(f"not promised, and not run: {', '.join(report.not_promised)}", style="dim")
    ran = {outcome.case for outcome in report.outcomes}
    what = f"{report.backend}, tier {report.tier}"
    how = " and ".join(dict.fromkeys(_alone(outcome.at_once) for outcome in report.outcomes))
    if report.holds:
        last = f"{what}: all {len(ran)} cases hold, {how} ({clock(report.seconds)})"
    else:
        failed = {outcome.case for outcome in report.outcomes if outcome.problems}
        last = f"{what}: {len(failed)} of {len(ran)} cases do not hold ({clock(report.seconds)})"
    output.console.print(last, style="bold green" if report.holds else "bold red", soft_wrap=True)


def as_json(report: Report) -> dict[str, Any]:
    """For programs."""
    runs: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        runs.setdefault(outcome.case, []).append(outcome)
    return {
        "backend": report.backend,
        "tier": report.tier,
        "ok": report.holds,
        "seconds": round(report.seconds, 3),
        "facts": report.facts,
        "problems": list(report.problems),
        "cases": [
            {
                "id": name,
                "rows": list(_CASES[name].rows),
                "tries": _CASES[name].tries,
                "survived": not any(outcome.problems for outcome in outcomes),
                "runs": [
                    {
                        "at_once": outcome.at_once,
                        "kinds": list(outcome.kinds),
                        "seconds": round(outcome.seconds, 3),
                        "problems": list(outcome.problems),
                    }
                    for outcome in outcomes
                ],
            }
            for name, outcomes in runs.items()
        ],
        "not_promised": list(report.not_promised),
    }


def _by_group(report: Report) -> Any:
    table = output.table("", "kind", ">rows", ">cases", ">survived", ">not promised", ">time")
    for letter, meaning in GROUPS.items():
        outcomes = [outcome for outcome in report.outcomes if _CASES[outcome.case].group == letter]
        left_out = [name for name in report.not_promised if _CASES[name].group == letter]
        if not outcomes and not left_out:
            continue
        names = {outcome.case for outcome in outcomes}
        survived = len(names - {outcome.case for outcome in outcomes if outcome.problems})
        rows = {row for name in names for row in _CASES[name].rows if row.startswith(letter or "-")}
        table.add_row(
            Text(letter, "bold"),
            meaning,
            str(len(rows) or ""),
            str(len(names)),
            Text(str(survived), "green" if survived == len(names) else "bold red"),
            str(len(left_out) or ""),
            _seconds(outcomes),
        )
    return table


def _by_case(report: Report) -> Any:
    table = output.table("case", "what it tries", "came to", ">time")
    for outcome in report.outcomes:
        kinds = " ".join(dict.fromkeys(outcome.kinds)).lower() or "ok"
        name = outcome.case if outcome.at_once == 1 else f"{outcome.case} ({outcome.at_once})"
        table.add_row(
            Text(name, "bold red" if outcome.problems else ""),
            _CASES[outcome.case].tries,
            Text(kinds, "dim"),
            _seconds([outcome]),
        )
    return table


def _show_failures(report: Report) -> None:
    for outcome in report.outcomes:
        for problem in outcome.problems:
            said = problem if len(problem) < _PROBLEM_CHARACTERS else problem[:_PROBLEM_CHARACTERS] + " ..."
            _show_failure(f"{outcome.case}, {_alone(outcome.at_once)}", f"{_CASES[outcome.case].tries}: {said}")
    for problem in report.problems:
        _show_failure("all cases together", problem)


def _show_failure(where: str, what: str) -> None:
    output.console.print(Text.assemble((where, "bold red"), f": {what}"), soft_wrap=True)


def _alone(at_once: int) -> str:
    return "one by one" if at_once == 1 else f"{at_once} at a time"


def _seconds(outcomes: Iterable[Outcome]) -> str:
    return f"{sum(outcome.seconds for outcome in outcomes):.1f} s"
