"""What a run writes down: the books, metrics, trajectories and events of its steps and evaluations.

All of it is in files that only grow. `positions` forces them to the disk and says how long they are, for a checkpoint;
a resumed run starts from those lengths, so nothing is there twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from trainer_service import metrics
from trainer_service.accuracy import Failures, accuracies
from trainer_service.checkpoint import RunState
from trainer_service.config import MetricsConfig
from trainer_service.events import EventLog
from trainer_service.experience import Selection, spread
from trainer_service.files import AppendFile
from trainer_service.groups import Failed, Group, Judged, Member
from trainer_service.learner import Learned
from trainer_service.ledger import Ledger, LedgerError, State, audit
from trainer_service.trajectories import TrajectoryRecorder
from turnwire.errors import InfraError
from turnwire.v1 import trainer_pb2 as pb

_FILES = ("metrics.jsonl", "ledger.jsonl", "trajectories/train.jsonl", "trajectories/eval.jsonl")
_PROGRESS_SECONDS = 0.5


class RunRecord:
    """The written side of a run. `evaluations` has the accuracy per data source, by step; `evaluation_failures` what
    failed of it."""

    def __init__(self, folder: Path, config: MetricsConfig, state: RunState | None, events: EventLog) -> None:
        """Start empty, or where a checkpoint was."""
        self.evaluations = dict(state.evaluations) if state else {}
        self.evaluation_failures = dict(state.evaluation_failures) if state else {}
        self._earlier_seconds = state.seconds if state else 0.0
        self._started = time.monotonic()
        self._config, self._events = config, events
        self._files = {name: AppendFile(folder / name, state.files[name] if state else 0) for name in _FILES}
        self.ledger = Ledger(self._files["ledger.jsonl"], state.ledger if state else None)
        tensorboard = folder / "tensorboard" if config.tensorboard else None
        self._metrics = metrics.MetricsWriter(self._files["metrics.jsonl"], tensorboard, state.step + 1 if state else 0)
        self._gpu = metrics.GpuMeter()
        self._told = 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, evaluations included: of this process, and of earlier ones to the checkpoint."""
        return self._earlier_seconds + time.monotonic() - self._started

    def use(self, decode: Callable[[int], str], updates_at: Callable[[int], int]) -> None:
        """How tokens become texts and the engine's weight versions become numbers of updates, once both are known."""
        self._updates_at = updates_at
        self._recorder = TrajectoryRecorder(decode, updates_at)

    def batch(self, step: int, groups: list[Group], selection: Selection, learned: Learned) -> dict[str, float]:
        """Close the books on the batch of step number `step` and keep some of its trajectories. Returns its metrics."""
        reasons = {member.key: reason for member, reason in selection.filtered}
        for group in groups:
            for member in group.members:
                if isinstance(member, Failed):
                    self.ledger.close(member.key, State.FAILED, step, member.reason)
                elif member.key in reasons:
                    self.ledger.close(member.key, State.FILTERED, step, reasons[member.key])
                else:
                    self.ledger.close(member.key, State.TRAINED, step)
            if group.greedy is not None:
                self._close_evaluated(group.greedy, step)
        advantages = dict(zip((member.key for member in selection.rows), learned.advantages, strict=True))
        for member in spread(groups, self._config.trajectories_per_step):
            key = member.key
            record = self._recorder.record(member, "train", step - 1, advantages.get(key), reasons.get(key, ""))
            self._files["trajectories/train.jsonl"].write(record)
        figures = metrics.step_metrics(groups, self._updates_at, step - 1)
        return figures | {"trajectories/trained": float(len(advantages)), "trajectories/filtered": float(len(reasons))}

    def lost_batch(self, step: int, groups: list[Group]) -> None:
        """Close the books on a batch in which every trajectory failed."""
        for group in groups:
            for member in group.members:
                if isinstance(member, Failed):
                    self.ledger.close(member.key, State.FAILED, step, member.reason)
            if group.greedy is not None:
                self._close_evaluated(group.greedy, step)

    def step(self, step: int, figures: dict[str, float]) -> None:
        """A step is done."""
        seconds = figures["time/step_seconds"]
        figures = {**figures, "tokens_per_second": figures.get("tokens/total", 0.0) / seconds, **self._gpu.read()}
        self._metrics.write("step", step, figures)
        self._events.emit(step=pb.StepFinished(step=step, metrics=figures))

    def progress(self, step: int, done: int, total: int) -> None:
        """An evaluation is under way. Not every trajectory is worth an event."""
        if time.monotonic() - self._told > _PROGRESS_SECONDS or done == total:
            self._told = time.monotonic()
            self._events.emit(evaluation_progress=pb.EvaluationProgress(step=step, done=done, total=total))

    def evaluation(self, step: int, members: list[Member]) -> None:
        """An evaluation is done. Raises InfraError if none of its trajectories could be had."""
        judged = [member for member in members if isinstance(member, Judged)]
        failed = [member for member in members if isinstance(member, Failed)]
        for member in members:
            self._close_evaluated(member, step)
        if not judged:
            raise InfraError(f"every trajectory of the evaluation failed; the first: {failed[0].reason}")
        for member in judged:
            self._files["trajectories/eval.jsonl"].write(self._recorder.record(member, "eval", step))
        found = accuracies(members)
        for source, failures in found.failures.items():
            self._events.notify(_left_out(step, source, found.tasks[source], failures))
        self.evaluations[step] = found.accuracy
        if found.failures:
            self.evaluation_failures[step] = found.failures
        known = {source: value for source, value in found.accuracy.items() if value is not None}
        figures = {**metrics.trajectory_metrics(judged), "trajectories/failed": float(len(failed))}
        named = {f"accuracy/{source}": value for source, value in known.items()}
        for source, tasks in found.tasks.items():
            named[f"tasks/{source}"] = float(tasks)
            named[f"failed/{source}"] = float(found.failures[source].trajectories if source in found.failures else 0)
        failures_of = {source: msgspec.structs.asdict(failures) for source, failures in found.failures.items()}
        self._metrics.write("evaluation", step, {**named, **figures}, failures=failures_of)
        failures_pb = {source: pb.EvaluationFailures(**values) for source, values in failures_of.items()}
        self._events.emit(
            evaluation=pb.Evaluation(
                step=step, accuracy=known, tasks=found.tasks, metrics=figures, failures=failures_pb
            )
        )

    def _close_evaluated(self, member: Member, step: int) -> None:
        if isinstance(member, Failed):
            self.ledger.close(member.key, State.FAILED, step, member.reason)
        else:
            self.ledger.close(member.key, State.EVALUATED, step)

    def balanced_books(self) -> dict[str, Any]:
        """The ledger read again from its file. Raises LedgerError if it is not what was counted, over all processes."""
        books = audit(self._files["ledger.jsonl"].path)
        counted = {state: count for state, count in self.ledger.counts().items() if count}
        if books["twice"] or books["counts"] != counted:
            raise LedgerError(f"the ledger has {books['counts']}, twice {books['twice'][:5]}; counted were {counted}")
        return books

    def positions(self) -> dict[str, int]:
        """Lengths of the files, which are on the disk from here on."""
        self._metrics.flush()
        return {name: file.sync() for name, file in self._files.items()}

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        for file in self._files.values():
            file.close()


def _left_out(step: int, source: str, judged_tasks: int, failures: Failures) -> str:
    """For people: that an accuracy is not over all."""
    when = f"after step {step}" if step else "before training"
    if not judged_tasks:
        what = f"all {failures.trajectories} trajectories failed: there is no accuracy"
    else:
        what = f"{failures.trajectories} trajectories failed, and are not in the accuracy"
        what += f", which is over {judged_tasks} of {judged_tasks + failures.tasks} tasks" if failures.tasks else ""
    return f"evaluation {when}, {source}: {what}; the first: {failures.reason}"
