# ruff: noqa: E501, S608 - programs are data
"""H: SQLite."""

from __future__ import annotations

from tool_service.sandbox.hostile.case import ERROR, MEMORY, OK, TIMEOUT, Case, case, script, sql

CASES: tuple[Case, ...] = (
    case(
        "H-basics",
        "statements, rows and counts",
        script("create table t(a, b); insert into t values (1, 'x'), (2, null)"),
        sql(
            "select * from t",
            value={"columns": ["a", "b"], "rows": [[1, "x"], [2, None]], "truncated": False, "changes": 0},
        ),
        sql("delete from t where a = 1", value={"columns": [], "rows": [], "truncated": False, "changes": 1}),
        sql("select count(*) from t", value={"columns": ["count(*)"], "rows": [[1]], "truncated": False, "changes": 0}),
    ),
    case("H-error", "a table that is not there", sql("select * from nowhere", ERROR, shows="no such table: nowhere")),
    case(
        "H1-attach",
        "ATTACH of another file",
        sql("attach database '/etc/passwd' as x", ERROR, shows="not authorized"),
        sql("attach ('/tmp/' || 'x') as x", ERROR, shows="not authorized"),
        script("attach ':memory:' as x", ERROR, shows="not authorized"),
    ),
    case("H2-vacuum-into", "VACUUM INTO another file", sql("vacuum into '/tmp/x'", ERROR, shows="authoriz")),
    case("H3-load-extension", "load_extension()", sql("select load_extension('x')", ERROR)),
    case(
        "H4-pragmas",
        "pragmas that change more than the schema",
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
        "an endless recursive query",
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c", TIMEOUT, timeout=1
        ),
        sql("select 1"),
    ),
    case(
        "H7-cartesian",
        "a join of 10^9 rows",
        script("create table t(a); insert into t values (1), (2), (3), (4), (5), (6), (7), (8), (9)"),
        sql("select sum(a.a * b.a) from t a, t b, t c, t d, t e, t f, t g, t h, t i, t j", TIMEOUT, timeout=1),
    ),
    case(
        "H8-long-opcode",
        "one operation that makes 900 MB of text",
        script("create table t(a); insert into t values (7)"),
        sql("select printf('%.*c', 900000000, 'x')", TIMEOUT, OK, ERROR, timeout=1),
        sql("select a from t", value={"columns": ["a"], "rows": [[7]], "truncated": False, "changes": 0}),
    ),
    case(
        "H8-many-blobs",
        "gigabytes of random blobs",
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c limit 5000) select sum(length(randomblob(16000000))) from c",
            TIMEOUT,
            MEMORY,
            timeout=1,
        ),
    ),
    case(
        "H9-too-big",
        "blobs past the limit",
        sql("select zeroblob(2000000000)", ERROR, shows="too big"),
        sql("select randomblob(900000000)", ERROR, shows="too big"),
    ),
    case(
        "H10-rows",
        "an endless result, with a limit of rows",
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c) select x from c",
            value={"columns": ["x"], "rows": [[1], [2], [3]], "truncated": True, "changes": 0},
            max_rows=3,
        ),
    ),
    case(
        "H10-bytes",
        "an endless result of long cells",
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c) select hex(zeroblob(100000)) from c",
            max_rows=10**9,
            max_cell_bytes=10**9,
        ),
    ),
    case(
        "H12-shapes",
        "expressions nested too deep, too long, too many",
        sql("select " + "(" * 2000 + "1" + ")" * 2000, ERROR),
        sql("select " + "1+" * 5000 + "1", ERROR),
        sql(" union all ".join(["select 1"] * 10**4), ERROR),
        sql("select '" + "a" * 50 + "' like '" + "%a" * 2000 + "'", ERROR),
    ),
    case(
        "H13-several", "two statements where one is expected", sql("select 1; select 2", ERROR, shows="one statement")
    ),
    case(
        "H14-text",
        "NUL, surrogates, an open string, a comment, nothing",
        sql("select 1\0", ERROR),
        sql("select '\ud800'", ERROR),
        sql("select 'x", ERROR),
        sql("-- nothing"),
        sql(""),
    ),
    case(
        "H19-internals",
        "fts3_tokenizer, dbstat, csv files",
        sql("select fts3_tokenizer('simple')", ERROR),
        sql("select * from dbstat", ERROR),
        sql("create virtual table x using csv(filename='/etc/passwd')", ERROR),
        sql("create virtual table f using fts5(a)"),
    ),
    case(
        "H21-values",
        "infinities, blobs, bad UTF-8, int64 extremes",
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
        "a cell longer than the limit",
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
    case(
        "H15-own-copy",
        "ALTER, DELETE without WHERE and DROP",
        script("create table t(a); insert into t values (1), (2)"),
        sql("alter table t add column b"),
        sql("delete from t", value={"changes": 2}),
        sql("drop table t"),
        sql("select count(*) as n from sqlite_master", value={"rows": [[0]]}),
    ),
    case(
        "H20-sorter",
        "sorts more than memory and disk can hold",
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c limit 200000) select hex(randomblob(2000)) as h from c order by h",
            ERROR,
            MEMORY,
            TIMEOUT,
            timeout=5,
        ),
    ),
    case(
        "H22-commands-of-the-shell",
        "commands and functions of the sqlite3 program",
        *(
            sql(text, ERROR)
            for text in (
                ".shell id",
                ".open x",
                "select readfile('/etc/passwd')",
                "select writefile('x', 'y')",
                "select edit('x')",
            )
        ),
    ),
    case(
        "H4-pragmas-otherwise-spelt",
        "pragmas as functions, with a schema, under EXPLAIN",
        *(
            sql(text, ERROR, shows="not authorized")
            for text in (
                "pragma main.writable_schema=on",
                "pragma recursive_triggers=on",
                "pragma soft_heap_limit(1)",
                "pragma cache_spill=off",
                "explain pragma journal_mode=wal",
                "select * from pragma_database_list",
                "select * from pragma_module_list",
                "detach main",
                "explain attach 'x' as y",
            )
        ),
    ),
    case(
        "H12-shapes-otherwise",
        "deep JSON, wide tables, long names, nested CASE, joins, widths of printf, patterns of GLOB",
        sql("select json('" + "[" * 50000 + "]" * 50000 + "')", ERROR),
        sql("select json_array(" + ",".join(["1"] * 101) + ")", ERROR, shows="too many arguments"),
        sql("create table t(" + ",".join(f"c{i}" for i in range(1001)) + ")", ERROR, shows="too many columns"),
        sql('select 1 as "' + "n" * 100000 + '"'),
        sql("select " + "case when 1 then " * 600 + "1" + " end" * 600, ERROR),
        sql("select * from " + ", ".join(["(select 1)"] * 70), ERROR, shows="64 tables"),
        sql("select printf('%*d', 2000000000, 1), printf('%.2000000000f', 1.0)", OK, ERROR),
        sql("select hex(zeroblob(30000)) glob '" + "*0" * 400 + "*1'", OK, TIMEOUT, timeout=5),
        sql("create view v as select 1 union select * from v"),
        sql("select * from v", ERROR, shows="circular"),
    ),
    case(
        "H12-long-headers",
        "column names that are too long together for an answer",
        sql("create table t(a)"),
        *(sql(f'alter table t add column "{chr(233) * 990}{i}"') for i in range(240)),
        sql(
            "select " + ", ".join(f"{x}.*" for x in "abcd") + " from t a, t b, t c, t d",
            ERROR,
            shows="names of the columns are too long",
        ),
        sql("select 1"),
    ),
    case(
        "H13-empty",
        "no statement, in every form, and one with a mark, CRLF or a comment",
        *(
            sql(text, value={"columns": [], "rows": [], "truncated": False, "changes": 0})
            for text in (" ", ";", ";;", "/* x */", "/* x", "\r\n-- x\r\n")
        ),
        *(
            sql(text, value={"rows": [[1]]})
            for text in ("\ufeffselect 1", "select 1\r\n", "select 1; -- x", "select 1 --")
        ),
        sql("select 1; /* x */ select 2", ERROR, shows="one statement"),
        sql("select ?1", ERROR),
        sql("select :name", ERROR),
    ),
    case(
        "H15-own-schema",
        "writes to the schema's own tables",
        *(
            sql(text, ERROR)
            for text in (
                "update sqlite_master set sql = 'x'",
                "insert into sqlite_schema values (1, 2, 3, 4, 5)",
                "drop table sqlite_master",
                "create index i on sqlite_master(name)",
                "create table sqlite_x(a)",
            )
        ),
    ),
    case(
        "H19-modules",
        "virtual tables of every module, and an index's own tables",
        *(
            sql(f"create virtual table x using {module}(a)", ERROR, shows="not authorized")
            for module in (
                "fts3",
                "fts4",
                "geopoly",
                "rtree_i32",
                "dbstat",
                "fts5vocab",
                "bytecode",
                "zipfile",
                "fsdir",
            )
        ),
        sql("create virtual table f using fts5(a)"),
        sql("insert into f values ('x y')"),
        sql("insert into f(f, rank) values ('pgsz', 1000000000)", ERROR),
        sql("insert into f(f) values ('rebuild')"),
        sql("drop table f_data", OK, ERROR),
        sql("select * from f where f match 'x'", OK, ERROR),
        sql("select 1"),
    ),
    case(
        "H20-triggers",
        "triggers, checks and generated columns that compute for long",
        script(
            "create table t(a); create table u(a); insert into t values (1), (2), (3), (4), (5), (6), (7), (8), (9);"
            "create trigger r before insert on u begin select count(*) from t a, t b, t c, t d, t e, t f, t g, t h, t i; end"
        ),
        sql("insert into u values (1)", TIMEOUT, timeout=1),
        sql("create table g(a, b as (printf('%.*c', 900000000, 'x')) stored)"),
        sql("insert into g(a) values (1)", TIMEOUT, OK, timeout=1),
        sql("create table w(a primary key) without rowid"),
        sql(
            "with recursive c(x) as (select 1 union all select x + 1 from c) insert into w select randomblob(4000) from c",
            TIMEOUT,
            ERROR,
            timeout=2,
        ),
        sql("select count(*) from t", value={"rows": [[9]]}),
    ),
    case(
        "H7-windows-and-trees",
        "window functions, doubling views, JSON and full-text search without end",
        *(
            sql(text, TIMEOUT, MEMORY, ERROR, OK, timeout=0.5)
            for text in (
                "select row_number() over (order by x desc) from (with recursive c(x) as (select 1 union all select x + 1 from c) select x from c)",
                "with "
                + ", ".join(
                    f"c{i} as (select * from {f'c{i - 1}' if i else '(select 1 as x)'} union all select * from {f'c{i - 1}' if i else '(select 1 as x)'})"
                    for i in range(40)
                )
                + " select count(*) from c39",
                "with recursive c(x) as (select '[1]' union all select '[' || x || ',' || x || ']' from c) select max(length(json(x))) from c",
                "select instr(zeroblob(8000000), zeroblob(4000000) || x'01')",
            )
        ),
        sql("create virtual table f using fts5(a, tokenize='trigram')"),
        sql("select * from f where f match '" + "(" * 5000 + "a" + ")" * 5000 + "'", ERROR),
        sql("create virtual table g using fts5(a, content='g')"),
        sql("select * from g", ERROR),
        sql("select 1", value={"rows": [[1]]}),
    ),
)
