"""1 when the final answer is the ground truth, letter by letter."""

from __future__ import annotations

import msgspec

from trainer_service.data.task import Task
from trainer_service.rewards.base import Attempt, Reward, accepted


class ExactMatchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ignore_case: letters match in either case. White space around the answer never counts."""

    ignore_case: bool = False


class ExactMatch(Reward):
    """The final answer equals the ground truth, or one of several."""

    name = "exact_match"
    options_type = ExactMatchOptions

    def score(self, task: Task, attempt: Attempt) -> float:
        right = [self._normal(answer) for answer in accepted(task.ground_truth)]
        return float(attempt.final_answer is not None and self._normal(attempt.final_answer) in right)

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self.options.ignore_case else text.strip()
