"""The runs of a trainer service: one folder each, at most one live at a time.

Invariants: an id names one run for ever, and its config what it trains (a repeated start is the same start; what may
differ then is in `changes`); what is known of a run is in its folder, so a restarted service knows all of them; a run
that is not live goes on from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trainer_service.changes import differences, refused
from trainer_service.config import RunConfig, TrainerServiceConfig, check, warnings
from trainer_service.events import EventLog
from trainer_service.files import RUN_ID, sync_folder, write_json, write_text
from turnwire.client.rollout import RolloutClient
from turnwire.config import convert, dump, load, parse_yaml
from turnwire.errors import (
    AlreadyExistsError,
    ConfigError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    TurnwireError,
    UnavailableError,
    WrongOrderError,
)
from turnwire.telemetry import logs
from turnwire.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    from trainer_service.loop import TrainingRun
    from trainer_service.ranks import Ranks

logger = logging.getLogger(__name__)

_ID = re.compile(RUN_ID)

MOST_DEATHS = 3
"""Of the service, one after the other, without a step in between: a run that kills its trainer would do so for ever."""


class RunFile(msgspec.Struct, kw_only=True):
    """`run.json`: what is known of a run between processes. Times are seconds since the epoch.

    interrupted: it was live when the service was told to end.
    deaths, died_after: how often the service died with it since that step, the last one that was finished then.
    """

    run_id: str
    state: str
    total_steps: int
    step: int = 0
    error: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
    interrupted: bool = False
    deaths: int = 0
    died_after: int = -1


class Run:
    """A run that this process knows."""

    def __init__(self, folder: Path, file: RunFile) -> None:
        self.folder, self.file = folder, file
        self.events = EventLog(folder / "events.jsonl")
        self.training: TrainingRun | None = None
        self.job: asyncio.Task[None] | None = None
        self.stopping = False

    @property
    def config_file(self) -> Path:
        """The config as it was last started with."""
        return self.folder / "config.yaml"

    @property
    def live(self) -> bool:
        """Whether it is being worked on."""
        return self.job is not None and not self.job.done()

    def set_state(self, state: pb.RunState.ValueType, detail: str = "") -> None:
        """Write the new state down and tell watchers."""
        self.file.state = pb.RunState.Name(state)
        self.file.step = self.training.step if self.training else self.file.step
        self.save()
        self.events.emit(state=pb.RunStateChanged(state=state, detail=detail))

    def save(self) -> None:
        """Write run.json."""
        write_json(self.folder / "run.json", msgspec.to_builtins(self.file))

    def message(self) -> pb.Run:
        """As the wire has it."""
        file = self.file
        message = pb.Run(
            run_id=file.run_id,
            state=pb.RunState.Value(file.state),
            step=self.training.step if self.training else file.step,
            total_steps=file.total_steps,
            folder=str(self.folder.resolve()),
            error=file.error,
        )
        for stamp, seconds in ((message.started_at, file.started_at), (message.ended_at, file.ended_at)):
            if seconds:
                stamp.FromNanoseconds(int(seconds * 1e9))
        return message


class Runs:
    """All runs of a folder."""

    def __init__(self, config: TrainerServiceConfig, ranks: Ranks | None = None) -> None:
        """`ranks`: the processes that train together; None: this one alone."""
        self._ranks = ranks
        self._folder = Path(config.runs_folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rollout_target, self._tool_target, self._client = config.rollout_target, config.tool_target, config.client
        self._runs: dict[str, Run] = {}
        self.current: Run | None = None
        """The one that this process works on, or has worked on last."""
        self._resume = config.resume
        for path in sorted(self._folder.glob("*/run.json")):
            self._adopt(path)

    def _adopt(self, path: Path) -> None:
        """Take up a run of an earlier process. One that was live then goes on, or has failed: see `resume`."""
        try:
            file = msgspec.convert(json.loads(path.read_text()), RunFile)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            logger.warning("%s is not a run: %s", path, error)
            return
        run = Run(path.parent, file)
        self._runs[file.run_id] = run
        died = file.state in ("RUN_STATE_STARTING", "RUN_STATE_RUNNING")
        if died:
            file.step = run.events.last_step()
            file.deaths = file.deaths + 1 if file.step == file.died_after else 1
            file.died_after = file.step
        if self._resume and (died or file.interrupted) and self.current is None and file.deaths <= MOST_DEATHS:
            self._go_on(run)
        elif died:
            again = f" {file.deaths} times after step {file.step}" if file.deaths > 1 else ""
            file.error = (
                f"the trainer service ended{again} while the run was live; start it again to go on from its last "
                "checkpoint"
            )
            run.set_state(pb.RUN_STATE_FAILED, file.error)

    def _go_on(self, run: Run) -> None:
        try:
            config = load(run.config_file, RunConfig)
        except ConfigError as error:
            run.file.error = f"the trainer service ended while the run was live, and its config is unknown: {error}"
            run.set_state(pb.RUN_STATE_FAILED, run.file.error)
            return
        run.events.notify("the trainer service ended while the run was live; it goes on from its last checkpoint")
        self._launch(run, config)

    def get(self, run_id: str) -> Run:
        """Raises NotFoundError."""
        if run_id not in self._runs:
            raise NotFoundError(f"there is no run {run_id!r} in {self._folder}")
        return self._runs[run_id]

    def list(self) -> list[Run]:
        """All of them, oldest first."""
        return sorted(self._runs.values(), key=lambda run: run.file.started_at)

    async def start(self, run_id: str, config_yaml: str) -> Run:
        """Start, resume, or find the run that is the same. Raises ConfigError with everything that is wrong."""
        if not _ID.fullmatch(run_id):
            raise InvalidRequestError(f"run_id {run_id!r}: up to 100 letters, digits, dots, dashes, underscores")
        config = convert(parse_yaml(config_yaml, "run"), RunConfig, "run")
        run = self._runs.get(run_id)
        if run is not None:
            changed = _changed(run, config)
            if run.live or (run.file.state == "RUN_STATE_FINISHED" and not changed):
                return run
        problems = await asyncio.to_thread(check, config)
        if problems:
            raise ConfigError(problems, "run")
        busy = next((other for other in self._runs.values() if other.live), None)
        if busy is not None:
            if busy.file.run_id == run_id:  # the same start came twice while the config was checked
                return busy
            raise ExhaustedError(
                f"run {busy.file.run_id!r} is live, and one is the limit; stop it or wait", retry_after=30
            )
        if run is None:
            folder = self._folder / run_id
            folder.mkdir(exist_ok=True)
            sync_folder(self._folder)
            file = RunFile(run_id=run_id, state="", total_steps=config.training.steps)
            run = self._runs[run_id] = Run(folder, file)
        run.file.deaths = 0
        self._launch(run, config)
        return run

    def _launch(self, run: Run, config: RunConfig) -> None:
        run.file.error, run.file.ended_at, run.file.interrupted, run.stopping = "", 0.0, False, False
        run.file.started_at = run.file.started_at or time.time()
        run.file.total_steps = config.training.steps
        write_text(run.config_file, dump(config))
        run.events.set_live(True)
        run.set_state(pb.RUN_STATE_STARTING)
        for warning in warnings(config):
            run.events.notify(f"warning: {warning}")
        self.current = run
        run.job = asyncio.create_task(self._work(run, config))

    async def _work(self, run: Run, config: RunConfig) -> None:
        """The life of a run; ends in exactly one of FINISHED, STOPPED, FAILED, or with the service: see `_leave`."""
        logs.run_id.set(run.file.run_id)
        try:
            # torch and verl take seconds to load: not before there is a run, and not on the event loop.
            module = await asyncio.to_thread(load_loop)
            async with RolloutClient(self._rollout_target, self._client) as client:
                run.training = module.TrainingRun(
                    run.file.run_id,
                    config,
                    run.folder,
                    client,
                    run.events,
                    tool_target=self._tool_target,
                    tool_security=self._client,
                    ranks=self._ranks,
                )
                run.set_state(pb.RUN_STATE_RUNNING)
                if run.stopping:  # asked for while it was loading
                    run.training.stop()
                finished = await run.training.run()
            state, detail = (pb.RUN_STATE_FINISHED if finished else pb.RUN_STATE_STOPPED), ""
        except asyncio.CancelledError:
            state, detail = pb.RUN_STATE_FAILED, "the trainer service was shut down; start the run again to go on"
        except Exception as error:  # whatever ends a run is told to those who watch it
            cause = _first_cause(error)
            known = isinstance(cause, TurnwireError)
            state, detail = pb.RUN_STATE_FAILED, str(cause) if known else f"{type(cause).__name__}: {cause}"
            if self._ranks is not None and self._ranks.broken:
                if self._resume and (run.file.interrupted or not run.stopping):
                    _leave(run, detail)
                    return
                detail += "; once it is back, start the run again to go on from its last checkpoint"
            logger.error("run %s failed: %s", run.file.run_id, detail, exc_info=not known)  # noqa: TRY400 - ours is expected
        run.file.error, run.file.ended_at = (detail if state == pb.RUN_STATE_FAILED else ""), time.time()
        run.file.interrupted = run.file.interrupted and state == pb.RUN_STATE_STOPPED
        run.set_state(state, detail)
        run.events.set_live(False)

    async def stop(self, run_id: str) -> Run:
        """End a live run after its current step; returns when it has. Raises WrongOrderError if it is not live."""
        run = self.get(run_id)
        if not run.live:
            raise WrongOrderError(f"run {run_id!r} is not live: {run.file.state.removeprefix('RUN_STATE_')}")
        run.stopping = True
        if run.training is not None:
            run.training.stop()
        if run.job is not None:
            await asyncio.wait({run.job})
        return run

    def watch(self, run_id: str, first: int) -> AsyncIterator[pb.WatchRunResponse]:
        """Events of a run from number `first` on, then live."""
        return self.get(run_id).events.watch(first)

    async def close(self) -> None:
        """The service ends: stop what is live, with a checkpoint."""
        for run in self._runs.values():
            if run.live:
                run.file.interrupted = not run.stopping
                await self.stop(run.file.run_id)


def _leave(run: Run, reason: str) -> None:
    """As where the service is killed: what is written says that the run is live, and its watchers come again."""
    logger.error("run %s is interrupted: %s", run.file.run_id, reason)
    run.events.notify(f"{reason}; once it is back, the run goes on from its last checkpoint")
    run.events.cut(UnavailableError(reason))


def _changed(run: Run, config: RunConfig) -> bool:
    """Whether a config differs from a run's. Raises AlreadyExistsError where the run cannot go on with it."""
    name = run.file.run_id
    try:
        old = load(run.config_file, RunConfig)
    except ConfigError as error:
        raise AlreadyExistsError(f"run {name!r} exists, and its config is unknown: {error}") from error
    if wrong := list(differences(old, config).values()) if run.live else refused(old, config):
        live = "is live" if run.live else "exists"
        raise AlreadyExistsError(f"run {name!r} {live} with another config: {'; '.join(wrong)}. Choose another run_id")
    return old != config


def load_loop() -> Any:
    """The module `trainer_service.loop`, with all that it needs."""
    from trainer_service import loop  # noqa: PLC0415 - see its caller

    return loop


def _first_cause(error: BaseException) -> BaseException:
    """The error itself, out of the groups that concurrent tasks wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
