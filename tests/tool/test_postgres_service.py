"""A service and its PostgreSQL server: apart from each other, crowded, broken, killed."""

import asyncio
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import postgres_harness
import psycopg
import pytest
import tool_harness as harness
from postgres_harness import PASSWORD, Postgres, running, session, shop
from tool_harness import Service, Trajectory, binding, error_of, text_of, texts
from waiting import eventually

from tool_service.server import ToolServer
from tool_service.tools.sql_tool import RESTARTED
from turnwire.errors import ConfigError, UnavailableError
from turnwire.v1 import tool_pb2

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.needs("isolated-sandbox", "postgres"),
    pytest.mark.usefixtures("nothing_left"),
]


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    """A server that a test may break."""
    yield from postgres_harness.serve()


async def refusal(trajectory: Trajectory, statement: str = "select 1", turn: int = 0) -> tuple[grpc.StatusCode, str]:
    """How a turn is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trajectory.act(turn, f"<sql>{statement}</sql>")
    return caught.value.code(), caught.value.details() or ""


async def test_a_transaction_stays_open_from_turn_to_turn(postgres_service: Service) -> None:
    said = await session(
        postgres_service,
        "begin",
        "delete from orders",
        "select count(*) from orders",
        "rollback",
        "select count(*) from orders",
    )
    assert [text_of(observation) for observation in said][2:] == ["count\n0", "(0 rows changed)", "count\n3"]


async def test_trajectories_at_once_have_a_database_each(postgres_service: Service, postgres: Postgres) -> None:
    async def one(number: int) -> list[str]:
        said = await session(
            postgres_service,
            f"insert into customers values ({100 + number}, 'mine')",
            "select id from customers where id >= 100",
            "select current_database() = current_user, count(*) from pg_tables where schemaname = 'public'",
            name=f"pg-{number}",
        )
        return [text_of(observation) for observation in said][1:]

    said = await asyncio.gather(*(one(number) for number in range(8)))
    assert said == [[f"id\n{100 + number}", "?column? | count\nt | 2"] for number in range(8)]
    assert postgres.execute("select count(*) from customers", "shop") == [(2,)]


@pytest.mark.parametrize("read_only", [True, False])
async def test_init_sql_builds_what_the_agent_finds(postgres_service: Service, read_only: bool) -> None:
    script = (
        "create schema s; create table s.t(a int); insert into s.t values (7); create extension hstore;"
        "create function f() returns int language sql as 'select 8'"
    )
    context = {"postgres": {}, "init_sql": script, "read_only": read_only}
    said = await session(
        postgres_service,
        "select a, f() from s.t",
        ".schema",
        "insert into s.t values (9)",
        "create schema x",
        context=context,
    )
    assert text_of(said.pop()).startswith("error: permission denied for database")
    assert [text_of(observation) for observation in said] == [
        "a | f\n7 | 8",
        "s.t: 1 row\n  a integer",
        "error: permission denied for table t" if read_only else "(1 row changed)",
    ]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("create tabel", 'syntax error at or near "tabel"'),
        ("copy (select 1) to program 'id'", "must be superuser"),
        ("begin; create table t(a int)", "leaves a transaction open"),
        ("select pg_sleep(60)", "takes longer than 1 s"),
        ("select 1 \0", "NUL"),
    ],
)
async def test_an_init_script_that_fails_is_the_clients_mistake(postgres: Postgres, script: str, why: str) -> None:
    seconds = 1.0 if "1 s" in why else 60.0
    sql = {"init_seconds": seconds, "postgres": postgres.config()}
    async with harness.running(harness.config_of(exclude=("bash", "python"), tools={"sql": sql})) as service:
        trajectory = Trajectory(service)
        await trajectory.open(binding("sql", {"postgres": {}, "init_sql": script}))
        code, details = await refusal(trajectory)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert why in details


@pytest.mark.parametrize(
    ("context", "why"),
    [
        ({"postgres": {"template": "shopp"}}, "did you mean 'shop'?"),
        ({"postgres": {"template": "postgres"}}, "is not one of tools.sql.postgres.templates"),
        ({"postgres": {"tempalte": "shop"}}, "tempalte"),
        ({"postgres": {}, "database": "shop.sqlite3"}, "either database"),
        # Row I14 of the hostile inputs: what other dialects' own statements come to is in test_postgres_hostile.py
        ({"dialect": "mysql"}, "unknown key 'dialect'; it takes init_sql, database, read_only, postgres"),
        ({"duckdb": {"path": "a.duckdb"}}, "unknown key 'duckdb'; it takes init_sql, database, read_only, postgres"),
        ({"postgres": {"dsn": "mysql://me@db/shop"}}, "unknown field `dsn`"),
        ({"database": "mysql://me@db/shop"}, "the service has no tools.sql.database_folder"),
    ],
)
async def test_a_context_that_cannot_be_is_refused_at_open(
    postgres_service: Service, context: dict[str, Any], why: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Trajectory(postgres_service).open(binding("sql", context))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert why in (caught.value.details() or "")


async def test_want_of_a_database_is_refused_with_a_delay_and_the_turn_may_be_sent_again(postgres: Postgres) -> None:
    async with running(postgres, max_databases=1, wait_seconds=0.2) as service:
        first, second = Trajectory(service, "1"), Trajectory(service, "2")
        for trajectory in (first, second):
            await trajectory.open(binding("sql", shop()))
        await first.act(0, "<sql>select 1</sql>")
        code, details = await refusal(second)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_databases" in details
        await first.close()
        again = Trajectory(service, "2")
        await again.open(binding("sql", shop()))
        assert texts(await again.act(0, "<sql>select 1 as a</sql>")) == ["a\n1"]
        await again.close()


async def test_a_role_has_one_connection_and_one_trajectorys_database(
    postgres_service: Service, postgres: Postgres
) -> None:
    """Row I9 of the hostile inputs: a flood of connections, by an agent who gave its role a password of its own."""
    trajectory = Trajectory(postgres_service, "flood")
    await trajectory.open(binding("sql", shop()))
    await trajectory.act(0, "<sql>alter role current_user password 'mine'</sql>")
    name = texts(await trajectory.act(1, "<sql>select current_user</sql>"))[0].splitlines()[1]
    with pytest.raises(psycopg.OperationalError, match="too many connections for role"):
        psycopg.connect(host=postgres.host, port=postgres.port, user=name, password="mine", dbname=name)
    reached = f"select datname from pg_database where has_database_privilege('{name}', oid, 'connect')"
    assert {database for (database,) in postgres.execute(reached)} & postgres.ours() == {name}
    assert texts(await trajectory.act(2, "<sql>select 1 as a</sql>")) == ["a\n1"]
    await trajectory.close()


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ({"mysql": {"host": "db"}}, "tools.sql.mysql: unknown key; Allowed: database_folder"),
        ({"dialect": "duckdb"}, "tools.sql.dialect: unknown key; Allowed: database_folder"),
        ({"postgres": "mysql://me:secret@db"}, "tools.sql.postgres: expected `key: value` lines"),
        ({"postgres": {"host": "mysql://me:secret@db", "tls": "off"}}, "of a URL, set host, port, user, database"),
    ],
)
async def test_a_service_for_another_dialect_does_not_start_and_says_what_there_is(
    sql: dict[str, Any], why: str
) -> None:
    """Row I14 of the hostile inputs."""
    with pytest.raises(ConfigError, match=re.escape(why)):
        async with ToolServer(harness.config_of(exclude=("bash", "python"), tools={"sql": sql})):
            pass


async def test_a_server_of_another_kind_is_refused_at_start(postgres: Postgres) -> None:
    """Row I14 of the hostile inputs."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"J\0\0\0\n8.0.36\0" + bytes(67))  # as MySQL does
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as mysql:
        sql = {"postgres": postgres.config(port=mysql.sockets[0].getsockname()[1])}
        with pytest.raises(UnavailableError, match="does not speak PostgreSQL's protocol"):
            async with ToolServer(harness.config_of(exclude=("bash", "python"), tools={"sql": sql})):
                pass


