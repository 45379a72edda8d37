"""The answer to `.schema`: tables with their columns, types, keys and sizes, alike for both dialects.

As data it is `{"tables": [{"name", "kind", "rows", "columns": [{"name", "type", "not_null", "primary_key",
"references"}]}], "truncated"}`, where `rows` is null for what is not counted, and counted up to `MOST_ROWS` + 1.
SQLite's comes so from the sandbox (`inside/worker_sql.py`); PostgreSQL's is put together here.
"""

# ruff: noqa: S608 - names are quoted, and the agent's own role runs them

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tool_service.action import ToolObservation

MOST_ROWS = 1000
"""Beyond which rows are not counted."""
MOST_TABLES = 200
MOST_COLUMNS = 5000
"""Of all tables together."""

_COMMAND = re.compile(r"\.schema(?:\s+(?P<name>.+?))?\s*;?", re.DOTALL)


def asked_for(statement: str) -> str | None:
    """The table whose schema is asked for; empty for all tables, None for what is no such question."""
    match = _COMMAND.fullmatch(statement)
    return (match["name"] or "").strip('"') if match else None


def describe(value: Mapping[str, Any], name: str) -> ToolObservation:
    """The answer as the agent sees it."""
    tables = value.get("tables", [])
    if name and not tables and not value.get("truncated"):
        return ToolObservation.failed(f"error: no such table: {name[:200]}")
    lines = [line for table in tables for line in _lines(table)] or ["(no tables)"]
    lines = [line.replace("\r", "\\r").replace("\n", "\\n") for line in lines]
    if value.get("truncated"):
        lines.append("(more is left out; .schema NAME shows one table)")
    return ToolObservation("\n".join(lines), data=value)


def _lines(table: Mapping[str, Any]) -> list[str]:
    rows = table["rows"]
    if rows is None:
        size = table["kind"]
    elif rows > MOST_ROWS:
        size = f"more than {MOST_ROWS} rows"
    else:
        size = "1 row" if rows == 1 else f"{rows} rows"
    return [f"{table['name']}: {size}", *(f"  {_column(column)}" for column in table["columns"])]


def _column(column: Mapping[str, Any]) -> str:
    parts = [f"{column['name']} {column['type']}".rstrip()]
    if column["primary_key"]:
        parts.append("primary key")
    elif column["not_null"]:
        parts.append("not null")
    if column["references"]:
        parts.append(f"references {column['references']}")
    return ", ".join(parts)


# PostgreSQL

_KINDS = {"r": "table", "p": "table", "v": "view", "m": "materialized view", "f": "foreign table"}


def listing(name: str) -> str:
    """A statement with a row a column: quoted name, shown name, kind, column, type, not null, primary key, references.

    Whatever the session's search_path is, it means the catalog's own tables and functions.
    """
    literal = "'" + name.replace("'", "''") + "'"
    return f"""
SELECT pg_catalog.format('%I.%I', n.nspname, c.relname),
       CASE WHEN pg_catalog.pg_table_is_visible(c.oid) THEN c.relname ELSE n.nspname || '.' || c.relname END,
       c.relkind, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull,
       EXISTS (SELECT FROM pg_catalog.pg_constraint k
               WHERE k.conrelid = c.oid AND k.contype = 'p' AND a.attnum = ANY (k.conkey)),
       (SELECT f.relname || '(' || b.attname || ')' FROM pg_catalog.pg_constraint k
        JOIN pg_catalog.pg_class f ON f.oid = k.confrelid
        CROSS JOIN LATERAL ROWS FROM (pg_catalog.unnest(k.conkey), pg_catalog.unnest(k.confkey)) AS pair (here, there)
        JOIN pg_catalog.pg_attribute b ON b.attrelid = k.confrelid AND b.attnum = pair.there
        WHERE k.conrelid = c.oid AND k.contype = 'f' AND pair.here = a.attnum ORDER BY k.conname LIMIT 1)
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT c.relispartition
  AND (n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' OR n.oid = pg_catalog.pg_my_temp_schema())
  AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
  AND {literal} IN ('', c.relname, n.nspname || '.' || c.relname, pg_catalog.lower(c.relname))
ORDER BY NOT pg_catalog.pg_table_is_visible(c.oid), n.nspname, c.relname, a.attnum"""


def tables_of(rows: Sequence[Sequence[str | None]]) -> list[dict[str, Any]]:
    """From a listing's rows; each with the `quoted` name under which it is counted."""
    tables: dict[str, dict[str, Any]] = {}
    for quoted, shown, kind, column, type_name, not_null, primary_key, references in rows:
        table = tables.setdefault(
            quoted or "",
            {"quoted": quoted, "name": shown, "kind": _KINDS[kind or "r"], "rows": None, "columns": []},
        )
        if column is not None:
            table["columns"].append(
                {
                    "name": column,
                    "type": type_name,
                    "not_null": not_null == "t",
                    "primary_key": primary_key == "t",
                    "references": references or "",
                }
            )
    return list(tables.values())


def counting(tables: Sequence[Mapping[str, Any]]) -> str:
    """A statement of one row: how many rows each table has, up to `MOST_ROWS` + 1."""
    counts = (f"(SELECT count(*) FROM (SELECT FROM {t['quoted']} LIMIT {MOST_ROWS + 1}) AS t)" for t in tables)
    return "SELECT " + ", ".join(counts)
