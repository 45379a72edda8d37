"""1 when the rows of the trajectory's last SQL result are the ground truth's rows.

Nothing is executed here: what the policy wrote ran in the tool's sandbox, and its rows came back as data. The ground
truth is
rows too: a list of rows, `{"rows": [...], "ordered": true}`, the JSON text of one of these, or one value.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import msgspec

from trainer_service.data.task import Task
from trainer_service.rewards.base import Attempt, Reward


class SqlResultOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """tool: whose results are judged. ordered: the rows' order counts too (a ground truth may say so itself).
    relative: how far numbers may be off."""

    tool: str = "sql"
    ordered: bool = False
    relative: Annotated[float, msgspec.Meta(ge=0)] = 1e-6


class SqlResult(Reward):
    """The last successful query returned the right rows. Column names do not count, their order does."""

    name = "sql_result"
    options_type = SqlResultOptions

    def check_task(self, task: Task) -> None:
        _ground_truth(task.ground_truth)

    def score(self, task: Task, attempt: Attempt) -> float:
        right, ordered = _ground_truth(task.ground_truth)
        results = [outcome.data for outcome in attempt.outcomes(self.options.tool) if not outcome.error]
        if not results or not isinstance(results[-1].get("rows"), list) or results[-1].get("truncated"):
            return 0.0
        rows = results[-1]["rows"]
        return float(self._same(rows, right, ordered or self.options.ordered))

    def _same(self, rows: list[Any], right: list[Any], ordered: bool) -> bool:
        if len(rows) != len(right):
            return False
        if not ordered:
            rows, right = sorted(rows, key=_row_key), sorted(right, key=_row_key)
        return all(
            isinstance(row, list) and len(row) == len(other) and all(map(self._equal, row, other))
            for row, other in zip(rows, right, strict=True)
        )

    def _equal(self, one: Any, other: Any) -> bool:
        if isinstance(one, int | float) and isinstance(other, int | float):
            return one == other or math.isclose(one, other, rel_tol=self.options.relative)
        return type(one) is type(other) and one == other


def _row_key(row: Any) -> list[tuple[str, Any]]:
    cells = row if isinstance(row, list) else [row]
    return [("n", float(cell)) if isinstance(cell, int | float) else ("t", str(cell)) for cell in cells]


def _ground_truth(value: Any) -> tuple[list[Any], bool]:
    """Rows, and whether their order counts."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        value = json.loads(value)
    ordered = False
    if isinstance(value, dict):
        ordered, value = bool(value.get("ordered", False)), value.get("rows")
    if isinstance(value, str | int | float):
        value = [[value]]
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise ValueError(f"the ground truth of an SQL task is a list of rows, not {value!r}")
    return value, ordered