async def test_close_in_mid_turn_ends_the_statement_and_drops_the_database(
    postgres_service: Service, postgres: Postgres
) -> None:
    before = await asyncio.to_thread(postgres.footprint)
    trajectory = Trajectory(postgres_service)
    await trajectory.open(binding("sql", shop()))
    await trajectory.send(action=tool_pb2.ActionTurn(turn=0, text="<sql>select pg_sleep(99)</sql>"))
    sleeping = "select count(*) from pg_stat_activity where query = 'select pg_sleep(99)' and state = 'active'"
    await eventually(lambda: postgres.execute(sleeping) == [(1,)])
    await trajectory.close()
    assert await asyncio.to_thread(postgres.footprint) == before


async def test_a_large_cell_is_cut_while_it_streams_by(postgres_service: Service) -> None:
    await session(postgres_service, "select 1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (observation,) = await session(postgres_service, "select repeat('x', 100000000)")
    assert text_of(observation).endswith("... (100000000 bytes)")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


async def test_a_session_that_somebody_ended_is_infra_and_the_next_turn_has_another(
    postgres_service: Service, postgres: Postgres
) -> None:
    trajectory = Trajectory(postgres_service)
    await trajectory.open(binding("sql", shop()))
    await trajectory.act(0, "<sql>delete from orders</sql>")
    end = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename like 'turnwire%'"
    await asyncio.to_thread(postgres.execute, end)
    answer = await trajectory.act(1, "<sql>select 1</sql>")
    assert error_of(answer.observations[0]) == "INFRA"
    count = "<sql>select count(*) from orders</sql>"
    assert texts(await trajectory.act(2, count)) == [f"{RESTARTED}\ncount\n0"]
    assert texts(await trajectory.act(3, count)) == ["count\n0"]
    await trajectory.close()


async def test_an_agent_does_not_write_into_the_servers_log(postgres_service: Service, postgres: Postgres) -> None:
    mark = "a" + "bc" * 20
    said = await session(
        postgres_service,
        f"do $$ begin raise log '{mark}'; raise warning '{mark}'; end $$",
        f"select {mark}",
        "set exit_on_error = on",
        f"do $$ begin raise exception '%', repeat('{mark}', 9); end $$",
    )
    assert [error_of(observation) for observation in said] == ["", "TOOL_ERROR", "", "SESSION_LOST"]
    assert mark not in await asyncio.to_thread(postgres.log)


async def test_a_session_that_the_agent_let_time_out_is_its_own_loss(
    postgres_service: Service, postgres: Postgres
) -> None:
    trajectory = Trajectory(postgres_service)
    await trajectory.open(binding("sql", shop()))
    await trajectory.act(0, "<sql>set idle_session_timeout = 1</sql>")
    sessions = "select count(*) from pg_stat_activity where usename like 'turnwire%'"
    await eventually(lambda: postgres.execute(sessions) == [(0,)])
    (observation,) = (await trajectory.act(1, "<sql>select 1</sql>")).observations
    assert error_of(observation) == "SESSION_LOST"
    said = "error: terminating connection due to idle-session timeout; the next call starts afresh"
    assert text_of(observation) == said
    assert texts(await trajectory.act(2, "<sql>select 1 as a</sql>")) == [f"{RESTARTED}\na\n1"]
    await trajectory.close()


async def test_a_server_that_stops_is_infra_and_all_is_well_when_it_is_back(own_server: Postgres) -> None:
    async with running(own_server) as service:
        before = await asyncio.to_thread(own_server.footprint)
        trajectory, other = Trajectory(service, "1"), Trajectory(service, "2")
        for one in (trajectory, other):
            await one.open(binding("sql", shop()))
        await trajectory.act(0, "<sql>select 1</sql>")
        await trajectory.send(action=tool_pb2.ActionTurn(turn=1, text="<sql>select pg_sleep(99)</sql>"))
        await service.runs(1)
        await asyncio.to_thread(own_server.container.kill)
        assert error_of((await trajectory.receive()).observation.observations[0]) == "INFRA"
        code, details = await refusal(other)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert PASSWORD not in details
        (info,) = [
            tool for tool in (await service.stub.ListTools(tool_pb2.ListToolsRequest())).tools if tool.name == "sql"
        ]
        assert not info.healthy
        assert "PostgreSQL at" in info.health_detail
        await asyncio.to_thread(own_server.container.start)
        await asyncio.to_thread(own_server.wait)
        assert texts(await trajectory.act(2, "<sql>select count(*) from orders</sql>")) == [f"{RESTARTED}\ncount\n3"]
        await trajectory.close()
        again = Trajectory(service, "2")
        await again.open(binding("sql", shop()))
        assert texts(await again.act(0, "<sql>select 1 as a</sql>")) == ["a\n1"]
        await again.close()
        await own_server.settled(before)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"templates": ["nowhere"]}, "the server has no database 'nowhere'"),
        ({"max_databases": 5000}, "raise its max_connections"),
        ({"user": "weak"}, "is no superuser"),
        ({"password_env": "HOME"}, "password authentication failed"),
        ({"tls": "verify"}, "speaks no TLS"),
        ({"port": 1}, "refused"),
    ],
)
async def test_a_server_that_cannot_hold_what_is_promised_is_refused_at_start(
    weak_role: None, postgres: Postgres, changes: dict[str, Any], why: str
) -> None:
    sql = {"postgres": postgres.config(**changes)}
    with pytest.raises((ConfigError, UnavailableError)) as caught:
        async with ToolServer(harness.config_of(exclude=("bash", "python"), tools={"sql": sql})):
            pass
    assert why in str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.fixture
