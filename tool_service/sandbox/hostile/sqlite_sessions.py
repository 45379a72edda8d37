# ruff: noqa: E501 - programs are data
"""H: what SQLite keeps from statement to statement: transactions, the mode, what changed, what there is room for."""

from __future__ import annotations

from tool_service.sandbox.hostile.case import ERROR, LOST, Case, case, py, script, sql

CASES: tuple[Case, ...] = (
    case(
        "H-read-only",
        "writes to a read-only database",
        script("create table t(a)"),
        *(
            sql(text, ERROR, shows="readonly database", read_only=True)
            for text in (
                "insert into t values (1)",
                "with n(i) as (select 1) insert into t select i from n returning a",
                "drop table t",
                "create temp table u(a)",
                "create virtual table f using fts5(a)",
                "analyze",
                "begin immediate",
            )
        ),
        sql("pragma query_only=off", ERROR, shows="not authorized", read_only=True),
        sql("select count(*) from t", value={"rows": [[0]]}, read_only=True),
        sql("pragma table_info(t)", read_only=True),
        sql("insert into t values (1)", value={"changes": 1}),
    ),
    case(
        "H-read-only-virtual-tables",
        "virtual tables of a read-only database, opened by a session that has not made them",
        script(
            "create virtual table f using fts5(a); insert into f values ('x y');"
            "create virtual table r using rtree(id, low, high); insert into r values (1, 2, 3)"
        ),
        py("import os; os._exit(3)", LOST),
        sql("select * from r", value={"rows": [[1, 2.0, 3.0]]}, read_only=True),
        sql("select * from f where f match 'y'", value={"rows": [["x y"]]}, read_only=True),
        sql("insert into f(f) values ('rebuild')", ERROR, shows="readonly database", read_only=True),
        sql("update r set low = 0", ERROR, shows="readonly database", read_only=True),
    ),
    case(
        "H16-transaction",
        "a transaction over several turns",
        script("create table t(a)"),
        sql("begin"),
        sql("insert into t values (1)"),
        sql("select count(*) from t", value={"columns": ["count(*)"], "rows": [[1]], "truncated": False, "changes": 0}),
        sql("commit"),
    ),
    case(
        "H15-counts",
        "changes behind a WITH",
        script("create table t(a)"),
        sql("with n(i) as (select 1 union all select 2) insert into t select i from n", value={"changes": 2}),
        sql("-- so\n/* * / */ With n(i) as (select 1) insert into t select i from n", value={"changes": 1}),
        sql("/*" + "*/ /*" * 5000 + "/ select 1", value={"changes": 0}),
        sql("with n(i) as (select 1) select i from n", value={"rows": [[1]], "changes": 0}),
    ),
    case(
        "H16-left-open",
        "savepoints and exclusive transactions that a turn leaves open",
        sql("savepoint a"),
        sql("create table t(a)"),
        sql("rollback to a"),
        sql("select count(*) as n from sqlite_master", value={"rows": [[0]]}),
        sql("release a"),
        script("begin; create table u(a)", ERROR, shows="leaves a transaction open"),
        sql("create table t(a)"),
        sql("create trigger r before insert on t begin select raise(rollback, 'no'); end"),
        sql("insert into t values (1)", ERROR, shows="no"),
        sql("begin"),
        sql("create table u(a)"),
        sql("insert into t values (1)", ERROR, shows="no; the transaction was rolled back"),
        sql("select * from u", ERROR, shows="no such table"),
        sql("begin exclusive"),
        sql("begin", ERROR, shows="within a transaction"),
        sql("rollback"),
        sql("rollback", ERROR),
    ),
    case(
        "H4-foreign-keys",
        "the pragmas that a session may set, and what they do",
        script("create table a(k integer primary key); create table b(k references a)"),
        sql("insert into b values (1)", value={"changes": 1}),
        sql("delete from b"),
        sql("pragma foreign_keys=on"),
        sql("insert into b values (1)", ERROR, shows="FOREIGN KEY"),
        sql("begin"),
        sql("pragma defer_foreign_keys=on"),
        sql("insert into b values (1)"),
        sql("commit", ERROR, shows="FOREIGN KEY"),
        sql("rollback"),
        sql("pragma foreign_keys", value={"rows": [[1]]}),
    ),
    case(
        "H20-full",
        "a table that outgrows the largest file",
        sql("create table t(a)"),
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c limit 20000) insert into t select randomblob(1000) from c",
            ERROR,
            shows="database or disk is full",
        ),
        sql("select count(*) from t", value={"rows": [[0]]}),
        sql("insert into t values (1)", value={"changes": 1}),
    ),
)
