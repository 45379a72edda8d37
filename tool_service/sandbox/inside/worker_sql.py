"""Runtime `sql`: SQLite on a file of the workspace, behind an authorizer, limits and a process that can be killed.

The authorizer is an allow-list: what is not named is "not authorized". In a read-only turn SQLite itself refuses to
write (`query_only`), and not the authorizer: opening a virtual table prepares writes that are never run. The progress
handler is the soft deadline; it does not fire inside one long opcode, so the supervisor's kill is the hard one. One
statement a query, several in a script; a schema lists tables, without a statement. A transaction that a query leaves
open stays open for the session's next one, and is rolled back when the worker dies; a script leaves none.
"""

import json
import math
import re
import sqlite3
import sys
import time
from typing import Any

from . import runtimes

DATABASE = "database.sqlite3"
"""The file of the workspace that statements work on."""
ROLLED_BACK = "; the transaction was rolled back"
"""How the text of an error ends that has undone more than its own statement."""
_MIB = 1024 * 1024
_STEPS_PER_CHECK = 20_000
_SOFT_SHARE = 0.9
"""Of the turn's seconds, after which the progress handler stops the statement (the kill comes at all of them)."""

_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_WRITES = frozenset(
    {
        sqlite3.SQLITE_TRANSACTION,
        sqlite3.SQLITE_SAVEPOINT,
        sqlite3.SQLITE_INSERT,
        sqlite3.SQLITE_UPDATE,
        sqlite3.SQLITE_DELETE,
        sqlite3.SQLITE_CREATE_INDEX,
        sqlite3.SQLITE_CREATE_TABLE,
        sqlite3.SQLITE_CREATE_TEMP_INDEX,
        sqlite3.SQLITE_CREATE_TEMP_TABLE,
        sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
        sqlite3.SQLITE_CREATE_TEMP_VIEW,
        sqlite3.SQLITE_CREATE_TRIGGER,
        sqlite3.SQLITE_CREATE_VIEW,
        sqlite3.SQLITE_DROP_INDEX,
        sqlite3.SQLITE_DROP_TABLE,
        sqlite3.SQLITE_DROP_TEMP_INDEX,
        sqlite3.SQLITE_DROP_TEMP_TABLE,
        sqlite3.SQLITE_DROP_TEMP_TRIGGER,
        sqlite3.SQLITE_DROP_TEMP_VIEW,
        sqlite3.SQLITE_DROP_TRIGGER,
        sqlite3.SQLITE_DROP_VIEW,
        sqlite3.SQLITE_ALTER_TABLE,
        sqlite3.SQLITE_REINDEX,
        sqlite3.SQLITE_ANALYZE,
    }
)
_VIRTUAL = frozenset({sqlite3.SQLITE_CREATE_VTABLE, sqlite3.SQLITE_DROP_VTABLE})
_VIRTUAL_MODULES = frozenset({"fts5", "rtree"})
_FUNCTIONS_DENIED = frozenset({"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit", "zeroblob_file"})
_TABLES_DENIED = frozenset({"dbstat", "sqlite_dbpage", "sqlite_dbdata", "sqlite_dbptr"})
_PRAGMAS_TO_READ = frozenset(
    {
        "table_info",
        "table_xinfo",
        "table_list",
        "index_list",
        "index_info",
        "index_xinfo",
        "foreign_key_list",
        "foreign_key_check",
        "integrity_check",
        "quick_check",
        "collation_list",
        "function_list",
        "compile_options",
    }
)
_PRAGMAS_WITHOUT_VALUE = frozenset(
    {"user_version", "schema_version", "data_version", "encoding", "page_count", "page_size"}  # data_version: for fts5
)
_PRAGMAS_TO_SET = frozenset({"foreign_keys", "defer_foreign_keys"})
"""The first begins what `sqlite3` dumps. Both are the session's own."""
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 16 * _MIB,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 * _MIB,
    sqlite3.SQLITE_LIMIT_COLUMN: 1000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 500,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 200,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 1_000_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 1000,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 30,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_DEFAULTS = {"read_only": False, "max_rows": 1000, "max_cell_bytes": 4096}
_WORK = frozenset({"script", "query", "schema"})
_BEHIND_WITH = re.compile(r"(?:\s|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*\*/)*with\b", re.IGNORECASE)
"""How statements begin for which Python's module counts no changes."""
_MOST_TABLES = 200
_MOST_COUNTED = 1001
"""Rows of a table beyond which a schema does not count."""


