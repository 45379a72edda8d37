"""What commands print: for people through rich, for programs as JSON on stdout."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwire.errors import Problem

console = Console(highlight=False, markup=False)
"""Results go to stdout. What stands in brackets is text here, since texts come from logs, data and policies."""
notes = Console(stderr=True, highlight=False, markup=False)
"""What happens on the way goes to stderr, so that `--json` stays clean."""


def near(path: str | Path) -> str:
    """A path as one would type it here: relative where it is below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def this_command() -> str:
    """How to call this command again: by name where a shell finds it, else by its path."""
    called = Path(sys.argv[0])
    found = shutil.which("turnwire")
    if called.name != "turnwire" or (found is not None and Path(found).resolve() == called.resolve()):
        return "turnwire"
    return near(called)


def print_json(value: Any, indent: int | None = 2) -> None:
    """One JSON document on stdout; in one line without `indent`, for readers that go on reading."""
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def plain(message: Message) -> Any:
    """A protobuf message as plain values, every field present, names as in the contract."""
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table in the house style. Columns that begin with `>` are aligned right."""
    result = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        right = column.startswith(">")
        result.add_column(column.lstrip(">"), justify="right" if right else "left")
    return result


def print_problems(problems: Iterable[Problem], style: str) -> None:
    """Each with its key in colour, wrapped under itself."""
    for problem in problems:
        if not notes.is_terminal:
            notes.print(f"  {problem}", soft_wrap=True)
            continue
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=1)
        grid.add_column(overflow="fold")
        where = Text.assemble((problem.key, style), ": ") if problem.key else Text()
        grid.add_row(" ", where.append(problem.message))
        notes.print(grid)


def as_json(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Problems for programs."""
    return [{"key": problem.key, "message": problem.message} for problem in problems]
