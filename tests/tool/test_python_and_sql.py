"""The `python` and `sql` tools through the service, in real sandboxes: what the agent sees, exactly."""

import asyncio
import contextlib
import hashlib
import sqlite3
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import tool_harness as harness
from google.protobuf import duration_pb2
from sleepers import sleepers
from tool_harness import Service, Trajectory, binding, error_of, nothing_left, text_of, texts
from waiting import ENDLESS, eventually

from tool_service.tools import sql_tool
from turnwire.v1 import tool_pb2

ITEMS = "create table items(name text, price int); insert into items values ('Bamo', 101), ('Kuti', 999);"


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.needs("isolated-sandbox")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the service's databases lie."""
    tmp_path = tmp_path_factory.mktemp("databases")
    connection = sqlite3.connect(tmp_path / "shop.sqlite3")
    connection.executescript(ITEMS)
    connection.close()
    (tmp_path / "broken.sqlite3").write_bytes(b"this is no database" * 100)
    (tmp_path / "large.sqlite3").write_bytes(b"0" * 200_000)
    (tmp_path / "link").symlink_to("/etc/passwd")
    return tmp_path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(folder: Path) -> AsyncIterator[Service]:
    config = harness.config_of(
        exclude=(),
        tools={"sql": {"database_folder": str(folder), "shown_rows": 5, "max_rows": 20, "max_database_bytes": 100_000}},
        limits={"observation_bytes": 2000},
    )
    async with harness.running(config) as running:
        yield running


async def python(service: Service, *cells: str, seconds: int = 30) -> list[tool_pb2.Observation]:
    """Cells of one trajectory, a turn each."""
    trajectory = Trajectory(service, f"python-{hashlib.sha256(repr(cells).encode()).hexdigest()}")
    await trajectory.open("python")
    said = []
    for turn, cell in enumerate(cells):
        answer = await trajectory.act(
            turn, f"<python>{textwrap.dedent(cell)}</python>", timeout=duration_pb2.Duration(seconds=seconds)
        )
        said.append(answer.observations[0])
    await trajectory.close()
    return said


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("17*23", "391"),
        (" 17*23 ", "391"),
        ("\nprint('a')\nprint('b')\n'c'\n", "a\nb\n'c'"),
        ("x = 1", ""),
        ("", ""),
        ("# only a comment", ""),
        ("None", ""),
        ("print('no newline', end='')", "no newline"),
        ("'é\U0001f600'", "'é\U0001f600'"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe'); sys.stdout.flush()", "\ufffd\ufffd"),
        ("import sys; print('out'); print('err', file=sys.stderr)", "out\nerr"),
        ("for i in range(2):\n    i\nprint('end')", "end"),
    ],
)
async def test_python_reads_like_a_notebook(service: Service, code: str, text: str) -> None:
    observation = await service.call("python", code)
    assert (text_of(observation), error_of(observation)) == (text, "")


async def test_python_errors_are_tracebacks_of_the_agents_own_code(service: Service) -> None:
    observation = await service.call("python", "def f():\n    return 1/0\nprint('before')\nf()")
    assert error_of(observation) == "TOOL_ERROR"
    lines = text_of(observation).splitlines()
    assert lines[0] == "before"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "tool_service" not in text_of(observation)
    observation = await service.call("python", "1 +")
    assert text_of(observation).endswith("SyntaxError: invalid syntax")


async def test_python_keeps_its_variables_and_another_trajectory_has_none_of_them(service: Service) -> None:
    async with nothing_left(service):
        mine, others = await asyncio.gather(
            python(service, "secret = 41", "open('f', 'w').write('x')", "secret + 1"),
            python(service, "import os, time", "time.sleep(0.3); 'secret' in globals(), os.listdir('.')"),
        )
        assert text_of(mine[-1]) == "42"
        assert text_of(others[-1]) == "(False, [])"


async def test_a_long_output_is_cut_but_not_its_traceback(service: Service) -> None:
    observation = await service.call("python", "print('x' * 5000); 1/0")
    text = text_of(observation)
    assert text.endswith("ZeroDivisionError: division by zero")
    head = text.split("\n")[0]
    assert text.split("\n")[1] == f"[cut: first {len(head)} of 5001 bytes shown]"
    assert observation.truncated
    assert observation.full_bytes > 5001
    assert len(text.encode()) < 2000 + 100
    observation = await service.call("python", "print('y' * 3000)")
    assert text_of(observation) == "y" * 2000 + "\n[cut: first 2000 of 3001 bytes shown]"
    observation = await service.call("python", "print('z' * 500_000)")
    assert text_of(observation).endswith("\n[cut: first 2000 of 500001 bytes shown]")


