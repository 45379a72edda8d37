"""`turnwire train`: start the services, start the run, and watch it until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
from rich.console import Console

from turnwire import config as config_files
from turnwire.cli import launch, output
from turnwire.cli.connecting import connection_options, options_of, started_here
from turnwire.cli.progress import LiveView, LogView, RunState
from turnwire.cli.services import Services
from turnwire.cli.summary import print_summary, summary_json
from turnwire.client.trainer import TrainerClient
from turnwire.errors import ConfigError, NotFoundError, Problem, TurnwireError
from turnwire.security.config import PLAINTEXT, ConnectionSecurity
from turnwire.v1 import trainer_pb2

EXIT_STOPPED = 130
PATIENCE = 300.0
"""Seconds for which a trainer service that is away is waited for. One that is started again loads torch, and of several
nodes all must come."""
RESTARTED = ("tool", "rollout")
"""Services that a run outlives: the trainer waits, retries what was in flight, and goes on."""


@click.command("train")
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--target", metavar="HOST:PORT", help="Use this running trainer service, instead of starting services here."
)
@connection_options
@click.option("--run-id", help="Name of the run and its folder.  [default: the config's name and the time]")
@click.option("--resume", metavar="RUN", help="Go on with a run from its last checkpoint: its id or folder.")
@click.option("--runs-folder", help="Where runs are kept, when services are started here.  [default: the config's]")
@click.option("--json", "as_json", is_flag=True, help="Print the run's result as JSON; progress goes to stderr.")
def command(
    *,
    config: str | None,
    overrides: tuple[str, ...],
    target: str | None,
    security: ConnectionSecurity,
    run_id: str | None,
    resume: str | None,
    runs_folder: str | None,
    as_json: bool,
) -> None:
    """Train as CONFIG says (a YAML file, a preset's name as `demo`, or a run's folder), and watch the run.

    KEY=VALUE replaces single values of the run, as training.steps=10 or reward.name=numeric, or of the services, as
    services.tool.sandbox.pool.max=64.

    Ctrl-C stops the run after its current step, with a checkpoint. Exits with 1 if the run fails, with 130 if it was
    stopped.
    """
    if resume and config and "=" in config and not Path(config).exists():
        overrides, config = (config, *overrides), None
    if resume:
        run_id = Path(resume).name
        folder = Path(resume) if Path(resume).is_dir() else Path(runs_folder or "runs") / resume
        if launch.config_of_run(folder) is None and not (target and config):
            elsewhere = "; for one that is only on the trainer's host, name its CONFIG too" if target else ""
            raise NotFoundError(f"there is no run in {folder}{elsewhere}")
        config, runs_folder = config or str(folder), runs_folder or str(folder.parent)
    if not config:
        raise click.UsageError("which config? As `turnwire train demo`, or `turnwire train my.yaml`.")
    found = launch.examine(config, overrides, services=target is None)
    resolved = found.usable()
    if target is None and resolved.services is None:
        raise ConfigError(
            [Problem("services", "missing; name a running trainer with --target HOST:PORT")], found.source
        )
    console = output.notes if as_json else output.console
    state = carry_out(Job(resolved, target, run_id, runs_folder, security), console)
    if as_json:
        output.print_json(summary_json(state))
    else:
        print_summary(state, "" if target is None else f"{options_of(security)} --target {target}")
    sys.exit(exit_code(state))


@dataclass
class Job:
    """A run to be started. `target` is a running trainer's address; without it the services are started here.
    `security`: how the trainer is known, and what is shown to it."""

    config: launch.LaunchConfig
    target: str | None = None
    run_id: str | None = None
    runs_folder: str | None = None
    security: ConnectionSecurity = PLAINTEXT


def exit_code(state: RunState) -> int:
    """What the shell is told."""
    codes = {trainer_pb2.RUN_STATE_FINISHED: 0, trainer_pb2.RUN_STATE_STOPPED: EXIT_STOPPED}
    return codes.get(state.state, 1)


def carry_out(job: Job, console: Console) -> RunState:
    """Start the run, show its progress on `console`, and return what became of it. Ctrl-C twice ends the process."""
    if job.run_id is not None:
        launch.check_run_id(job.run_id)
    try:
        return asyncio.run(_run(job, console))
    except asyncio.CancelledError:
        output.notes.print("stopped at once; what was not in a checkpoint is lost")
        sys.exit(EXIT_STOPPED)


async def _run(job: Job, console: Console) -> RunState:
    security = job.security
    if job.target is None and job.config.services is not None:
        security = started_here(job.config.services.trainer.server, security)
    async with _trainer(job) as (target, services, run_id), TrainerClient(target, security) as trainer:
        await trainer.wait_until_ready()
        since = time.time()
        started = await trainer.start_run(run_id, config_files.dump(job.config.run))
        if services is None:  # another clock, and a run that may be live already: all of it is shown
            since = started.started_at.ToDatetime(datetime.UTC).timestamp()
        else:
            resolved = Path(started.folder) / launch.RESOLVED_NAME
            resolved.write_text(config_files.dump(job.config), encoding="utf-8")
        state = RunState(run_id, job.config.run.training.steps, started.folder, since)
        tasks = {asyncio.create_task(_watch(trainer, state, console))}
        if services is not None:
            tasks.add(asyncio.create_task(services.watch(restart=RESTARTED)))
        with _interrupts(trainer, run_id):
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)  # the live picture is put away before anything else is printed
        last = await trainer.get_run(run_id)
        state.state, state.detail = last.state, last.error or state.detail
    return state


async def _watch(trainer: TrainerClient, state: RunState, console: Console) -> None:
    view = LiveView(state, console) if console.is_terminal else LogView(state, console)
    with view:
        async for event in trainer.watch_run(state.run_id, patience=PATIENCE):
            state.update(event)
            view.updated(event)


@contextlib.asynccontextmanager
async def _trainer(job: Job) -> AsyncIterator[tuple[str, Services | None, str]]:
    """The address of the trainer, the services if they were started for it, and the run's id."""
    name = job.config.run.name
    if job.target is not None:
        yield job.target, None, job.run_id or launch.fresh_run_id(name, lambda _: False)
        return
    config = job.config.services
    assert config is not None  # noqa: S101 - checked by the commands, with a message for people
    if job.runs_folder is not None:
        config = msgspec.structs.replace(
            config, trainer=msgspec.structs.replace(config.trainer, runs_folder=job.runs_folder)
        )
    runs = Path(config.trainer.runs_folder)
    run_id = job.run_id or launch.fresh_run_id(name, lambda name: (runs / name).exists())
    services = Services(
        config, runs / ".services" / run_id, lambda text: output.notes.print(text, style="dim", soft_wrap=True)
    )
    async with contextlib.AsyncExitStack() as stack:
        with output.notes.status("starting the services; loading torch takes some seconds"):
            await stack.enter_async_context(services)
        yield services.targets["trainer"], services, run_id


@contextlib.contextmanager
def _interrupts(trainer: TrainerClient, run_id: str) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) stops the run with a checkpoint, the second cancels the caller."""
    loop, caller = asyncio.get_running_loop(), asyncio.current_task()
    stopping: list[asyncio.Task[None]] = []

    async def stop() -> None:
        try:
            await trainer.stop_run(run_id)
        except TurnwireError as error:
            output.notes.print(f"the run could not be stopped: {error}", style="red")

    def interrupted() -> None:
        if stopping and caller is not None:
            caller.cancel()
            return
        output.notes.print("stopping after this step, with a checkpoint; Ctrl-C again stops at once", style="yellow")
        stopping.append(loop.create_task(stop()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        for task in stopping:
            task.cancel()
