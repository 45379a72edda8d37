# ruff: noqa: E501, S608 - programs are data
"""H: files of SQLite, as others have made them and change them meanwhile."""

from __future__ import annotations

from tool_service.sandbox.hostile.case import ERROR, OK, TIMEOUT, Case, case, py, sql

_FILE = "database.sqlite3"

CASES: tuple[Case, ...] = (
    case(
        "H18-corrupt",
        "a database file that is none",
        py("open('database.sqlite3', 'wb').write(b'SQLite format 3\\0' + b'x' * 4096)"),
        sql("select * from sqlite_master", ERROR),
        py("import os; os.remove('database.sqlite3')"),
    ),
    case(
        "H18-crafted",
        "files of SQLite with a schema that lies, odd pages, and crafted journals beside them",
        *(
            step
            for change in (
                "",
                "update sqlite_master set rootpage = 2 where name = 'i'",
                "update sqlite_master set sql = 'create table t(a, b, c, d, e primary key)'",
                "insert into sqlite_master values ('table', 'v', 'v', 0, 'create virtual table v using fts5(x, content=''sqlite_master'')')",
            )
            for step in (
                py(
                    f"import os, sqlite3\nif os.path.exists('{_FILE}'): os.remove('{_FILE}')\nc = sqlite3.connect('{_FILE}', isolation_level=None); c.executescript('create table t(a, b); create index i on t(a); create view w as select load_extension(1); pragma writable_schema = on'); c.executemany('insert into t values (?, 1)', [(n,) for n in range(300)]); c.execute({change!r}); c.close()"
                ),
                *(
                    sql(text, OK, ERROR)
                    for text in (
                        "select * from t order by a",
                        "pragma integrity_check",
                        "insert into t values (1, 2)",
                        "select * from w",
                    )
                ),
            )
        ),
        py(f"open('{_FILE}', 'r+b').write(open('{_FILE}', 'rb').read()[:100] + bytes(range(256)) * 20)"),
        sql("select * from t", ERROR, OK),
        py(
            "open('database.sqlite3-journal', 'wb').write(bytes.fromhex('d9d505f920a163d7') + b'\\xff' * 2000); os.mkfifo('database.sqlite3-wal')"
        ),
        sql("select count(*) from t", OK, ERROR, TIMEOUT, timeout=1),
        sql("select 1", OK, ERROR, TIMEOUT, timeout=1),
    ),
    case(
        "H16-locked-from-outside",
        "a database that another program of the sandbox locks, moves away, or makes a pipe, a folder or a link",
        sql("create table y(a)"),
        py(f"import os, sqlite3; c = sqlite3.connect('{_FILE}', isolation_level=None); c.execute('begin exclusive')"),
        sql("insert into y values (1)", ERROR, shows="locked"),
        py(f"c.close(); os.rename('{_FILE}', 'o'); os.mkfifo('{_FILE}')"),
        sql("insert into y values (1)", OK, ERROR, TIMEOUT, timeout=2),
        py(f"os.unlink('{_FILE}'); os.symlink('/etc/passwd', '{_FILE}')"),
        sql("select * from y", OK, ERROR),
        py(f"os.unlink('{_FILE}'); os.rename('o', '{_FILE}')"),
        sql("select 1", OK),
    ),
    case(
        "H16-removed-from-outside",
        "a database whose file another program of the sandbox removes",
        sql("create table y(a)"),
        py(f"import os; os.unlink('{_FILE}')"),
        sql("insert into y values (1)", ERROR, shows="not there any more"),
        sql("create table z(a)"),
        sql("select name from sqlite_master", value={"rows": [["z"]]}),
    ),
)
