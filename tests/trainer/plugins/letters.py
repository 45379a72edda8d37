"""A reward that a random policy can learn from: the share of small letters in what it wrote."""

from __future__ import annotations

from trainer_service.data.task import Task
from trainer_service.rewards.base import Attempt, Reward, Score


class Letters(Reward):
    """The more small letters, the better."""

    name = "letters"

    def score(self, task: Task, attempt: Attempt) -> Score:
        text = "".join(turn.action for turn in attempt.turns)
        share = sum(letter.islower() for letter in text) / max(1, len(text))
        return Score(share, {"letters": share, "length": float(len(text))})
