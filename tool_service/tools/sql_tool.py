"""The `sql` tool: SQLite on a database of the trajectory's own, in the trajectory's sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec

from tool_service.base import BaseTool, ToolAction, ToolConfig, ToolObservation, TurnContext
from tool_service.sandbox.base import Sandbox, SandboxError, Turn, TurnStatus
from tool_service.tools.outcome import failure_of
from turnwire.errors import InvalidRequestError, Problem

DATABASE = "database.sqlite3"
"""The file of the sandbox's workspace that its `sql` runtime works on."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class SqlTool(BaseTool):
    """Observations are a header and a line a row, cells separated by ` | `."""

    name = "sql"
    description = (
        "Runs one SQL statement on the task's SQLite database. Answers with the column names and then one line a row, "
        "or with the error. Changes stay for later calls unless the database is read-only."
    )
    needs_sandbox = True

    class Config(ToolConfig, frozen=True):
        """
        database_folder: where the files lie that a context may name; empty: contexts may name none.
        max_database_bytes: of such a file. It is copied into the sandbox, and never written.
        init_seconds: how long a context's init_sql may take.
        shown_rows: rows of one answer that the agent sees.
        max_rows: rows of one answer that programs see (`Observation.data`).
        max_cell_bytes: of one cell, beyond which it is cut.
        """

        database_folder: str = ""
        max_database_bytes: Count = 64 * 2**20
        init_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 20.0
        shown_rows: Count = 50
        max_rows: Count = 1000
        max_cell_bytes: Annotated[int, msgspec.Meta(ge=16)] = 1024

    class Context(msgspec.Struct):
        """The trajectory's database. Without either field it is empty."""

        init_sql: Annotated[str, msgspec.Meta(description="Statements that build the database.")] = ""
        database: Annotated[
            str, msgspec.Meta(description="A file below the service's database_folder, to start from.")
        ] = ""
        read_only: Annotated[bool, msgspec.Meta(description="Whether the agent may only read.")] = False

    class Arguments(msgspec.Struct):
        query: Annotated[str, msgspec.Meta(description="One SQL statement.")]

    config: Config

    @classmethod
    def check_config(cls, config: Config) -> list[Problem]:
        if config.database_folder and not Path(config.database_folder).is_dir():
            return [Problem("database_folder", f"{config.database_folder} is not a directory")]
        return []

    @classmethod
    def check_context(cls, config: Config, context: Context) -> None:
        if context.database:
            cls._file(config, context.database)

    async def reset(self, context: Context) -> None:
        self._context = context
        self._database = self._file(self.config, context.database) if context.database else None

    @staticmethod
    def _file(config: Config, name: str) -> Path:
        """A file below the configured folder, links resolved."""
        if not config.database_folder:
            raise InvalidRequestError(
                "context of tool 'sql': database is set, but the service has no tools.sql.database_folder"
            )
        folder = Path(config.database_folder).resolve()
        try:
            file = (folder / name).resolve()
            inside = file.is_relative_to(folder) and file.is_file()
            size = file.stat().st_size if inside else 0
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"context of tool 'sql': database {name[:200]!r}: {error}") from error
        if not inside:
            raise InvalidRequestError(f"context of tool 'sql': there is no database {name[:200]!r}")
        if size > config.max_database_bytes:
            raise InvalidRequestError(
                f"context of tool 'sql': database {name[:200]!r} has {size} bytes; "
                f"at most {config.max_database_bytes} are taken (tools.sql.max_database_bytes)"
            )
        return file

    async def prepare_sandbox(self, sandbox: Sandbox) -> None:
        if self._database is not None:
            await sandbox.put_file(DATABASE, await asyncio.to_thread(self._database.read_bytes))
        if not self._context.init_sql:
            return
        turn = Turn("sql", {"script": self._context.init_sql}, self.config.init_seconds)
        result = await sandbox.run(turn)
        if result.status in (TurnStatus.INFRA, TurnStatus.SESSION_LOST):
            raise SandboxError(f"init_sql: {result.detail}")
        if result.status is not TurnStatus.OK:
            raise InvalidRequestError(f"context of tool 'sql': init_sql failed: {result.status}: {result.detail}")

    async def execute(self, action: ToolAction[Arguments], turn: TurnContext) -> ToolObservation:
        result = await turn.run(
            "sql",
            {
                "query": action.arguments.query.strip(),
                "read_only": self._context.read_only,
                "max_rows": self.config.max_rows,
                "max_cell_bytes": self.config.max_cell_bytes,
            },
        )
        if result.status is TurnStatus.OK:
            return observation_of(cast(dict[str, Any], result.value), self.config.shown_rows)
        if result.status is TurnStatus.TOOL_ERROR:
            _, _, message = result.detail.partition(": ")  # after the exception's type
            return ToolObservation.failed(f"error: {message or result.detail}", detail=result.detail)
        return failure_of(result)


def observation_of(table: dict[str, Any], shown_rows: int) -> ToolObservation:
    """A result as text: the header, the rows, and a note of the rows that are not shown."""
    columns, rows = table["columns"], table["rows"]
    if not columns:
        return ToolObservation(f"({_count(table['changes'])} changed)", data={"changes": table["changes"]})
    lines = [" | ".join(_one_line(column) for column in columns)]
    lines += [" | ".join(_cell(cell) for cell in row) for row in rows[:shown_rows]]
    hidden = len(rows) - shown_rows
    if not rows and not table["truncated"]:
        lines.append("(0 rows)")
    elif hidden > 0 or table["truncated"]:
        lines.append(f"({'at least ' if table['truncated'] else ''}{max(hidden, 0) + table['truncated']} more rows)")
    data = {"columns": columns, "rows": rows, "truncated": table["truncated"]}
    return ToolObservation("\n".join(lines), data=data)


def _count(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _cell(value: Any) -> str:
    """A cell as the agent sees it. What is not a plain JSON value comes as the sandbox describes it."""
    if value is None:
        return "NULL"
    if isinstance(value, dict):
        if "float" in value:
            return str(value["float"])
        text = f"x'{value['blob']}'" if "blob" in value else _one_line(value["text"])
        shown = len(value["blob"]) // 2 if "blob" in value else -1
        return text if shown == value["bytes"] else f"{text}... ({value['bytes']} bytes)"
    return _one_line(str(value))


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