async def test_a_program_that_does_not_end_is_stopped_and_keeps_what_it_printed(service: Service) -> None:
    async with nothing_left(service):
        cells = ("x = 1", "print('first', flush=True)\nwhile True: pass", "'x' in globals()")
        said = await python(service, *cells, seconds=3)
        assert [error_of(observation) for observation in said] == ["", "TIMEOUT", ""]
        assert text_of(said[1]).startswith("first\ntimeout: stopped after 3")
        assert text_of(said[2]) == "[the session was restarted: earlier variables are lost]\nFalse"
        assert said[2].data["restarted"] is True


async def test_a_program_that_kills_itself_is_told_and_the_trajectory_goes_on(service: Service) -> None:
    async with nothing_left(service):
        said = await python(
            service, "import os; os.abort()", "1 + 1", "import sys; sys.exit(3)", "import os; os._exit(4)", "2"
        )
        assert [error_of(observation) for observation in said] == ["SIGNALED", "", "TOOL_ERROR", "SESSION_LOST", ""]
        assert text_of(said[0]).endswith("killed by signal 6")
        assert text_of(said[2]) == "exit code 3"
        assert text_of(said[3]).endswith("session lost: the next call starts afresh")
        assert text_of(said[4]).endswith("2")


async def sql(service: Service, query: str, **context: object) -> tool_pb2.Observation:
    return await service.call("sql", query, {"init_sql": ITEMS, **context})


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("select name, price from items order by price", "name | price\nBamo | 101\nKuti | 999"),
        ("select price from items where name='Bamo'", "price\n101"),
        ("select sum(price) from items;", "sum(price)\n1100"),
        ("select * from items where price > 1000", "name | price\n(0 rows)"),
        ("\n select 1 as one, null as none, 1.5 as half \n", "one | none | half\n1 | NULL | 1.5"),
        ("select 9e999 as inf, x'c3a9' as blob", "inf | blob\ninf | x'c3a9'"),
        ("select 'a\nb' as text", "text\na\\nb"),
        ("update items set price = 5", "(2 rows changed)"),
        ("with n(i) as (select 3) insert into items select 'Ada', i from n", "(1 row changed)"),
        (".schema", "items: 2 rows\n  name TEXT\n  price INT"),
        (".schema items;", "items: 2 rows\n  name TEXT\n  price INT"),
        (
            "with recursive n(i) as (select 1 union all select i+1 from n where i < 7) select i from n",
            "i\n1\n2\n3\n4\n5\n(2 more rows)",
        ),
        (
            "with recursive n(i) as (select 1 union all select i+1 from n where i < 90) select i from n",
            "i\n1\n2\n3\n4\n5\n(at least 16 more rows)",
        ),
    ],
)
async def test_sql_answers_a_header_and_rows(service: Service, query: str, text: str) -> None:
    observation = await sql(service, query)
    assert (text_of(observation), error_of(observation)) == (text, "")


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("select x from items", "error: no such column: x"),
        ("selec 1", 'error: near "selec": syntax error'),
        ("attach '/etc/passwd' as a", "error: not authorized"),
        ("select 1; select 2", "error: You can only execute one statement at a time."),
        (".schema nothing", "error: no such table: nothing"),
        (".tables", 'error: near ".": syntax error'),
    ],
)
async def test_sql_errors_are_a_line(service: Service, query: str, text: str) -> None:
    observation = await sql(service, query)
    assert (text_of(observation), error_of(observation)) == (text, "TOOL_ERROR")


async def test_sql_data_is_there_for_programs(service: Service) -> None:
    data = (await sql(service, "select name, price from items order by price")).data
    assert list(data["columns"]) == ["name", "price"]
    assert [list(row) for row in data["rows"]] == [["Bamo", 101], ["Kuti", 999]]
    assert data["truncated"] is False


async def test_a_schema_tells_keys_views_and_what_is_there_for_programs(service: Service) -> None:
    script = (
        "create table a(id integer primary key, n text not null);"
        "create table b(a_id int references a(id), twice int as (a_id * 2)); create view v as select n from a;"
    )
    observation = await service.call("sql", ".schema", {"init_sql": script, "read_only": True})
    assert text_of(observation) == (
        "a: 0 rows\n  id INTEGER, primary key\n  n TEXT, not null\n"
        "b: 0 rows\n  a_id INT, references a(id)\n  twice INT\nv: view\n  n TEXT"
    )
    assert [table["name"] for table in observation.data["tables"]] == ["a", "b", "v"]


