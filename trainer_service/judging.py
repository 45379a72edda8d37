"""Rewards applied: in worker threads, with a time limit, and with what they raise told apart from what they answer."""

from __future__ import annotations

import asyncio
import math
import os
from concurrent.futures import ThreadPoolExecutor

from trainer_service.data.task import Task
from trainer_service.rewards.base import Attempt, Score
from trainer_service.rewards.registry import Judges
from trainer_service.tasks_config import RewardConfig
from turnwire.security.config import PLAINTEXT, ConnectionSecurity

_THREADS = min(32, max(4, os.cpu_count() or 1))


class RewardError(Exception):
    """A reward that could not be computed: the trajectory fails, with this as the reason. Never a reward of 0."""


class Judge:
    """The rewards of a run."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError where a reward cannot be created."""
        self._judges = Judges(config)
        self._timeout = config.timeout_seconds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="reward")
        self._free = asyncio.Semaphore(_THREADS)

    async def connect(self, tool_target: str, security: ConnectionSecurity = PLAINTEXT) -> None:
        """Let rewards that call a tool reach the tool service. Raises TurnwireError where they cannot."""
        await asyncio.to_thread(self._judges.connect, tool_target, security)

    async def score(self, task: Task, attempt: Attempt) -> Score:
        """The reward of a trajectory. Raises RewardError."""
        reward = self._judges.of(task.data_source)
        loop = asyncio.get_running_loop()
        try:
            async with self._free:  # a trajectory that waits for its turn uses up no time
                result = await asyncio.wait_for(
                    loop.run_in_executor(self._threads, reward.score, task, attempt), self._timeout
                )
            score = result if isinstance(result, Score) else Score(float(result))
        except TimeoutError as error:
            raise RewardError(f"reward {reward.name}: no answer in {self._timeout:g} s") from error
        except Exception as error:
            raise RewardError(f"reward {reward.name}: {type(error).__name__}: {error}") from error
        if not math.isfinite(score.value) or not all(map(math.isfinite, score.parts.values())):
            raise RewardError(f"reward {reward.name}: {score} is not a finite number")
        return score

    def close(self) -> None:
        """Release the rewards. A call that hangs keeps its thread until it ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._judges.close()
