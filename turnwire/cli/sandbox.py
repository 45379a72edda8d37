"""`turnwire sandbox`: whether this installation's sandboxes hold what they promise, and what dead services left."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
import msgspec

from turnwire.cli import output
from turnwire.config import apply_overrides, convert, read_yaml
from turnwire.errors import ConfigError, Problem

if TYPE_CHECKING:
    from tool_service.config import SandboxConfig
    from tool_service.sandbox import SandboxBackend

T = TypeVar("T")

_BACKENDS = ("process", "docker")
_TIERS = ("isolated", "restricted")

config_option = click.option(
    "--config",
    metavar="CONFIG",
    help="A tool service's config, or a run's (services.tool is taken): a file or a preset's name.  [default: none]",
)
backend_option = click.option("--backend", type=click.Choice(_BACKENDS), help="In place of the config's.")
overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@click.group("sandbox")
def command() -> None:
    """Check this machine's sandboxes against hostile programs; remove what dead services left of theirs."""


@command.command("check", short_help="Whether all holds that this machine's tier promises.")
@overrides_argument
@config_option
@backend_option
@click.option(
    "--tier",
    type=click.Choice(_TIERS),
    help="Check these walls.  [default: the best there are]",
)
@click.option("--only", metavar="ROWS", help="Only these rows or cases, as A1,B*,G1-variables.")
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=1,
    metavar="N",
    help="After the cases one by one, all of them once more, N at a time.",
)
@click.option("--verbose", is_flag=True, help="A line a case.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def check(
    *,
    overrides: tuple[str, ...],
    config: str | None,
    backend: str | None,
    tier: str | None,
    only: str | None,
    parallel: int,
    verbose: bool,
    as_json: bool,
) -> None:
    """Run the hostile suite on this machine, and say whether everything that the tier promises holds.

    KEY=VALUE replaces single values of the config's sandbox section, as docker.image=mine:1. Exits with 1 if something
    does not hold, and with 2 if no sandbox can be made.
    """
    from tool_service.sandbox import hostile  # noqa: PLC0415 - its tables are long
    from turnwire.cli import sandbox_report  # noqa: PLC0415 - builds on them

    try:
        cases = hostile.chosen([part.strip() for part in only.split(",")] if only is not None else [])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--only") from error
    with _exit_2_where_nothing_can_be_done():
        settings = _sandbox_settings(_tool_service(config), backend, overrides)
        passes = (1,) if parallel == 1 else (1, parallel)
        with sandbox_report.Progress() as progress:
            report = _run_to_its_end(
                hostile.examine(
                    lambda: _backend(settings, tier),
                    cases,
                    passes,
                    limits=settings.limits,
                    on_outcome=progress.add,
                )
            )
    if as_json:
        output.print_json(sandbox_report.as_json(report))
    else:
        sandbox_report.show(report, verbose)
    sys.exit(0 if report.holds else 1)


@command.command("sweep", short_help="List and remove leftovers of dead services.")
@overrides_argument
@config_option
@backend_option
@click.option("--dry-run", is_flag=True, help="List what would be removed, and leave it.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def sweep(overrides: tuple[str, ...], config: str | None, backend: str | None, dry_run: bool, as_json: bool) -> None:
    """List and remove what dead services left on this machine: folders of sandboxes, with the docker backend also
    containers, and databases where the config names a PostgreSQL server.

    What a living service has is never touched, nor what is another owner's (sandbox.owner). Exits with 2 if a place
    could not be searched.
    """
    from turnwire.cli import sandbox_sweep  # noqa: PLC0415 - loads the backends

    with _exit_2_where_nothing_can_be_done():
        part = _tool_service(config)
        settings = _sandbox_settings(part, backend, overrides)
        postgres = sandbox_sweep.postgres_settings(part.values)
        found = asyncio.run(sandbox_sweep.run(settings, postgres, remove=not dry_run))
    if as_json:
        output.print_json(msgspec.to_builtins(found))
    else:
        sandbox_sweep.show(found)
    sys.exit(2 if found.errors else 0)


def _run_to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """What it gives. Ctrl-C, SIGTERM and a terminal that closes let it clear up after itself, which no second one cuts
    short, and exit as a shell says that they do."""
    came: list[int] = []

    async def run() -> T:
        task = asyncio.ensure_future(work)

        def stop(number: int) -> None:
            if not came:
                task.cancel()
            came.append(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # as nohup has it
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await task

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        sys.exit(128 + came[0])


@contextlib.contextmanager
def _exit_2_where_nothing_can_be_done() -> Iterator[None]:
    """A config or a machine with which the question cannot even be asked is not the answer no, which is 1."""
    from tool_service.sandbox import SandboxError  # noqa: PLC0415 - loads the backends

    try:
        yield
    except (ConfigError, SandboxError) as error:
        click.secho("error: ", fg="red", bold=True, err=True, nl=False)
        click.echo(str(error), err=True)
        sys.exit(2)


class _Part(NamedTuple):
    """The tool service's part of a config."""

    values: dict[str, Any]
    place: str = ""
    """Where it stands in the file, as `services.tool.`."""
    source: str = "command line"


def _tool_service(config: str | None) -> _Part:
    """Raises ConfigError."""
    if config is None:
        return _Part({})
    from turnwire.cli import launch  # noqa: PLC0415 - loads every service's config

    path = launch.find_config(config)
    values = read_yaml(path)
    match values:
        case {"services": {"tool": dict() as tool}}:
            return _Part(tool, "services.tool.", str(path))
        case {"run": _} | {"services": _}:
            raise ConfigError([Problem("services.tool", "missing: there is no tool service in it")], str(path))
    return _Part(values, "", str(path))


def _sandbox_settings(part: _Part, backend: str | None, overrides: tuple[str, ...]) -> SandboxConfig:
    """Raises ConfigError."""
    from tool_service.config import SandboxConfig  # noqa: PLC0415 - builds on the backends

    values = part.values.get("sandbox") or {}
    if isinstance(values, dict):
        values = apply_overrides(values, overrides)
        if backend is not None:
            values["backend"] = backend
    return convert(values, SandboxConfig, part.source, prefix=f"{part.place}sandbox")


def _backend(settings: SandboxConfig, tier: str | None) -> SandboxBackend:
    """With an owner of its own: the service's leftovers are none of a check's business, nor the reverse."""
    from tool_service.sandbox import ProcessBackend, ProcessConfig  # noqa: PLC0415 - loads the backends
    from tool_service.sandboxes import backend_of  # noqa: PLC0415 - as above

    if tier is None or settings.backend != "process":
        minimum = tier or settings.minimum_tier
        return backend_of(
            msgspec.structs.replace(settings, owner=f"check-{secrets.token_hex(6)}", minimum_tier=minimum)
        )
    process = settings.process
    return ProcessBackend(
        ProcessConfig(
            tier=tier,  # type: ignore[arg-type] # one of the choices
            minimum_tier=tier,  # type: ignore[arg-type] # as above
            interpreter=process.interpreter,
            read_only_paths=process.read_only_paths,
        )
    )
