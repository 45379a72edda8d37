"""From what PostgreSQL answers to what a turn of the `sql` tool is: its status, its text, its data."""

from __future__ import annotations

import math
from typing import Any

from tool_service.sandbox.base import TurnResult, TurnStatus
from tool_service.sql.connection import Cell, Outcome, ServerError, decoded

_BOOL, _BYTEA, _NUMERIC = 16, 17, 1700
_INTEGERS = frozenset({20, 21, 23, 26})
_FLOATS = frozenset({700, 701})
_EXACT_DIGITS = 15
"""Decimal digits that a double always holds."""

_OURS = frozenset({"53000", "53100", "53300", "58000", "58030", "XX001", "XX002"})
"""SQLSTATEs of an outage: no room on the server's disk, no connections, I/O errors, damaged files."""
_SHUTDOWNS = frozenset({"57P01", "57P02", "57P03", "57P04"})
"""With which the server, or somebody from outside, ends a session. Else its agent has: by a time limit for idle
sessions, or by `exit_on_error`."""
_SEVERAL = "exec_parse_message"
"""Where the server refuses several statements at once."""
_WIDTH = 60
"""Characters of a statement's line that are shown on each side of an error's position."""
_MOST = 2000
"""Characters of each part of an error."""


def failure(error: ServerError, statement: str) -> TurnResult:
    """An error as a turn's result; `detail` is what the agent reads."""
    return TurnResult(status_of(error), detail=describe(error, statement), value={"sqlstate": error.code})


def status_of(error: ServerError) -> TurnStatus:
    """Whose failure it is. An agent may raise any SQLSTATE, but not as if the server itself had raised it."""
    raised = error.fields.get("R", "exec_stmt_raise") == "exec_stmt_raise"
    if not raised and error.code in (_OURS | _SHUTDOWNS if error.fatal else _OURS):
        return TurnStatus.INFRA
    if error.fatal:
        return TurnStatus.SESSION_LOST
    return TurnStatus.MEMORY if error.code == "53200" and not raised else TurnStatus.TOOL_ERROR


def describe(error: ServerError, statement: str) -> str:
    """As psql shows it: the message, the place in the statement, DETAIL, HINT, CONTEXT."""
    fields = error.fields
    lines = [fields.get("M", "")[:_MOST]]
    if fields.get("P", "").isdigit():
        lines += _place(statement, int(fields["P"]))
    hint = fields.get("H", "")
    if error.code == "42601" and fields.get("R") == _SEVERAL:
        hint = "One call takes one statement."
    for name, text in (("DETAIL", fields.get("D", "")), ("HINT", hint), ("CONTEXT", fields.get("W", ""))):
        if text:
            lines.append(f"{name}: {text[:_MOST]}")
    return "\n".join(lines)


def _place(statement: str, position: int) -> list[str]:
    """The line of a statement that an error points to (from 1), and a caret below."""
    before, after = statement[: position - 1], statement[position - 1 :]
    head = before.rpartition("\n")[2].replace("\t", " ")
    tail = after.partition("\n")[0].replace("\t", " ").rstrip("\r")
    start, end = head[-_WIDTH:], tail[:_WIDTH]
    number = f"LINE {before.count(chr(10)) + 1}: " + ("..." if len(head) > len(start) else "")
    return [number + start + end + ("..." if len(tail) > len(end) else ""), " " * len(number + start) + "^"]


def table_of(outcome: Outcome, shown_rows: int) -> dict[str, Any]:
    """A result as the `sql` runtime of the sandboxes gives it, and `shown`: the first rows as the server wrote them."""
    kinds = [kind for _, kind in outcome.columns]
    return {
        "columns": [name for name, _ in outcome.columns],
        "rows": [list(map(_value, row, kinds)) for row in outcome.rows],
        "shown": [[_shown(cell) for cell in row] for row in outcome.rows[:shown_rows]],
        "truncated": outcome.truncated,
        "changes": outcome.changes,
    }


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "NULL"
    return decoded(cell.data) if len(cell.data) == cell.size else f"{_head(cell)}... ({cell.size} bytes)"


def _head(cell: Cell) -> str:
    """The whole characters of a cell that was cut."""
    return cell.data.decode("utf-8", "ignore")


def _value(cell: Cell | None, kind: int) -> Any:
    """A value as JSON, in the forms that the sandboxes' runtime has: a float, a blob, a text that was cut."""
    if cell is None:
        return None
    text = _head(cell)
    if kind == _BYTEA and text.startswith("\\x"):
        return {"blob": text[2:], "bytes": (cell.size - 2) // 2}
    if len(cell.data) < cell.size:
        return {"text": text, "bytes": cell.size}
    if kind == _BOOL:
        return text == "t"
    try:
        return _number(text, kind)
    except ValueError:
        return decoded(cell.data)


def _number(text: str, kind: int) -> int | float | dict[str, str]:
    """Raises ValueError for what is no number, or one that a double would change."""
    if kind in _INTEGERS:
        return int(text)
    if kind in _FLOATS:
        value = float(text)
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind == _NUMERIC and len(text) <= _EXACT_DIGITS:
        value = float(text)
        return int(text) if "." not in text else value
    raise ValueError
