"""1 when the final answer is the right number, however written: `1,234.50`, `$1234.5`, `2469/2`, `5e-1`, `50%`."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Annotated, Any, Literal

import msgspec

from trainer_service.data.task import Task
from trainer_service.rewards.base import Attempt, Reward, accepted

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
_WHOLE = re.compile(rf"(?P<top>{_NUMBER})(?:\s*/\s*(?P<bottom>{_NUMBER}))?(?P<percent>\s*%)?")
_ANYWHERE = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d(?:[\d.]*\d)?(?:[eE][-+]?\d{1,3})?(?:\s*/\s*\d[\d,.]*)?\s*%?")
_MAX_DIGITS = 1000


class NumericOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """relative, absolute: how far the number may be off. read: the answer is the number alone, or its last number."""

    relative: Annotated[float, msgspec.Meta(ge=0)] = 1e-6
    absolute: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    read: Literal["whole", "last"] = "whole"


class Numeric(Reward):
    """The final answer is a number within tolerance of the ground truth."""

    name = "numeric"
    options_type = NumericOptions

    def check_task(self, task: Task) -> None:
        _numbers(task.ground_truth)

    def score(self, task: Task, attempt: Attempt) -> float:
        numbers = _numbers(task.ground_truth)
        text = attempt.final_answer or ""
        if self.options.read == "last":
            found = _ANYWHERE.findall(text[-_MAX_DIGITS:])
            text = found[-1].rstrip(".,") if found else ""
        given = parse_number(text)
        return float(given is not None and any(self._close(given, number) for number in numbers))

    def _close(self, given: Fraction, right: Fraction) -> bool:
        if given == right:
            return True
        try:
            return math.isclose(given, right, rel_tol=self.options.relative, abs_tol=self.options.absolute)
        except OverflowError:  # beyond float: only equality counts there
            return False


def _numbers(ground_truth: Any) -> list[Fraction]:
    """The numbers that a ground truth accepts. Raises ValueError."""
    numbers = [number for number in map(parse_number, accepted(ground_truth)) if number is not None]
    if len(numbers) < len(accepted(ground_truth)):
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    return numbers


def parse_number(text: str) -> Fraction | None:
    """The number that a text is, exactly; None if it is not one. A percentage is its hundredth."""
    text = text.strip().strip("$€£").replace("\N{MINUS SIGN}", "-").rstrip(".").strip()
    match = _WHOLE.fullmatch(text) if 0 < len(text) <= _MAX_DIGITS else None
    if match is None or not match["top"]:
        return None
    try:
        value = Fraction(match["top"].replace(",", ""))
        if match["bottom"]:
            value /= Fraction(match["bottom"].replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if match["percent"] else value
