"""1 when the final answer equals an accepted one after SQuAD's normalisation."""

from __future__ import annotations

from trainer_service.data.task import Task
from trainer_service.rewards._qa import normalize
from trainer_service.rewards.base import Attempt, Reward, accepted


class QaExactMatch(Reward):
    """Question answering by exact match."""

    name = "qa_exact_match"

    def score(self, task: Task, attempt: Attempt) -> float:
        right = {normalize(answer) for answer in accepted(task.ground_truth)}
        return float(attempt.final_answer is not None and normalize(attempt.final_answer) in right)
