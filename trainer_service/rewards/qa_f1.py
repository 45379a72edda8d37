"""Overlap of words between the final answer and the closest accepted one, after SQuAD's normalisation: 0 to 1."""

from __future__ import annotations

from trainer_service.data.task import Task
from trainer_service.rewards._qa import f1
from trainer_service.rewards.base import Attempt, Reward, accepted


class QaF1(Reward):
    """Question answering by F1 of words."""

    name = "qa_f1"

    def score(self, task: Task, attempt: Attempt) -> float:
        right = accepted(task.ground_truth)
        return 0.0 if attempt.final_answer is None else max(f1(attempt.final_answer, answer) for answer in right)
