"""The `turnwire` command. One module a subcommand, each loaded only when it is called."""

from __future__ import annotations

import importlib
import sys

import click

from turnwire import __version__
from turnwire.errors import TurnwireError

_COMMANDS = {
    "up": "Start the three services here.",
    "train": "Train: start the services (or use running ones), and watch the run.",
    "eval": "Evaluate a config's policy, or a run's.",
    "check": "Say everything that is wrong with a config, before anything starts.",
    "tools": "Show what tools are registered, and whether they are healthy.",
    "sandbox": "Check this machine's sandboxes against hostile programs; remove leftovers.",
    "view": "Show the trajectories of a run, turn by turn.",
}


class _LazyGroup(click.Group):
    """Lists commands without importing them, so that `turnwire --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"turnwire.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="turnwire")
def cli() -> None:
    """Train tool-using language-model agents with reinforcement learning.

    \b
    turnwire train demo        watch a small policy learn to use three tools
    turnwire check CONFIG      what is wrong with a config, and the fix
    turnwire view RUN          trajectories of a run, turn by turn

    CONFIG is a YAML file, or the name of a preset in configs/.
    """


def main() -> None:
    """Entry point. What is no bug is shown without a traceback, and exits with 1: errors that Turnwire raises on
    purpose, and files and devices that fail.
    """
    try:
        cli()
    except (TurnwireError, OSError) as error:
        click.secho("error: ", fg="red", bold=True, err=True, nl=False)
        click.echo(str(error), err=True)
        sys.exit(1)