def encode(payload: dict[str, Any]) -> bytes:
    kinds = {"script": str, "query": str, "schema": str, "read_only": bool, "max_rows": int, "max_cell_bytes": int}
    for key, value in payload.items():
        if key not in kinds or not isinstance(value, kinds[key]):
            raise ValueError(f"the sql runtime does not take {key}={type(value).__name__}")
    if len(_WORK & payload.keys()) != 1:
        raise ValueError("the sql runtime takes one of 'script', 'query' and 'schema'")
    return json.dumps(payload).encode("ascii")


class Session:
    """One connection. The deadline and the mode of the present turn are attributes that the callbacks read."""

    def __init__(self, context: runtimes.Context) -> None:
        self._value_bytes = context.value_bytes
        self._deadline = math.inf
        self._read_only = False
        self._path = f"{context.workspace}/{DATABASE}"
        self._connection: sqlite3.Connection | None = None

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self._path, isolation_level=None, cached_statements=0, timeout=1.0)
            for limit, value in _LIMITS.items():
                connection.setlimit(limit, value)
            connection.text_factory = lambda data: data.decode("utf-8", "replace")
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA temp_store=MEMORY")
            if sys.version_info >= (3, 12):
                connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
            connection.set_authorizer(self._authorize)
            connection.set_progress_handler(self._out_of_time, _STEPS_PER_CHECK)
            self._connection, self._read_only = connection, False
        return self._connection

    def _out_of_time(self) -> int:
        return int(time.monotonic() > self._deadline)

    def _authorize(
        self, action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
    ) -> int:
        if action in _READS:
            name = (second if action == sqlite3.SQLITE_FUNCTION else first) or ""
            denied = _FUNCTIONS_DENIED if action == sqlite3.SQLITE_FUNCTION else _TABLES_DENIED
            return sqlite3.SQLITE_DENY if name.lower() in denied else sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA:
            name = (first or "").lower()
            free = _PRAGMAS_TO_READ | _PRAGMAS_TO_SET | (_PRAGMAS_WITHOUT_VALUE if second is None else frozenset())
            return sqlite3.SQLITE_OK if name in free else sqlite3.SQLITE_DENY
        if action in _WRITES or (action in _VIRTUAL and (second or "").lower() in _VIRTUAL_MODULES):
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    def _restrict(self, connection: sqlite3.Connection, read_only: bool) -> None:
        if read_only != self._read_only:
            connection.set_authorizer(None)
            try:
                connection.execute(f"PRAGMA query_only={read_only:d}")
            finally:
                connection.set_authorizer(self._authorize)
            self._read_only = read_only

    def run(self, body: bytes, seconds: float) -> runtimes.Reply:
        payload = {**_DEFAULTS, **json.loads(body)}
        self._deadline = time.monotonic() + seconds * _SOFT_SHARE
        in_transaction = self._in_transaction()
        try:
            connection = self._connect()
            self._restrict(connection, payload["read_only"])
            if "script" in payload:
                self._script(connection, payload["script"])
                return runtimes.Reply(runtimes.OK)
            if "schema" in payload:
                return runtimes.Reply(runtimes.OK, body=self._schema(connection, payload["schema"]))
            return runtimes.Reply(runtimes.OK, body=self._query(connection, payload))
        except MemoryError:
            return runtimes.Reply(runtimes.MEMORY, body=f"MemoryError{self._lost(in_transaction)}".encode())
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, RecursionError) as error:
            lost = self._lost(in_transaction)
            if self._out_of_time():
                text = f"the statement was stopped at its deadline{lost}"
                return runtimes.Reply(runtimes.TIMEOUT, body=text.encode("ascii"))
            if _code(error) == sqlite3.SQLITE_READONLY_DBMOVED and self._connection is not None:
                self._connection.close()  # it is of a file that a program has replaced or removed
                self._connection = None
            text = f"{type(error).__name__}: {_reason(error)}"[:1900] + lost
            return runtimes.Reply(runtimes.ERROR, body=text.encode("utf-8", "replace")[:2000])
        finally:
            self._deadline = math.inf

    def _in_transaction(self) -> bool:
        return self._connection is not None and self._connection.in_transaction

    def _lost(self, in_transaction: bool) -> str:
        """What an error has undone beside its own statement, of a turn that began in a transaction or not."""
        return ROLLED_BACK if in_transaction and not self._in_transaction() else ""

    def _script(self, connection: sqlite3.Connection, text: str) -> None:
        connection.executescript(text)
        if connection.in_transaction:
            connection.execute("ROLLBACK")
            raise sqlite3.OperationalError("the script leaves a transaction open: COMMIT it")

    def _query(self, connection: sqlite3.Connection, payload: dict[str, Any]) -> bytes:
        """The value as JSON: columns, rows (capped by number and bytes), whether rows were left out, rows changed."""
        before = connection.total_changes
        cursor = connection.execute(payload["query"])
        try:
            columns = [str(column[0])[:1000] for column in cursor.description or ()]
            rows: list[str] = []
            truncated = False
            room = self._value_bytes - len(json.dumps(columns)) - 200
            if room < 0:
                raise sqlite3.DataError("the names of the columns are too long together")
            for row in cursor:
                text = json.dumps([_cell(value, payload["max_cell_bytes"]) for value in row])
                room -= len(text) + 1
                if len(rows) >= payload["max_rows"] or room < 0:
                    truncated = True
                    break
                rows.append(text)
            changes = max(cursor.rowcount, 0)
        finally:
            cursor.close()
        if _BEHIND_WITH.match(payload["query"]) and not columns and connection.total_changes > before:
            (changes,) = connection.execute("SELECT changes()").fetchone()
        head = {"columns": columns, "truncated": truncated, "changes": changes}
        return f'{json.dumps(head)[:-1]}, "rows": [{",".join(rows)}]}}'.encode("ascii")

    def _schema(self, connection: sqlite3.Connection, name: str) -> bytes:
        """The value as JSON: `tables`, those of a name or all, and whether some were left out (see sql/schema.py)."""
        wanted = [
            (table, kind)
            for schema, table, kind, *_ in connection.execute("PRAGMA table_list").fetchall()
            if schema in ("main", "temp")
            and kind != "shadow"
            and not table.startswith("sqlite_")
            and name.lower() in ("", table.lower())
        ]
        tables: list[str] = []
        room = self._value_bytes - 200
        for table, kind in sorted(wanted)[:_MOST_TABLES]:
            text = json.dumps(self._table(connection, table, kind))
            room -= len(text) + 1
            if room < 0:
                break
            tables.append(text)
        truncated = json.dumps(len(tables) < len(wanted))
        return f'{{"truncated": {truncated}, "tables": [{",".join(tables)}]}}'.encode("ascii")

    def _table(self, connection: sqlite3.Connection, name: str, kind: str) -> dict[str, Any]:
        quoted = '"' + name.replace('"', '""') + '"'
        rows, references, found = None, {}, []
        try:
            found = connection.execute(f"PRAGMA table_xinfo({quoted})").fetchall()
            references = {
                source: f"{table}({target})" if target else str(table)
                for _, _, table, source, target, *_ in connection.execute(f"PRAGMA foreign_key_list({quoted})")
            }
            if kind == "table":
                (rows,) = connection.execute(
                    f"SELECT count(*) FROM (SELECT 1 FROM {quoted} LIMIT {_MOST_COUNTED})"  # noqa: S608 - quoted
                ).fetchone()
        except sqlite3.Error:  # a view on what is not there any more, a damaged table
            if self._out_of_time():
                raise
        columns = [
            {
                "name": column[:1000],
                "type": str(type_name)[:1000],
                "not_null": bool(not_null),
                "primary_key": bool(key),
                "references": references.get(column, ""),
            }
            for _, column, type_name, not_null, _, key, hidden in found
            if hidden != 1
        ]
        return {"name": name[:1000], "kind": kind, "rows": rows, "columns": columns}


def _code(error: Exception) -> int | None:
    """SQLite's own, where it is the one who says so."""
    return getattr(error, "sqlite_errorcode", None)


def _reason(error: Exception) -> str:
    """SQLite's words, but for two that would be taken for something else: a broken disk, and a read-only database."""
    if _code(error) == sqlite3.SQLITE_IOERR_WRITE:  # a file at its size limit
        return "database or disk is full"
    if _code(error) == sqlite3.SQLITE_READONLY_DBMOVED:
        return "the database's file is not there any more, or is another: the next call opens what is there"
    return str(error)


def _cell(value: Any, most: int) -> Any:
    """A cell as JSON. null, integers, finite floats and short text are themselves; the rest is an object:
    {"float": "inf" | "-inf"}, {"blob": hex, "bytes": n}, {"text": its first part, "bytes": n}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, bytes):
        return {"blob": value[: most // 2].hex(), "bytes": len(value)}
    if isinstance(value, str) and len(value) > most // 4:
        data = value.encode("utf-8", "replace")
        if len(data) > most:
            return {"text": data[:most].decode("utf-8", "ignore"), "bytes": len(data)}
    return value