async def test_postgres_without_a_server_is_refused_at_open(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Trajectory(service).open(binding("sql", {"postgres": {}}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no tools.sql.postgres" in (caught.value.details() or "")


async def test_a_read_only_database_is_not_written(service: Service) -> None:
    observation = await sql(service, "delete from items", read_only=True)
    assert error_of(observation) == "TOOL_ERROR"


async def test_a_transaction_that_went_with_its_session_is_told_once(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open(binding("sql", {"init_sql": ITEMS}), "python")
    end, count = "<python>import os; os._exit(3)</python>", "<sql>select count(*) as n from items</sql>"
    await trajectory.act(0, end)
    assert texts(await trajectory.act(1, count)) == ["n\n2"], "the agent had nothing to lose"
    await trajectory.act(2, f"<sql>begin</sql><sql>delete from items</sql>{end}")
    (answer,) = (await trajectory.act(3, count)).observations
    assert text_of(answer) == f"{sql_tool.RESTARTED}\nn\n2"
    assert answer.data["restarted"] is True
    assert texts(await trajectory.act(4, count)) == ["n\n2"]
    await trajectory.close()


async def test_init_sql_may_be_a_dump(service: Service, folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(f"{ITEMS} create table kinds(item text references items(name))")
        dump = "PRAGMA foreign_keys=OFF;\n" + "\n".join(connection.iterdump())
    observation = await service.call("sql", ".schema kinds", {"init_sql": dump})
    assert text_of(observation) == "kinds: 0 rows\n  item TEXT, references items(name)"


async def test_a_schema_has_what_can_be_read_of_a_damaged_one(service: Service, folder: Path) -> None:
    connection = sqlite3.connect(folder / "odd.sqlite3", isolation_level=None)
    connection.executescript(f'{ITEMS} create table "a\nitems: 9 rows"(b); pragma writable_schema = on')
    connection.execute(
        "insert into sqlite_master values ('table', cast(x'ff41' as text), cast(x'ff41' as text), 2, "
        "'create table \"' || cast(x'ff41' as text) || '\"(c)')"
    )
    connection.close()
    observation = await service.call("sql", ".schema", {"database": "odd.sqlite3"})
    assert text_of(observation) == (
        "a\\nitems: 9 rows: 0 rows\n  b\nitems: 2 rows\n  name TEXT\n  price INT\n\ufffdA: table"
    )


async def test_a_database_file_is_copied_and_the_original_never_changes(service: Service, folder: Path) -> None:
    before = hashlib.sha256((folder / "shop.sqlite3").read_bytes()).hexdigest()
    trajectory = Trajectory(service)
    await trajectory.open(binding("sql", {"database": "shop.sqlite3"}))
    await trajectory.act(0, "<sql>delete from items where name = 'Bamo'</sql>")
    assert texts(await trajectory.act(1, "<sql>select * from items</sql>")) == ["name | price\nKuti | 999"]
    await trajectory.close()
    assert (
        text_of(await service.call("sql", "select count(*) from items", {"database": "shop.sqlite3"})) == "count(*)\n2"
    )
    assert hashlib.sha256((folder / "shop.sqlite3").read_bytes()).hexdigest() == before


@pytest.mark.parametrize(
    "name", ["nothing", "../shop.sqlite3", "/etc/passwd", "link", "large.sqlite3", "a\0b", "x" * 5000, "."]
)
async def test_a_database_that_may_not_be_used_is_refused_at_open(service: Service, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Trajectory(service).open(binding("sql", {"database": name}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await service.sessions() == 0


async def test_an_init_script_that_fails_is_the_clients_mistake_not_the_agents(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open(binding("sql", {"init_sql": "create tabel"}))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trajectory.act(0, "<sql>select 1</sql>")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "init_sql failed" in (caught.value.details() or "")


async def test_a_file_that_is_no_database_is_an_error_that_the_agent_sees(service: Service) -> None:
    observation = await service.call("sql", "select 1 from x", {"database": "broken.sqlite3"})
    assert text_of(observation) == "error: file is not a database"


async def test_two_tools_in_one_trajectory_and_in_one_turn(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("python", binding("sql", {"init_sql": ITEMS}))
        assert texts(await trajectory.act(0, "<sql>select price from items where name='Bamo'</sql>")) == ["price\n101"]
        assert texts(await trajectory.act(1, "<python>101*12</python>")) == ["1212"]
        answer = await trajectory.act(2, "<python>y = 2</python><sql>select 1 as a</sql><python>y</python>")
        assert texts(answer) == ["", "a\n1", "2"]
        status = await service.status()
        assert status.pools[0].in_use == 1  # one sandbox for both
        await trajectory.close()


async def test_a_trajectory_that_calls_nothing_takes_no_sandbox(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("python", binding("sql", {"init_sql": ITEMS}), "noop")
        await trajectory.act(0, "I would rather not")
        await trajectory.act(1, "<noop></noop>")
        assert (await service.status()).pools[0].in_use == 0
        await trajectory.act(2, "<python>1</python>")
        assert (await service.status()).pools[0].in_use == 1
        await trajectory.close()


@pytest.mark.parametrize("how", ["close", "cancel", "half-close"])
async def test_a_program_that_runs_is_dead_after_its_client(service: Service, how: str) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("python")
        await trajectory.act(
            0, "<python>import subprocess; subprocess.Popen(['sleep', '99'], start_new_session=True)</python>"
        )
        cell = f"<python>import time; time.sleep({ENDLESS})</python>"
        await trajectory.send(action=tool_pb2.ActionTurn(turn=1, text=cell))
        if how == "cancel":
            trajectory.call.cancel()
        elif how == "half-close":
            await trajectory.call.done_writing()
            await service.runs(1)
            trajectory.call.cancel()
        else:
            await service.runs(1)
            trajectory.call.cancel()
            again = Trajectory(service)
            await again.open("python", turns_done=1)
            await again.close()


async def test_close_in_mid_turn_kills_every_process_of_the_trajectory_at_once(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("python")
        cell = "import subprocess, time; subprocess.Popen(['sleep', '98.7'], start_new_session=True); time.sleep(600)"
        await trajectory.send(action=tool_pb2.ActionTurn(turn=0, text=f"<python>{cell}</python>"))
        await eventually(lambda: sleepers("98.7"))
        await trajectory.close()
        assert not sleepers("98.7")
        status = await service.status()
        assert (status.sessions_open, status.sessions_leased, status.pools[0].in_use) == (0, 0, 0)


async def test_close_while_the_turn_waits_for_a_sandbox_gives_up_waiting_at_once() -> None:
    pool = {"pool": {"ready": 0, "max": 1, "wait_seconds": ENDLESS}}
    async with harness.running(harness.config_of(exclude=("sql",), sandbox=pool)) as service, nothing_left(service):
        first, second = Trajectory(service, "1"), Trajectory(service, "2")
        for trajectory in (first, second):
            await trajectory.open("python")
        await first.act(0, "<python>1</python>")
        await second.send(action=tool_pb2.ActionTurn(turn=0, text="<python>1</python>"))
        await service.runs(1)
        await second.close()
        assert (await service.status()).pools[0].waiting == 0
        await first.close()


async def test_want_of_a_sandbox_is_refused_with_a_delay_and_the_turn_may_be_sent_again() -> None:
    pool = {"pool": {"ready": 1, "max": 1, "wait_seconds": 0.2}}
    async with harness.running(harness.config_of(exclude=("sql",), sandbox=pool)) as service:
        first, second = Trajectory(service, "1"), Trajectory(service, "2")
        for trajectory in (first, second):
            await trajectory.open("python", "count")
        await first.act(0, "<python>1</python>")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.act(0, '<count>{"by": 1}</count><python>1</python>')
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        again = Trajectory(service, "2")
        assert (await again.open("python", "count")).turns_done == 0
        await first.close()
        await eventually(lambda: service.server.sandboxes.pool_stats().ready)
        assert texts(await again.act(0, '<count>{"by": 1}</count><python>2</python>')) == ["1", "2"]


async def test_a_sandbox_that_dies_is_infra_and_the_next_turn_has_another(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("python", binding("sql", {"init_sql": ITEMS}))
        await trajectory.act(0, "<python>x = 1</python><sql>delete from items</sql>")
        session = service.server.sessions._sessions[trajectory.id]
        await session.tools._access.sandbox.kill()  # type: ignore[union-attr]
        answer = await trajectory.act(1, "<python>x</python>")
        assert error_of(answer.observations[0]) in ("INFRA", "SESSION_LOST")
        count = "<sql>select count(*) from items</sql>"
        assert texts(await trajectory.act(2, count)) == [f"{sql_tool.REPLACED}\ncount(*)\n2"]
        assert texts(await trajectory.act(3, count)) == ["count(*)\n2"]
        await trajectory.close()


async def test_many_more_trajectories_than_sandboxes_are_all_served() -> None:
    pool = {"pool": {"ready": 2, "max": 8, "max_waiting": 200, "wait_seconds": 60.0}}

    async def one(service: Service, number: int) -> str:
        trajectory = Trajectory(service, str(number))
        await trajectory.open("python")
        (said,) = texts(await trajectory.act(0, f"<python>{number} + 1</python>"))
        await trajectory.close()
        return said

    async with harness.running(harness.config_of(exclude=("sql",), sandbox=pool)) as service, nothing_left(service):
        said = await asyncio.gather(*(one(service, number) for number in range(100)))
        assert said == [str(number + 1) for number in range(100)]
