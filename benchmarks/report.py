"""What benchmarks share: results as a table and as JSON, processor time of process trees, percentiles."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


@dataclass
class Result:
    """Rows share their keys; `notes` say what the sides are and what the aim was."""

    title: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    quick: bool = False
    seconds: float = 0.0


def show(result: Result) -> None:
    """As a table."""
    table = Table(title=result.title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    columns = list(dict.fromkeys(key for row in result.rows for key in row))
    for column in columns:
        text = any(isinstance(row.get(column), str) for row in result.rows)
        table.add_column(column, justify="left" if text else "right")
    for row in result.rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console = Console(highlight=False, width=None if Console().is_terminal else 150)
    console.print(table)
    for note in result.notes:
        console.print(note, style="dim")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(name: str, result: Result, folder: Path) -> Path:
    """As JSON, with what the machine is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {
        "name": name,
        "title": result.title,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(result.seconds, 1),
        "quick": result.quick,
        "machine": machine(),
        "rows": result.rows,
        "notes": result.notes,
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def machine() -> dict[str, Any]:
    """What the figures were taken on, and how busy it was: figures of a shared machine are only ratios."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def cpu_seconds(*pids: int) -> float:
    """Processor time so far of these processes, and of the descendants of all but this one: those that run, and those
    that have ended and were waited for."""
    total = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        own = process.cpu_times()
        total += own.user + own.system
        if pid == os.getpid():  # the services are its children
            continue
        total += own.children_user + own.children_system
        for member in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = member.cpu_times()
                total += times.user + times.system
    return total


def ended_children_seconds() -> float:
    """Processor time of this process's children that have ended."""
    times = psutil.Process().cpu_times()
    return times.children_user + times.children_system


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
