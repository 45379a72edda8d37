"""The training loop: read `_train` and `_step` first, they are the whole of it.

Everything that computes runs in one worker thread, so that rollouts, events and RPCs go on during an update. After an
update the weights are pushed and checked, the next groups admitted, the step written down; then evaluation and
checkpoint as they are due. A run that was killed starts at its last checkpoint and repeats what came after it.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from opentelemetry.trace import Span
from transformers import AutoTokenizer

from trainer_service import report
from trainer_service.checkpoint import Checkpoints, RunState
from trainer_service.config import RunConfig
from trainer_service.data.dataset import TrainingStream, evaluation_tasks, load_sources
from trainer_service.events import EventLog
from trainer_service.experience import Selection, select
from trainer_service.files import write_json
from trainer_service.groups import Failed, Group, GroupFeed, Judged, evaluate
from trainer_service.judging import Judge
from trainer_service.learner import Learned, build
from trainer_service.publisher import UNREACHABLE, WeightPublisher
from trainer_service.ranks import ALONE, Ranks
from trainer_service.record import RunRecord
from trainer_service.rollouts import RolloutPool
from trainer_service.telemetry import Standing
from turnwire.client.rollout import RolloutClient
from turnwire.errors import InfraError
from turnwire.security.config import PLAINTEXT, ConnectionSecurity
from turnwire.telemetry import tracing
from turnwire.v1 import trainer_pb2 as pb

T = TypeVar("T")


class StoppedError(Exception):
    """Someone asked the run to stop."""


class TrainingRun:
    """One run, from its config and its folder. `step` is the number of updates done."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        folder: Path,
        rollout: RolloutClient,
        events: EventLog,
        *,
        tool_target: str = "",
        tool_security: ConnectionSecurity = PLAINTEXT,
        ranks: Ranks | None = None,
    ) -> None:
        """`tool_target`: where rewards that call a tool find the tool service; `tool_security`: how they know it.
        `ranks`: the processes that train together; None: this one alone.
        """
        self._tool_target, self._tool_security, self._ranks = tool_target, tool_security, ranks or ALONE
        self._id, self._config, self._folder, self._client, self._events = run_id, config, folder, rollout, events
        self._threads = ThreadPoolExecutor(1, "training", _set_threads, (config.training.threads,))
        self._stopping = asyncio.Event()
        self.step = 0

    def standing(self) -> Standing | None:
        """How it is right now; None while it is loading."""
        if not hasattr(self, "_pool"):
            return None
        return Standing(self._pool.in_flight, self._pool.infra_failures, self._record.ledger.counts())

    def stop(self) -> None:
        """End after the current step, with a checkpoint."""
        self._stopping.set()

    async def run(self) -> bool:
        """Train to the end. False if it was stopped. Raises what stops a run."""
        finished = True
        try:
            await self._load()
            async with self._pool:
                try:
                    await self._train()
                except StoppedError:
                    finished = False
                finally:
                    await self._feed.close()
            if self.step:
                await self._save()
            await self._summarize()
        except StoppedError:  # before there was anything to save
            finished = False
        finally:
            self._close()
        return finished

    # -- the loop

    async def _train(self) -> None:
        config, total = self._config, self._config.training.steps
        while True:
            if self._evaluation_due() and self.step not in self._record.evaluations:
                await self._unless_stopped(self._evaluate())
            if self.step and (self.step == total or _every(config.checkpoint.every, self.step)):
                await self._save()
            if self.step == total:
                return
            with tracing.begin("step", run_id=self._id, step=self.step + 1) as span:
                await self._step(total, span)

    async def _step(self, total: int, span: Span) -> None:
        started = time.monotonic()
        self._feed.admit(self.step, total)
        groups = await tracing.during("wait", self._unless_stopped(self._feed.batch()))
        waited = time.monotonic() - started
        tracing.link(span, (item.span for group in groups for item in group.members if isinstance(item, Judged)))
        selection = self._select(groups)
        learned = Learned({}, [])
        if selection.experience is not None:
            learned = await tracing.during("learn", self._compute(self._learner.learn, selection.experience))
        figures = self._record.batch(self.step + 1, groups, selection, learned) | learned.metrics
        self.step += 1
        figures |= await self._publish()
        self._feed.admit(self.step, total)
        figures["rollouts/infra_failures"] = float(self._pool.infra_failures)
        figures["time/waiting_seconds"] = waited
        figures["time/step_seconds"] = time.monotonic() - started
        self._record.step(self.step, figures)

    async def _publish(self) -> dict[str, float]:
        """Send the new weights, and check that they arrived. A run that is to stop does not wait for an engine that is
        away: the step is done, and who goes on from its checkpoint begins with sending the weights.
        """
        try:
            figures = await tracing.during("push", self._publisher.push(self.step))
            return figures | await tracing.during("canary", self._publisher.canary(self.step))
        except UNREACHABLE as error:
            if not self._stopping.is_set():
                raise
            self._events.notify(f"the run stops, and its weights are not sent: {error}")
            return {}

    def _select(self, groups: list[Group]) -> Selection:
        """What to learn from. Raises InfraError where every trajectory of a batch failed: going on would waste the
        data.
        """
        members = [member for group in groups for member in group.members]
        failed = [member for member in members if isinstance(member, Failed)]
        if failed:
            text = f"step {self.step + 1}: {len(failed)} of {len(members)} trajectories failed"
            text += f"; the first: {failed[0].reason}"
            if len(failed) == len(members):
                self._record.lost_batch(self.step + 1, groups)
                raise InfraError(text)
            self._events.notify(text)
        return select(self._config.algorithm, groups)

    # -- evaluation

    def _evaluation_due(self) -> bool:
        settings, first, last = self._config.evaluation, self.step == 0, self.step == self._config.training.steps
        if not self._evaluation_tasks:
            return False
        return (
            (settings.before and first)
            or (settings.after and last)
            or (not first and _every(settings.every, self.step))
        )

    async def _evaluate(self) -> None:
        step, record = self.step, self._record
        members = await evaluate(
            self._config,
            self._evaluation_tasks,
            step=step,
            pool=self._pool,
            judge=self._judge,
            ledger=record.ledger,
            progress=lambda done, total: record.progress(step, done, total),
        )
        record.evaluation(step, members)

    # -- start, checkpoint, end

    async def _load(self) -> None:
        config = self._config
        self._checkpoints = Checkpoints(self._folder / "checkpoints", config.checkpoint.keep)
        path, state = await self._compute(self._checkpoints.latest) or (None, None)
        for damaged in self._checkpoints.set_aside:
            self._events.notify(f"a checkpoint was damaged and is not used: {damaged}")
        self.step = state.step if state else 0
        self._record = RunRecord(self._folder, config.metrics, state, self._events)
        self._judge = Judge(config.reward)
        await self._judge.connect(self._tool_target, self._tool_security)
        train = await asyncio.to_thread(load_sources, config.data, "train", config.tools)
        held_out = await asyncio.to_thread(load_sources, config.data, "eval", config.tools)
        self._evaluation_tasks = evaluation_tasks(held_out, config.evaluation.tasks)
        await self._compute(self._build, path)
        rows = config.training.prompts_per_step * config.rollout.group_size // config.algorithm.mini_batches
        if self._ranks.size > rows:
            text = f"{self._ranks.size} ranks share {rows} trajectories of an optimizer step: some compute in vain"
            self._events.notify(f"warning: {text}")
        self._publisher = WeightPublisher(
            self._client,
            self._policy,
            config.weights,
            folder=self._folder,
            compute=self._compute,
            notify=self._events.notify,
            stopping=self._stopping,
        )
        self._record.use(lambda token: str(self._tokenizer.decode([token])), self._publisher.updates_at)
        if state:
            self._events.notify(f"resumed after step {self.step} from {path}")
        await self._unless_stopped(self._publisher.start(self.step))
        await self._unless_stopped(self._publisher.canary(0))
        self._pool = RolloutPool(
            self._client, config.rollout, self._id, self._publisher.ensure_current, self._events.notify
        )
        self._feed = GroupFeed(
            config,
            stream=TrainingStream(train, config.seed),
            pool=self._pool,
            judge=self._judge,
            ledger=self._record.ledger,
            version=self.step,
        )

    def _build(self, checkpoint: Path | None) -> None:
        """In the worker thread: model, optimizer, random state."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self._config.model.path)
        self._learner = build(self._config, checkpoint / "model" if checkpoint else None, self._ranks)
        self._policy = self._learner.policy
        if checkpoint is not None:
            self._learner.restore(torch.load(checkpoint / "learner.pt", weights_only=True))

    async def _save(self) -> None:
        """A checkpoint of this step, unless there is one."""
        if self._checkpoints.path(self.step).exists():
            return
        state = RunState(
            step=self.step,
            ledger=self._record.ledger.counts(),
            files=self._record.positions(),
            evaluations=self._record.evaluations,
            evaluation_failures=self._record.evaluation_failures,
            seconds=self._record.seconds,
        )
        path = await self._compute(self._checkpoints.save, state, self._write)
        self._events.emit(checkpoint=pb.CheckpointSaved(step=self.step, path=str(path)))

    def _write(self, folder: Path) -> None:
        self._policy.save(folder / "model")
        self._tokenizer.save_pretrained(folder / "model")
        torch.save(self._learner.state(), folder / "learner.pt")

    async def _summarize(self) -> None:
        record, config = self._record, self._config
        books = await asyncio.to_thread(record.balanced_books)
        parameters = self._policy.parameter_count()
        summary = report.summary(self._id, config, steps=self.step, parameters=parameters, record=record, books=books)
        write_json(self._folder / "summary.json", summary)
        curves, metrics = self._folder / "learning_curves.png", self._folder / "metrics.jsonl"
        title = f"{config.name} (seed {config.seed})"
        evaluated = record.evaluations, record.evaluation_failures
        await asyncio.to_thread(report.draw_curves, metrics, *evaluated, title, curves)

    def _close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for name in ("_judge", "_record", "_publisher"):  # they are there as far as `_load` came
            if hasattr(self, name):
                getattr(self, name).close()

    # -- helpers

    async def _compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run in the worker thread."""
        context = contextvars.copy_context()  # what it logs is about this run
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, function, *arguments)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or raise StoppedError as soon as the run is to stop."""
        job, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({job, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                raise StoppedError
            return job.result()
        finally:
            stop.cancel()
            job.cancel()
            await asyncio.wait({job, stop})


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def _set_threads(count: int | None) -> None:
    if count is not None:
        torch.set_num_threads(count)
