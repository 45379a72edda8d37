"""`turnwire up`: the three services on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import click

from turnwire.cli import launch, output
from turnwire.cli.services import Services
from turnwire.errors import ConfigError, Problem


@click.command("up")
@click.argument("config", default="demo")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one line of JSON when all are up.")
@click.option(
    "--logs",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for logs and the configs as started.  [default: runs/.services/up-TIME]",
)
def command(config: str, overrides: tuple[str, ...], as_json: bool, logs: Path | None) -> None:
    """Start tool, rollout and trainer service here, on loopback, as CONFIG's `services:` say (default: demo).

    Returns on Ctrl-C, when all have stopped; with an error if one of them ends by itself.
    """
    found = launch.examine(config, overrides)
    services = found.usable().services
    if services is None:
        raise ConfigError([Problem("services", "missing: which services are to be started?")], found.source)
    folder = logs or Path(services.trainer.runs_folder) / ".services" / time.strftime("up-%Y%m%d-%H%M%S")
    asyncio.run(
        _up(Services(services, folder, lambda text: output.notes.print(text, style="dim", soft_wrap=True)), as_json)
    )


async def _up(services: Services, as_json: bool) -> None:
    stopped = asyncio.Event()
    with output.notes.status("starting the services; loading torch takes some seconds"):
        await services.__aenter__()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        _announce(services, as_json)
        watching = asyncio.create_task(services.watch())
        waiting = asyncio.create_task(stopped.wait())
        done, _ = await asyncio.wait({watching, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        watching.cancel()
        if watching in done:
            await watching
    finally:
        output.notes.print("stopping")
        await services.stop()


def _announce(services: Services, as_json: bool) -> None:
    if as_json:
        output.print_json({"targets": services.targets, "logs": services.logs, "pids": services.pids}, indent=None)
        return
    table = output.table("service", "address", "log")
    for name, target in services.targets.items():
        table.add_row(name, target, services.logs[name])
    output.console.print(table)
    trainer, tool = services.targets["trainer"], services.targets["tool"]
    output.console.print(
        f"turnwire tools --target {tool}\nturnwire train CONFIG --target {trainer}\nCtrl-C stops them."
    )
