"""The `sql` tool: a database of the trajectory's own, SQLite in its sandbox or PostgreSQL on a server.

One call takes one statement, in both dialects: the database itself refuses several. `.schema` in place of a statement
lists tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tool_service.base import BaseTool, ToolAction, ToolConfig, ToolObservation, TurnContext
from tool_service.sandbox.base import JSON, Sandbox, SandboxError, Turn, TurnResult, TurnStatus
from tool_service.sandbox.inside.worker_sql import DATABASE, ROLLED_BACK
from tool_service.sql import schema
from tool_service.sql.config import PostgresConfig
from tool_service.sql.connection import Caps
from tool_service.sql.database import GRACE_SECONDS, PostgresDatabase
from tool_service.sql.server import PostgresServer
from tool_service.tools.outcome import failure_of, value_of
from turnwire.config import nearest
from turnwire.errors import InvalidRequestError, Problem

RESTARTED = "[the session was restarted: an open transaction was rolled back, temporary tables and settings are gone]"
"""First line of the first observation after a session was lost, and its database was not."""
REPLACED = "[the database was lost: it is again as it was at first]"
"""The same where it was."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class SqlTool(BaseTool):
    """Observations are a header and a line a row, cells separated by ` | `."""

    name = "sql"
    description = (
        "Runs one SQL statement on the task's database. Answers with the column names and then one line a row, or with "
        "the error. Changes stay for later calls unless the database is read-only. In place of a statement, .schema "
        "lists the tables with their columns, and .schema NAME one table."
    )
    needs_sandbox = True
    grace_seconds = GRACE_SECONDS

    class Config(ToolConfig, frozen=True):
        """
        database_folder: where the files lie that a context may name; empty: contexts may name none.
        max_database_bytes: of such a file. It is copied into the sandbox, and never written.
        init_seconds: how long a context's init_sql may take.
        shown_rows: rows of one answer that the agent sees.
        max_rows: rows of one answer that programs see (`Observation.data`).
        max_cell_bytes: of one cell, beyond which it is cut.
        max_result_bytes: of one answer's rows; what is beyond is left out. (SQLite: sandbox.limits.value_bytes.)
        postgres: the server for contexts that ask for PostgreSQL; none: they are refused.
        """

        database_folder: str = ""
        max_database_bytes: Count = 64 * 2**20
        init_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 20.0
        shown_rows: Count = 50
        max_rows: Count = 1000
        max_cell_bytes: Annotated[int, msgspec.Meta(ge=16)] = 1024
        max_result_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 2**20
        postgres: PostgresConfig | None = None

    class Postgres(msgspec.Struct, forbid_unknown_fields=True):
        """A PostgreSQL database in place of SQLite."""

        template: Annotated[
            str, msgspec.Meta(description="A database of the server's to start from a copy of; none: an empty one.")
        ] = ""

    class Context(msgspec.Struct):
        """The trajectory's database. Without any field it is SQLite, and empty."""

        init_sql: Annotated[str, msgspec.Meta(description="Statements that build the database.")] = ""
        database: Annotated[
            str, msgspec.Meta(description="A file below the service's database_folder, to start from.")
        ] = ""
        read_only: Annotated[bool, msgspec.Meta(description="Whether the agent may only read.")] = False
        postgres: SqlTool.Postgres | None = None

    class Arguments(msgspec.Struct):
        query: Annotated[str, msgspec.Meta(description="One SQL statement, or .schema.")]

    config: Config
    shared: PostgresServer | None
    _postgres: PostgresDatabase | None = None
    _used = False
    """Whether the agent has worked on its database."""
    _replaced = False
    """Whether it went with its sandbox, and the agent does not know yet."""

    @classmethod
    def check_config(cls, config: Config) -> list[Problem]:
        problems = config.postgres.check() if config.postgres else []
        if config.database_folder and not Path(config.database_folder).is_dir():
            problems.append(Problem("database_folder", f"{config.database_folder} is not a directory"))
        return problems

    @classmethod
    def check_context(cls, config: Config, context: Context) -> None:
        if context.postgres is None:
            if context.database:
                cls._file(config, context.database)
        elif context.database:
            raise _refused("either database, which is SQLite's, or postgres")
        elif config.postgres is None:
            raise _refused("postgres is set, but the service has no tools.sql.postgres")
        elif context.postgres.template and context.postgres.template not in config.postgres.templates:
            raise _refused(
                f"template {context.postgres.template[:80]!r} is not one of tools.sql.postgres.templates: "
                f"{nearest(context.postgres.template[:80], config.postgres.templates)}"
            )

    @classmethod
    async def setup(cls, config: Config) -> PostgresServer | None:
        if config.postgres is None:
            return None
        server = PostgresServer(config.postgres)
        try:
            await server.start()
        except BaseException:
            await server.close()
            raise
        return server

    @classmethod
    async def health(cls, config: Config, shared: PostgresServer | None) -> str:
        return await shared.health() if shared else ""

    @classmethod
    async def teardown(cls, shared: PostgresServer | None) -> None:
        if shared:
            await shared.close()

    async def reset(self, context: Context) -> None:
        self.check_context(self.config, context)
        self._context = context
        self._database = self._file(self.config, context.database) if context.database else None
        if context.postgres is not None and self.shared is not None:
            self._postgres = PostgresDatabase(
                self.shared, context.postgres.template, context.init_sql, self.config.init_seconds, context.read_only
            )
            self.needs_sandbox = False

    async def prepare(self) -> None:
        if self._postgres is not None:
            await self._postgres.ready()

    async def close(self) -> None:
        if self._postgres is not None:
            await self._postgres.close()

    @staticmethod
    def _file(config: Config, name: str) -> Path:
        """A file below the configured folder, links resolved."""
        if not config.database_folder:
            raise _refused("database is set, but the service has no tools.sql.database_folder")
        folder = Path(config.database_folder).resolve()
        try:
            file = (folder / name).resolve()
            inside = file.is_relative_to(folder) and file.is_file()
            size = file.stat().st_size if inside else 0
        except (OSError, ValueError) as error:
            raise _refused(f"database {name[:200]!r}: {error}") from error
        if not inside:
            raise _refused(f"there is no database {name[:200]!r}")
        if size > config.max_database_bytes:
            raise _refused(
                f"database {name[:200]!r} has {size} bytes; "
                f"at most {config.max_database_bytes} are taken (tools.sql.max_database_bytes)"
            )
        return file

    async def prepare_sandbox(self, sandbox: Sandbox) -> None:
        self._replaced = self._used
        if self._database is not None:
            await sandbox.put_file(DATABASE, await asyncio.to_thread(self._database.read_bytes))
        if not self._context.init_sql:
            return
        turn = Turn("sql", {"script": self._context.init_sql}, self.config.init_seconds)
        result = await sandbox.run(turn)
        if result.status in (TurnStatus.INFRA, TurnStatus.SESSION_LOST):
            raise SandboxError(f"init_sql: {result.detail}")
        if result.status is not TurnStatus.OK:
            raise _refused(f"init_sql failed: {result.status}: {result.detail}")

    async def execute(self, action: ToolAction[Arguments], turn: TurnContext) -> ToolObservation:
        statement = action.arguments.query.strip()
        table = schema.asked_for(statement)
        used, self._used = self._used, True
        if self._postgres is not None:
            result = await self._on_server(self._postgres, statement, table, turn.remaining())
        else:
            result = await turn.run("sql", self._payload(statement, table))
        observation = self._observation(result, table)
        if self._replaced:
            self._replaced = False
            return _noted(observation, REPLACED)
        return _noted(observation, RESTARTED) if result.restarted and used else observation

    def _observation(self, result: TurnResult, table: str | None) -> ToolObservation:
        if result.status is TurnStatus.TOOL_ERROR:
            message = result.detail if self._postgres else _message(result.detail)
            return ToolObservation.failed(f"error: {message}", detail=result.detail)
        if result.status is TurnStatus.SESSION_LOST and self._postgres is not None:
            return ToolObservation.failed(f"error: {result.detail}; the next call starts afresh", "SESSION_LOST")
        if result.status is not TurnStatus.OK:
            return failure_of(result, ROLLED_BACK if result.detail.endswith(ROLLED_BACK) else "")
        if table is not None:
            return schema.describe(value_of(result), table)
        return observation_of(value_of(result), self.config.shown_rows)

    def _payload(self, statement: str, table: str | None) -> dict[str, JSON]:
        if table is not None:
            return {"schema": table}
        return {
            "query": statement,
            "read_only": self._context.read_only,
            "max_rows": self.config.max_rows,
            "max_cell_bytes": self.config.max_cell_bytes,
        }

    async def _on_server(
        self, database: PostgresDatabase, statement: str, table: str | None, seconds: float
    ) -> TurnResult:
        if table is not None:
            return await database.schema(table, seconds)
        config = self.config
        caps = Caps(config.max_rows, config.max_cell_bytes, config.max_result_bytes)
        return await database.run(statement, seconds, caps, config.shown_rows)


