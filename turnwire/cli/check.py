"""`turnwire check`: everything that is wrong with a config, before anything starts."""

from __future__ import annotations

import sys

import click

from turnwire.cli import launch, output
from turnwire.errors import ConfigError


@click.command("check")
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(config: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say everything that is wrong with CONFIG, and the fix. Exits with 1 if there is anything.

    CONFIG is a YAML file or a preset's name; KEY=VALUE replaces single values, as training.steps=10 or
    services.tool.sandbox.pool.max=64.
    """
    try:
        found = launch.examine(config, overrides)
    except ConfigError as error:  # no config to examine
        if not as_json:
            raise
        found = launch.Findings(config, problems=list(error.problems))
    if as_json:
        output.print_json(
            {
                "config": found.source,
                "ok": not found.problems,
                "problems": output.as_json(found.problems),
                "warnings": output.as_json(found.warnings),
            }
        )
    else:
        report(found)
    sys.exit(1 if found.problems else 0)


def report(found: launch.Findings) -> None:
    """Findings for people."""
    count = len(found.problems)
    if count:
        output.notes.print(
            f"{found.source}: {count} problem{'s' if count > 1 else ''}", style="bold red", soft_wrap=True
        )
        output.print_problems(found.problems, "red")
    if found.warnings:
        output.notes.print(f"{found.source}: worth a look", style="bold yellow", soft_wrap=True)
        output.print_problems(found.warnings, "yellow")
    if not count:
        output.console.print(f"{found.source}: nothing is wrong", style="green", soft_wrap=True)
