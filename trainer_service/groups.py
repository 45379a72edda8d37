"""Groups of trajectories of one prompt: admitted, judged, and handed out in batches. The same code serves evaluation.

Invariants:

- Admission bounds staleness: `in flight + done <= (version + 1 + max_staleness) * batch`, where version counts updates
  and done counts groups that are finished, consumed ones included.
- Each admitted draw is handed out exactly once, or is among `open_draws` of the checkpoint and admitted again.
- With max_staleness 0 a batch is the next draws in their order: which trajectories a step trains on, and in which
  order, depends on the seed alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer_service import names
from trainer_service.config import RunConfig, SamplingConfig
from trainer_service.data.dataset import TrainingStream
from trainer_service.data.task import Task
from trainer_service.judging import Judge, RewardError
from trainer_service.ledger import Ledger, evaluation_key, train_key
from trainer_service.rewards.base import Score
from trainer_service.rollouts import Assignment, Lost, RolloutPool, Sampled, sampling_seed

GREEDY = "greedy"
"""The sample that is the baseline of estimators which need one."""


@dataclass(frozen=True)
class Judged:
    """A trajectory with its reward."""

    key: str
    task: Task
    sampled: Sampled
    score: Score


@dataclass(frozen=True)
class Failed:
    """A trajectory that has none, and why. It leaves both the loss and the baseline."""

    key: str
    task: Task
    reason: str


Member = Judged | Failed


@dataclass(frozen=True)
class Group:
    """All trajectories of one draw. `greedy` is the extra one that some estimators compare with."""

    draw: int
    task: Task
    members: tuple[Member, ...]
    greedy: Member | None = None


async def get_judged(pool: RolloutPool, judge: Judge, key: str, assignment: Assignment) -> Member:
    """One trajectory, sampled and judged."""
    result = await pool.sample(assignment)
    if isinstance(result, Lost):
        return Failed(key, assignment.task, result.reason)
    try:
        score = await judge.score(assignment.task, result.attempt)
    except RewardError as error:
        return Failed(key, assignment.task, str(error))
    return Judged(key, assignment.task, result, score)


class GroupFeed:
    """Training groups, from a stream of draws."""

    def __init__(
        self,
        config: RunConfig,
        *,
        stream: TrainingStream,
        pool: RolloutPool,
        judge: Judge,
        ledger: Ledger,
        version: int = 0,
        next_draw: int = 0,
        open_draws: Sequence[int] = (),
    ) -> None:
        """Start anew, or where a checkpoint was: `version` updates done, `open_draws` to be admitted again."""
        self._config = config
        self._stream, self._pool, self._judge, self._ledger = stream, pool, judge, ledger
        self._batch = config.training.prompts_per_step
        self._consumed = version * self._batch
        self._next_draw = next_draw
        self._running: dict[int, asyncio.Task[None]] = {}
        self._done: dict[int, Group] = {}
        self._admitted: dict[int, int] = {}
        self._changed = asyncio.Event()
        for draw in sorted(open_draws):
            self._start(draw, version)

    def admit(self, version: int, total: int) -> None:
        """Start as many groups as the bound allows at this version, and no more than the run of `total` steps will
        use.
        """
        limit = min(version + 1 + self._config.rollout.max_staleness, total) * self._batch
        while self._consumed + len(self._running) + len(self._done) < limit:
            self._start(self._next_draw, version)
            self._next_draw += 1

    async def batch(self, version: int) -> list[Group]:
        """The batch to train on at this version: the groups that would be too stale later, then the lowest draws that
        are finished, in order of draws. Raises what stops the run."""
        while True:
            for task in self._running.values():
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            due = {draw for draw, at in self._admitted.items() if at + self._config.rollout.max_staleness <= version}
            if len(self._done) >= self._batch and due <= self._done.keys():
                break
            self._changed.clear()
            await self._changed.wait()
        chosen = sorted(self._done, key=lambda draw: (draw not in due, draw))[: self._batch]
        self._consumed += len(chosen)
        for draw in chosen:
            del self._admitted[draw]
        return [self._done.pop(draw) for draw in sorted(chosen)]

    @property
    def position(self) -> tuple[int, list[int]]:
        """For a checkpoint: the next draw, and those that are admitted but not handed out."""
        return self._next_draw, sorted([*self._running, *self._done])

    async def close(self) -> None:
        """End what is in flight."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        for task in running:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def _start(self, draw: int, version: int) -> None:
        self._admitted[draw] = version
        task = asyncio.create_task(self._run(draw))
        self._running[draw] = task
        task.add_done_callback(lambda _: self._changed.set())

    async def _run(self, draw: int) -> None:
        task = self._stream.draw(draw)
        sampling = self._config.rollout.sampling
        samples: list[tuple[int | str, SamplingConfig]] = [
            (n, sampling) for n in range(self._config.rollout.group_size)
        ]
        needs_greedy = self._config.algorithm.advantage_estimator in names.NEEDS_GREEDY_BASELINE
        if needs_greedy:
            samples.append((GREEDY, SamplingConfig(temperature=0.0)))
        for sample, _ in samples:
            self._ledger.ask(train_key(draw, sample))
        async with asyncio.TaskGroup() as jobs:
            running = [jobs.create_task(self._member(draw, task, sample, how)) for sample, how in samples]
        members = [job.result() for job in running]
        greedy = members.pop() if needs_greedy else None
        self._done[draw] = Group(draw, task, tuple(members), greedy)
        del self._running[draw]

    async def _member(self, draw: int, task: Task, sample: int | str, sampling: SamplingConfig) -> Member:
        seed = sampling_seed(self._config.seed, "train", draw, sample)
        assignment = Assignment(f"train-{draw}/{task.task_id}/{sample}", task, sampling, seed)
        return await get_judged(self._pool, self._judge, train_key(draw, sample), assignment)


async def evaluate(
    config: RunConfig,
    tasks: Sequence[Task],
    *,
    step: int,
    pool: RolloutPool,
    judge: Judge,
    ledger: Ledger,
    progress: Callable[[int, int], None],
) -> list[Member]:
    """Sample and judge evaluation tasks: the same path, seeds of their own, the same ones at every step."""
    samples = config.evaluation.samples
    total = len(tasks) * samples
    done = 0

    async def one(number: int, sample: int) -> Member:
        nonlocal done
        key = evaluation_key(step, number, sample)
        ledger.ask(key)
        assignment = Assignment(
            f"eval-{step}-{number}/{tasks[number].task_id}/{sample}",
            tasks[number],
            config.evaluation.sampling or config.rollout.sampling,
            sampling_seed(config.seed, "eval", number, sample),
        )
        member = await get_judged(pool, judge, key, assignment)
        done += 1
        progress(done, total)
        return member

    async with asyncio.TaskGroup() as jobs:
        running = [jobs.create_task(one(n, sample)) for n in range(len(tasks)) for sample in range(samples)]
    return [job.result() for job in running]
