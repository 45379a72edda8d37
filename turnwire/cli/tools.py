"""`turnwire tools`: what is registered, and whether it is healthy."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import click
from rich.text import Text

from turnwire.cli import launch, output
from turnwire.cli.connecting import connection_options, started_here
from turnwire.cli.services import Services
from turnwire.client.tools import ToolClient
from turnwire.security.config import ConnectionSecurity
from turnwire.v1 import tool_pb2


@click.command("tools")
@click.argument("config", default="demo")
@click.option("--target", metavar="HOST:PORT", help="Ask this tool service, instead of starting CONFIG's.")
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print the tools as JSON.")
def command(*, config: str, target: str | None, security: ConnectionSecurity, as_json: bool) -> None:
    """Show the tools of a running tool service, or of CONFIG's (default: demo), which is started for the question.

    Exits with 1 if a tool is not healthy.
    """
    tools = asyncio.run(_ask(target, security) if target else _start_and_ask(config, security))
    if as_json:
        output.print_json([output.plain(tool) for tool in tools])
    else:
        _show(tools)
    sys.exit(0 if all(tool.healthy for tool in tools) else 1)


async def _ask(target: str, security: ConnectionSecurity) -> list[tool_pb2.ToolInfo]:
    async with ToolClient(target, security) as client:
        await client.wait_until_ready(10.0)
        return await client.list_tools()


async def _start_and_ask(config: str, security: ConnectionSecurity) -> list[tool_pb2.ToolInfo]:
    services = launch.examine(config).usable().services
    if services is None:
        raise click.UsageError(f"{config} has no `services:`; name a running tool service with --target HOST:PORT")
    with tempfile.TemporaryDirectory(prefix="turnwire-tools-") as folder:
        started = Services(services, Path(folder), lambda _: None)
        async with started.only_tools():
            return await _ask(started.targets["tool"], started_here(services.tool.server, security))


def _show(tools: list[tool_pb2.ToolInfo]) -> None:
    table = output.table("tool", "health", "what it does", "stops at", "sandbox", ">limit")
    for tool in tools:
        health = Text("healthy", "green") if tool.healthy else Text(tool.health_detail or "not healthy", "red")
        seconds = tool.default_timeout.ToTimedelta().total_seconds()
        table.add_row(
            Text(tool.name, "bold"),
            health,
            _first_sentence(tool.description),
            " ".join(tool.stop_strings),
            tool.sandbox_tier or "none",
            f"{seconds:g} s",
        )
    output.console.print(table)


def _first_sentence(text: str) -> str:
    head, dot, _ = text.strip().partition(". ")
    return head + dot.strip()
