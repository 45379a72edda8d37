"""What `turnwire sandbox sweep` does: asks each place for leftovers, by the rule of the service that made them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tool_service.config import SandboxConfig
from tool_service.sandbox import SandboxUnavailable
from tool_service.sandbox.scratch import Scratch
from tool_service.sql import server
from tool_service.sql.config import PostgresConfig
from turnwire.cli import output
from turnwire.config import convert
from turnwire.errors import ConfigError, Problem, UnavailableError


class Leftover(msgspec.Struct, frozen=True):
    """One thing that nobody will end."""

    kind: str
    name: str
    detail: str = ""


class Found(msgspec.Struct):
    """What was found in all places."""

    leftovers: list[Leftover]
    removed: int
    errors: list[str]
    """Places that could not be searched, or be cleaned, and why."""
    dry_run: bool


Place = Callable[[bool], Awaitable[tuple[list[Leftover], int]]]
"""Lists its leftovers and, where that is wanted, removes them; how many were removed."""


def postgres_settings(tool_service: dict[str, Any]) -> PostgresConfig | None:
    """Of a tool service's plain config; None where it names no server. Raises ConfigError."""
    match tool_service:
        case {"tools": {"sql": {"postgres": dict() as values}}}:
            config = convert(values, PostgresConfig, prefix="tools.sql.postgres")
            if problems := config.check():
                raise ConfigError([Problem(f"tools.sql.{problem.key}", problem.message) for problem in problems])
            return config
    return None


async def run(settings: SandboxConfig, postgres: PostgresConfig | None, remove: bool) -> Found:
    """Search every place that the settings name. Never raises for a place that cannot be reached."""
    found = Found([], 0, [], dry_run=not remove)
    places: list[Place] = [_folders]
    if settings.backend == "docker":
        places.append(lambda remove: _containers(settings, remove))
    if postgres is not None:
        places.append(lambda remove: _databases(postgres, remove))
    for place in places:
        try:
            leftovers, removed = await place(remove)
        except (SandboxUnavailable, UnavailableError) as error:
            found.errors.append(str(error))
            continue
        found.leftovers += leftovers
        found.removed += removed
        if remove and removed < len(leftovers):
            found.errors.append(f"{len(leftovers) - removed} {leftovers[0].kind}s could not be removed")
    return found


async def _folders(remove: bool) -> tuple[list[Leftover], int]:
    scratch = Scratch()
    listed = [Leftover("folder", path) for path in scratch.leftovers()]
    return listed, scratch.sweep() if remove else 0


async def _containers(settings: SandboxConfig, remove: bool) -> tuple[list[Leftover], int]:
    from tool_service.sandbox.docker import DockerBackend  # noqa: PLC0415 - its SDK is heavy

    backend = DockerBackend(settings.docker, owner=settings.owner)
    try:
        await backend.connect()
        listed = [Leftover("container", one.container[:12], one.status) for one in await backend.leftovers()]
        return listed, await backend.sweep() if remove else 0
    finally:
        await backend.close()


async def _databases(config: PostgresConfig, remove: bool) -> tuple[list[Leftover], int]:
    listed = await server.sweep(config, remove=False)
    removed = await server.sweep(config) if remove else []
    return [Leftover("database", name) for name in listed], len(removed)


def show(found: Found) -> None:
    """For people."""
    if found.leftovers:
        table = output.table("kind", "name", "state")
        for one in found.leftovers:
            table.add_row(one.kind, one.name, one.detail)
        output.console.print(table)
    for error in found.errors:
        output.notes.print(f"error: {error}", style="red", soft_wrap=True)
    count = len(found.leftovers)
    what = f"{count} leftover{'' if count == 1 else 's'}"
    if not count:
        output.console.print("nothing is left behind" + (" where it could be searched" if found.errors else ""))
    elif found.dry_run:
        output.console.print(f"{what}; without --dry-run they are removed")
    else:
        output.console.print(f"{what}, {found.removed} removed")