def weak_role(postgres: Postgres) -> Iterator[None]:
    postgres.execute(f"create role weak login password '{PASSWORD}'")
    yield
    postgres.execute("drop role weak")


async def test_the_way_to_the_server_is_encrypted_and_its_name_is_checked(own_server: Postgres, tmp_path: Path) -> None:
    make = (
        "cd $PGDATA && openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=db -days 2 "
        "-addext subjectAltName=IP:127.0.0.1 -keyout server.key -out server.crt && chmod 600 server.key"
    )
    assert own_server.container.exec_run(["sh", "-c", make]).exit_code == 0
    own_server.execute("alter system set ssl = on")
    own_server.execute("select pg_reload_conf()")
    authority = tmp_path / "ca.pem"
    authority.write_bytes(own_server.container.exec_run(["sh", "-c", "cat $PGDATA/server.crt"]).output)
    async with running(own_server, tls="verify", ca_file=str(authority)) as service:
        encrypted = "select ssl from pg_stat_ssl join pg_stat_activity using (pid) where usename like 'turnwire%'"
        trajectory = Trajectory(service)
        await trajectory.open(binding("sql", shop()))
        assert texts(await trajectory.act(0, "<sql>select 1 as a</sql>")) == ["a\n1"]
        assert own_server.execute(encrypted) == [(True,)]
        await trajectory.close()
    sql = {"postgres": own_server.config(tls="verify")}
    with pytest.raises(UnavailableError, match="certificate verify failed"):
        async with ToolServer(harness.config_of(exclude=("bash", "python"), tools={"sql": sql})):
            pass
