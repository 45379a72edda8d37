# ruff: noqa: E501 - statements are data
"""Conformance cases of the `sql` runtime (SQLite)."""

from sandbox_conformance import ERROR, MEMORY, OK, TIMEOUT, Case, case, py, script, sql

CASES: tuple[Case, ...] = (
    # H: SQLite
    case(
        "H-basics",
        script("create table t(a, b); insert into t values (1, 'x'), (2, null)"),
        sql(
            "select * from t",
            value={"columns": ["a", "b"], "rows": [[1, "x"], [2, None]], "truncated": False, "changes": 0},
        ),
        sql("delete from t where a = 1", value={"columns": [], "rows": [], "truncated": False, "changes": 1}),
        sql("select count(*) from t", value={"columns": ["count(*)"], "rows": [[1]], "truncated": False, "changes": 0}),
    ),
    case("H-error", sql("select * from nowhere", ERROR, shows="no such table: nowhere")),
    case(
        "H-read-only",
        script("create table t(a)"),
        sql("insert into t values (1)", ERROR, shows="not authorized", read_only=True),
        sql("drop table t", ERROR, shows="not authorized", read_only=True),
        sql("select count(*) from t", read_only=True),
        sql("pragma table_info(t)", read_only=True),
    ),
    case(
        "H1-attach",
        sql("attach database '/etc/passwd' as x", ERROR, shows="not authorized"),
        sql("attach ('/tmp/' || 'x') as x", ERROR, shows="not authorized"),
        script("attach ':memory:' as x", ERROR, shows="not authorized"),
    ),
    case("H2-vacuum-into", sql("vacuum into '/tmp/x'", ERROR, shows="authoriz")),
    case("H3-load-extension", sql("select load_extension('x')", ERROR)),
    case(
        "H4-pragmas",
        *(
            sql(f"pragma {p}", ERROR, shows="not authorized")
            for p in (
                "writable_schema=on",
                "temp_store_directory='/'",
                "journal_mode=wal",
                "mmap_size=1",
                "hard_heap_limit=1",
                "threads=9",
                "trusted_schema=on",
                "temp_store=1",
                "user_version=1",
                "database_list",
                "Key='x'",
            )
        ),
    ),
    case(
        "H6-recursive",
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c", TIMEOUT, timeout=1
        ),
        sql("select 1"),
    ),
    case(
        "H7-cartesian",
        script("create table t(a); insert into t values (1), (2), (3), (4), (5), (6), (7), (8), (9)"),
        sql("select sum(a.a * b.a) from t a, t b, t c, t d, t e, t f, t g, t h, t i, t j", TIMEOUT, timeout=1),
    ),
    case(
        "H8-long-opcode",
        script("create table t(a); insert into t values (7)"),
        sql("select printf('%.*c', 900000000, 'x')", TIMEOUT, OK, ERROR, timeout=1),
        sql("select a from t", value={"columns": ["a"], "rows": [[7]], "truncated": False, "changes": 0}),
    ),
    case(
        "H8-many-blobs",
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c limit 5000) select sum(length(randomblob(16000000))) from c",
            TIMEOUT,
            MEMORY,
            timeout=1,
        ),
    ),
    case(
        "H9-too-big",
        sql("select zeroblob(2000000000)", ERROR, shows="too big"),
        sql("select randomblob(900000000)", ERROR, shows="too big"),
    ),
    case(
        "H10-rows",
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c) select x from c",
            value={"columns": ["x"], "rows": [[1], [2], [3]], "truncated": True, "changes": 0},
            max_rows=3,
        ),
    ),
    case(
        "H10-bytes",
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c) select hex(zeroblob(100000)) from c",
            max_rows=10**9,
            max_cell_bytes=10**9,
        ),
    ),
    case(
        "H12-shapes",
        sql("select " + "(" * 2000 + "1" + ")" * 2000, ERROR),
        sql("select " + "1+" * 5000 + "1", ERROR),
        sql(" union all ".join(["select 1"] * 10**4), ERROR),
        sql("select '" + "a" * 50 + "' like '" + "%a" * 2000 + "'", ERROR),
    ),
    case("H13-several", sql("select 1; select 2", ERROR, shows="one statement")),
    case(
        "H14-text",
        sql("select 1\0", ERROR),
        sql("select '\ud800'", ERROR),
        sql("select 'x", ERROR),
        sql("-- nothing"),
        sql(""),
    ),
    case(
        "H16-transaction",
        script("create table t(a)"),
        sql("begin"),
        sql("insert into t values (1)"),
        sql("select count(*) from t", value={"columns": ["count(*)"], "rows": [[1]], "truncated": False, "changes": 0}),
        sql("commit"),
    ),
    case(
        "H18-corrupt",
        py("open('database.sqlite3', 'wb').write(b'SQLite format 3\\0' + b'x' * 4096)"),
        sql("select * from sqlite_master", ERROR),
        py("import os; os.remove('database.sqlite3')"),
    ),
    case(
        "H19-internals",
        sql("select fts3_tokenizer('simple')", ERROR),
        sql("select * from dbstat", ERROR),
        sql("create virtual table x using csv(filename='/etc/passwd')", ERROR),
        sql("create virtual table f using fts5(a)"),
    ),
    case(
        "H21-values",
        sql(
            "select 9e999, -9e999, x'00ff', cast(x'ff41' as text), 9223372036854775807, 1.5, 'é'",
            value={
                "columns": ["9e999", "-9e999", "x'00ff'", "cast(x'ff41' as text)", "9223372036854775807", "1.5", "'é'"],
                "rows": [
                    [
                        {"float": "inf"},
                        {"float": "-inf"},
                        {"blob": "00ff", "bytes": 2},
                        "\ufffdA",
                        9223372036854775807,
                        1.5,
                        "é",
                    ]
                ],
                "truncated": False,
                "changes": 0,
            },
        ),
        sql("select abs(-9223372036854775808)", ERROR, shows="overflow"),
    ),
    case(
        "H21-long-cell",
        sql(
            "select hex(zeroblob(5))",
            value={
                "columns": ["hex(zeroblob(5))"],
                "rows": [[{"text": "00000000", "bytes": 10}]],
                "truncated": False,
                "changes": 0,
            },
            max_cell_bytes=8,
        ),
    ),
)
