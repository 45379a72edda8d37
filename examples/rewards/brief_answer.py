"""A reward of your own: the right answer, and a little more for few tool calls."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trainer_service.data.task import Task
from trainer_service.rewards.base import Attempt, Reward, Score


class BriefAnswerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """bonus: for a right answer with at most one tool call; half of it for two, and so on."""

    bonus: Annotated[float, msgspec.Meta(ge=0)] = 0.2


class BriefAnswer(Reward):
    """1 for the right answer, plus a bonus that shrinks with each tool call."""

    name = "brief_answer"
    options_type = BriefAnswerOptions

    def score(self, task: Task, attempt: Attempt) -> Score:
        right = float(attempt.final_answer is not None and attempt.final_answer.strip() == str(task.ground_truth))
        brief = right / max(1, len(attempt.outcomes()))
        return Score(right + self.options.bonus * brief, {"right": right, "brief": brief})
