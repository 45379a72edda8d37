"""The verifier that comes with each dataset of `reasoning-gym`: 0 to 1. For tasks of the generator of that name."""

from __future__ import annotations

from typing import Any

from trainer_service.data.task import Task
from trainer_service.rewards.base import Attempt, Reward


class ReasoningGym(Reward):
    """Judged by the dataset that made the task."""

    name = "reasoning_gym"

    def score(self, task: Task, attempt: Attempt) -> float:
        import reasoning_gym  # noqa: PLC0415 - heavy, and only for its tasks

        entry: dict[str, Any] | None = task.extra.get("reasoning_gym")
        if entry is None:
            raise ValueError(f"task {task.task_id} is not one of the reasoning_gym generator")
        judge = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
        return float(judge(answer=attempt.final_answer, entry=entry))
