# ruff: noqa: E501 - statements are data
"""What an agent may try on a PostgreSQL server: each refused or bounded, typed, and without a trace.

The ids are rows of the hostile inputs' list. After each case the server has the databases, roles and sessions that it
had before, the template is what it was, and the next trajectory is served.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
import tool_harness as harness
from postgres_harness import Postgres, running, session, shop
from tool_harness import Service, error_of, text_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.needs("isolated-sandbox", "postgres")]

ERROR, TIMEOUT, MEMORY, LOST = "TOOL_ERROR", "TIMEOUT", "MEMORY", "SESSION_LOST"
DENIED = "permission denied"


@dataclass(frozen=True)
class Step:
    """A statement, how it may end, and what the agent reads of it."""

    statement: str
    ends: tuple[str, ...]
    shows: str = ""

    @property
    def seconds(self) -> int:
        """Its deadline: short only where that may be its end, so that load changes no outcome."""
        return 3 if TIMEOUT in self.ends else 60


def ok(statement: str, shows: str = "") -> Step:
    return Step(statement, ("",), shows)


def no(statement: str, shows: str = "", *ends: str) -> Step:
    return Step(statement, ends or (ERROR,), shows)


def denied(*statements: str) -> tuple[Step, ...]:
    return tuple(no(statement, DENIED) for statement in statements)


BOTH: dict[str, tuple[Step, ...]] = {
    "I1-sleep": (
        ok("set statement_timeout = 0"),
        no("select pg_sleep(1000000)", "timeout: stopped after", TIMEOUT),
        ok("select 1", "1"),
    ),
    "I1-catches-the-cancel": (
        no(
            "do $$ begin loop begin perform pg_sleep(100); exception when query_canceled then null; end; end loop; end $$",
            "timeout",
            TIMEOUT,
        ),
        ok("select 1", "1"),
    ),
    "I2-program": (
        no("copy customers to program 'id'", "must be superuser"),
        no("copy customers from program 'id'", "must be superuser"),
        no("create table t(a text)", "", "", ERROR),
        no("copy t from program 'id'", "", ERROR),
    ),
    "I3-files": (
        no("copy customers to '/tmp/x'", "must be superuser"),
        no("copy customers from '/etc/passwd'", "must be superuser"),
        *denied(
            "select pg_read_file('/etc/passwd')",
            "select pg_read_binary_file('PG_VERSION')",
            "select pg_ls_dir('/')",
            "select pg_stat_file('/etc/passwd')",
            "select lo_import('/etc/passwd')",
            "select lo_export(1, '/tmp/x')",
            "select lo_from_bytea(0, 'x')",
            "select lo_create(0)",
        ),
    ),
    "I3-client-copy": (
        no("copy customers to stdout", "not read here"),
        no("copy (select repeat('x', 1000) from generate_series(1, 20000)) to stdout", "not read here"),
        no("copy customers from stdin", ""),
        ok("select 1", "1"),
    ),
    "I4-extensions": (
        *denied("create extension hstore", "create extension dblink"),
        no("create extension plpython3u", DENIED),
        no("load 'auto_explain'", "access to library"),
        no("do language plpython3u $$ import os $$", "does not exist"),
    ),
    "I6-rights": (
        *denied("create role other", "create database other", "create schema mine", "create publication p"),
        no("create role other superuser", "must be superuser"),
        no("alter role current_user superuser", "must be superuser"),
        no("grant pg_read_all_data to current_user", "admin option"),
        no("set session authorization postgres", "permission"),
        no("set role postgres", "permission"),
        no("set role pg_read_server_files", "permission"),
        no("alter system set work_mem = '1GB'", "permission"),
        no("set log_min_messages = 'debug5'", "permission"),
        no("set temp_file_limit = -1", "permission"),
        no("checkpoint", ""),
        no("create event trigger e on ddl_command_start execute function f()", ""),
        no("create subscription s connection 'host=localhost' publication p", ""),
        no("create foreign data wrapper w", "permission"),
        no("alter database shop rename to other", ""),
    ),
    "I7-rows": (
        ok("select generate_series(1, 1000000000000)", "more rows"),
        no("select * from generate_series(1, 1000000000000)", "temp_file_limit", ERROR, TIMEOUT),
        no("select count(*) from generate_series(1, 1000000000000)", "", TIMEOUT, ERROR),
        no(
            "select count(*) from (select * from generate_series(1, 100000000) i order by random()) x",
            "",
            TIMEOUT,
            ERROR,
        ),
        ok("select 1", "1"),
    ),
    "I8-locks": (
        *denied("select pg_advisory_lock(1)", "select pg_try_advisory_xact_lock(1)"),
        ok("begin"),
        no("prepare transaction 'x'", "disabled"),
        ok("begin"),
        ok("lock table customers in access share mode"),
        no("select nothing", "does not exist"),
        no("select 1", "aborted"),
    ),
    "I8-idle": (
        ok("set idle_session_timeout = 1"),
        no("select 1", "", "", LOST),
        no("select 2", "", "", LOST),
    ),
    "I10-others": (
        *denied(
            "select * from pg_stat_activity",
            "select pg_stat_get_activity(null)",
            "select * from pg_shadow",
            "select * from pg_authid",
            "select * from pg_roles",
            "select * from pg_database",
            "select * from pg_locks",
            "select * from pg_db_role_setting",
            "select pg_terminate_backend(pg_backend_pid())",
            "select pg_cancel_backend(pg_backend_pid())",
            "select pg_reload_conf()",
            "select pg_logical_emit_message(false, 'a', 'b')",
        ),
        no("select * from shop.public.customers", "cross-database"),
        no("select pg_database_size('postgres') from customers", "", ERROR, ""),
    ),
    "I12-shapes": (
        no("select '\0'", "NUL"),
        no("select chr(0)", "null character"),
        ok("select repeat('x', 20000000)", "bytes)"),
        no("select repeat('x', 900000000)", "", MEMORY, ERROR, TIMEOUT),
        ok("select " + ", ".join(f"{i} as c{i}" for i in range(1600)), "c1599"),
        no("select " + ", ".join("1" for _ in range(1700)), "1664"),
        no("select " + "(" * 30000 + "1" + ")" * 30000, ""),
        no("select " + "-" * 3 + "\n" + "1+" * 100000 + "1", "", ERROR, ""),
        ok("select repeat('x', 1000) from generate_series(1, 1000000)", "more rows"),
        no("do $$ begin raise exception '%', repeat('y', 20000000); end $$", "yyy"),
        ok("do $$ begin for i in 1..2000 loop raise notice '%', repeat('z', 10000); end loop; end $$"),
        no("do $$ begin raise exception 'ours' using errcode = '53100'; end $$", "ours"),
        no("do $$ begin raise exception 'ours' using errcode = '57P01'; end $$", "ours"),
    ),
    "I12-memory": (
        ok("set work_mem = '1GB'"),
        no("select array_agg(repeat('x', 1000) || i) from generate_series(1, 5000000) i", "", MEMORY, TIMEOUT, ERROR),
        ok("select 1", "1"),
    ),
    "I12-regex": (
        no(
            "select count(*) from generate_series(1, 10000) i where repeat('a', 2000) || i like repeat('%a', 900) || 'b%'",
            "",
            TIMEOUT,
            "",
        ),
        no("select regexp_replace(repeat('a', 100000), '(a|aa)+(a|aa)+$x', 'y')", "", TIMEOUT, ERROR, ""),
        ok("select 1", "1"),
    ),
    "locked-out": (
        ok("alter role current_user password 'mine'"),
        ok("alter role current_user set local_preload_libraries = 'nothing'"),
        ok("drop owned by current_user"),
        no("select pg_sleep(100)", "timeout", TIMEOUT),
        no(
            "do $$ begin loop begin perform pg_sleep(100); exception when query_canceled then null; end; end loop; end $$",
            "timeout",
            TIMEOUT,
        ),
        ok("select 1", "1"),
    ),
    "notify": (
        ok("listen x"),
        ok("notify x, 'hello'"),
        ok("select 1", "1"),
        no("select pg_notify('x', 'y')", DENIED),
    ),
}

READ_ONLY: dict[str, tuple[Step, ...]] = {
    "read-only": (
        ok("set default_transaction_read_only = off"),
        ok("set session characteristics as transaction read write"),
        *denied(
            "insert into customers values (9, 'x')",
            "update customers set name = 'x'",
            "delete from orders",
            "truncate orders",
            "with d as (delete from orders returning *) select * from d",
            "select * from customers for update",
            "select nextval('orders_id_seq')",
            "select setval('orders_id_seq', 1)",
            "create table t(a int)",
            "create temp table t(a int)",
            "create function f() returns int language sql as 'select 1'",
            "select gain()",
        ),
        no("drop table orders", "must be owner"),
        no("alter table orders add column x int", "must be owner"),
        no("create view v as select 1", DENIED),
        no("comment on table orders is 'x'", "must be owner"),
        ok("grant insert on orders to current_user"),
        ok("begin read write"),
        no("lock table customers in exclusive mode", DENIED),
        ok("rollback"),
        ok("begin read write"),
        no("delete from orders", DENIED),
        ok("rollback"),
        ok("select count(*) from customers", "2"),
        ok("select * from totals order by 1", "14.75"),
    ),
}

READ_WRITE: dict[str, tuple[Step, ...]] = {
    "own-copy": (
        ok("drop view totals"),
        ok("truncate orders"),
        ok("alter table customers add column age int"),
        ok("create index on customers(name)"),
        ok("create table t as select * from customers", "2 rows changed"),
        ok("create temp table u(a int)"),
        ok("insert into orders(customer_id) values (1)", "1 row changed"),
        ok("select gain()", "turnwire_"),
        ok("drop table orders"),
        ok("create function twice(i int) returns int language plpgsql as $$ begin return 2 * i; end $$"),
        ok("select twice(21)", "42"),
        no("drop database shop", "must be owner"),
        no("alter role postgres password 'x'", ""),
    ),
    "own-definer": (
        ok("create function f() returns text language sql security definer as 'select current_user::text'"),
        ok("select f()", "turnwire_"),
        ok("create function pg_database_size(text) returns bigint language sql as 'select 1'"),
        ok("set search_path = public, pg_catalog"),
        ok(".schema customers", "customers: 2 rows"),
    ),
    "locks-of-all": (
        no(
            "do $$ begin for i in 1..200000 loop execute format('create table t%s(a int)', i); end loop; end $$",
            "",
            MEMORY,
            TIMEOUT,
            ERROR,
        ),
        ok("select 1"),
    ),
    "fills-the-disk": (
        no(
            "create table big as select repeat(md5(i::text), 60) from (select generate_series(1, 1000000000) i) x",
            "grew past",
            LOST,
        ),
        ok("select count(*) from customers", "2"),
    ),
    "ddl-flood": (
        ok("create table wide(" + ", ".join(f"c{i} int" for i in range(1600)) + ")"),
        no("create table wider(" + ", ".join(f"c{i} int" for i in range(1601)) + ")", "1600"),
        ok(".schema", "customers: 2 rows"),
    ),
}

CASES = (
    *((f"{name}, reader", steps, True) for name, steps in BOTH.items()),
    *((f"{name}, owner", steps, False) for name, steps in BOTH.items()),
    *((name, steps, True) for name, steps in READ_ONLY.items()),
    *((name, steps, False) for name, steps in READ_WRITE.items()),
)
AT_ONCE = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(postgres: Postgres) -> AsyncIterator[Service]:
    async with running(postgres, max_database_bytes=64 * 2**20, temp_bytes=16 * 2**20) as started:
        yield started


async def run(service: Service, name: str, steps: tuple[Step, ...], read_only: bool) -> list[str]:
    """A case in a trajectory of its own; what did not end as it should."""
    deadlines = [step.seconds for step in steps]
    statements = (step.statement for step in steps)
    said = await session(service, *statements, context=shop(read_only), seconds=deadlines, name=name)
    return [
        f"{name}: {step.statement[:150]!r}: {error_of(observation) or 'OK'}: {text_of(observation)[:300]!r} "
        f"({observation.error_detail[:300]})"
        for step, observation in zip(steps, said, strict=True)
        if error_of(observation) not in step.ends or step.shows not in text_of(observation)
    ]


@pytest.mark.timeout(400)
async def test_every_case_has_its_outcome_and_leaves_nothing(service: Service, postgres: Postgres) -> None:
    before = await asyncio.to_thread(postgres.footprint)
    failures: list[str] = []
    for start in range(0, len(CASES), AT_ONCE):
        batch = CASES[start : start + AT_ONCE]
        async with harness.nothing_left(service):
            for failed in await asyncio.gather(*(run(service, *case) for case in batch)):
                failures += failed
        await postgres.settled(before)
    assert not failures, "\n".join(failures)
    assert await asyncio.to_thread(postgres.execute, "select count(*) from orders", "shop") == [(3,)]
    assert await asyncio.to_thread(postgres.execute, "select count(*) from customers", "shop") == [(2,)]