def _refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"context of tool 'sql': {why}")


def observation_of(table: Mapping[str, Any], shown_rows: int) -> ToolObservation:
    """A result as text: the header, the rows, and a note of the rows that are not shown."""
    columns, rows = table["columns"], table["rows"]
    if not columns:
        return ToolObservation(f"({_count(table['changes'])} changed)", data={"changes": table["changes"]})
    shown = table.get("shown") or [[_cell(cell) for cell in row] for row in rows[:shown_rows]]
    lines = [" | ".join(map(_one_line, line)) for line in (columns, *shown)]
    hidden = len(rows) - shown_rows
    if not rows and not table["truncated"]:
        lines.append("(0 rows)")
    elif hidden > 0 or table["truncated"]:
        lines.append(f"({'at least ' if table['truncated'] else ''}{max(hidden, 0) + table['truncated']} more rows)")
    data = {"columns": columns, "rows": rows, "truncated": table["truncated"]}
    return ToolObservation("\n".join(lines), data=data)


def _noted(observation: ToolObservation, note: str) -> ToolObservation:
    """With what the agent must know first."""
    data = {**(observation.data or {}), "restarted": True}
    return msgspec.structs.replace(observation, content=f"{note}\n{observation.content}", data=data)


def _message(detail: str) -> str:
    """A sandbox's error without the exception's type."""
    return detail.partition(": ")[2] or detail


def _count(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _cell(value: Any) -> str:
    """A cell as the agent sees it. What is not a plain JSON value comes as the sandbox describes it."""
    if value is None:
        return "NULL"
    if isinstance(value, dict):
        if "float" in value:
            return str(value["float"])
        text = f"x'{value['blob']}'" if "blob" in value else str(value["text"])
        shown = len(value["blob"]) // 2 if "blob" in value else -1
        return text if shown == value["bytes"] else f"{text}... ({value['bytes']} bytes)"
    return str(value)


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
