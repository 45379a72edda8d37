"""Groups of trajectories of one prompt: admitted, judged, and handed out in batches. The same code serves evaluation.

Invariants:

- Admission bounds staleness: `in flight + done <= (version + 1 + max_staleness) * batch`, where version counts updates
  and done counts groups that are finished, consumed ones included.
- A batch is the next draws in their order. So which tasks a step trains on depends on the seed alone, the place in the
  data follows from the version, and a group that was admitted first is never overtaken, which would make it too stale.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext

from trainer_service import names
from trainer_service.config import RunConfig, SamplingConfig
from trainer_service.data.dataset import TrainingStream
from trainer_service.data.task import Task
from trainer_service.judging import Judge, RewardError
from trainer_service.ledger import Ledger, evaluation_key, train_key
from trainer_service.rewards.base import Score
from trainer_service.rollouts import Assignment, Lost, RolloutPool, Sampled, sampling_seed
from turnwire.telemetry import logs, tracing

GREEDY = "greedy"
"""The sample that is the baseline of estimators which need one."""


@dataclass(frozen=True)
class Judged:
    """A trajectory with its reward."""

    key: str
    task: Task
    sampled: Sampled
    score: Score
    span: SpanContext = INVALID_SPAN_CONTEXT
    """Of its trace."""


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
    """One trajectory, sampled and judged: one trace, whatever it crosses."""
    with tracing.begin("sample", run_id=logs.run_id.get(), key=key, task_id=assignment.task.task_id) as span:
        result = await pool.sample(assignment)
        if isinstance(result, Lost):
            return Failed(key, assignment.task, result.reason)
        try:
            score = await judge.score(assignment.task, result.attempt)
        except RewardError as error:
            return Failed(key, assignment.task, str(error))
        tracing.describe(span, tries=result.tries, stop_reason=result.attempt.stop_reason, reward=score.value)
        return Judged(key, assignment.task, result, score, span.get_span_context())


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
    ) -> None:
        """Start anew, or where a checkpoint was: after `version` updates."""
        self._config = config
        self._stream, self._pool, self._judge, self._ledger = stream, pool, judge, ledger
        self._batch = config.training.prompts_per_step
        self._consumed = self._admitted = version * self._batch
        self._running: dict[int, asyncio.Task[None]] = {}
        self._done: dict[int, Group] = {}
        self._changed = asyncio.Event()

    def admit(self, version: int, total: int) -> None:
        """Start as many groups as the bound allows at this version, and no more than the run of `total` steps will
        use.
        """
        limit = min(version + 1 + self._config.rollout.max_staleness, total) * self._batch
        while self._admitted < limit:
            self._start(self._admitted)
            self._admitted += 1

    async def batch(self) -> list[Group]:
        """The next draws, which must be admitted, as soon as all of them are finished. Raises what stops the run."""
        draws = range(self._consumed, self._consumed + self._batch)
        while True:
            for task in self._running.values():
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            if all(draw in self._done for draw in draws):
                break
            self._changed.clear()
            await self._changed.wait()
        self._consumed = draws.stop
        return [self._done.pop(draw) for draw in draws]

    async def close(self) -> None:
        """End what is in flight."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        for task in running:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def _start(self, draw: int) -> None:
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
