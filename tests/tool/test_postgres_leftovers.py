"""What dead services left on a PostgreSQL server: found and removed, by the next service and by a command."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psycopg
import pytest
import tool_harness as harness
from click.testing import CliRunner
from postgres_harness import PASSWORD, READY, Postgres, running, shop
from tool_harness import Trajectory, binding
from waiting import PROGRAM, eventually

from tool_service.sql import server
from tool_service.sql.config import PostgresConfig
from tool_service.sql.server import prefix_of, sweep
from turnwire.cli import sandbox
from turnwire.config import convert, dump
from turnwire.v1 import tool_pb2, tool_pb2_grpc

pytestmark = pytest.mark.needs("isolated-sandbox", "postgres")
OWNER = "leftovers"
"""Of no other test's service, which would remove what it finds here."""


async def test_a_service_that_was_killed_is_cleaned_up_after_and_nobody_else(
    postgres: Postgres, tmp_path: Path
) -> None:
    config = config_file(postgres, tmp_path)
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tool_service", "--config", str(config), stdout=asyncio.subprocess.PIPE
    )
    assert killed.stdout is not None
    address = (await asyncio.wait_for(killed.stdout.readline(), PROGRAM)).decode().removeprefix("listening on ").strip()
    async with grpc.aio.insecure_channel(address) as channel:
        alive = [Trajectory(_Stub(channel), str(number)) for number in range(3)]  # type: ignore[arg-type]
        for trajectory in alive:
            await trajectory.open(binding("sql", shop(read_only=True)))
            await trajectory.act(0, "<sql>select 1</sql>")
        await eventually(lambda: len(postgres.ours(OWNER)) == 3 + READY)
        assert await swept(config, "--dry-run") == ([], 0), "what is alive is no leftover"
        await alive[0].send(action=tool_pb2.ActionTurn(turn=1, text="<sql>select pg_sleep(99)</sql>"))
        killed.send_signal(signal.SIGKILL)
        await killed.wait()
        for trajectory in alive:
            trajectory.call.cancel()
    await eventually(lambda: not postgres.footprint()["sessions"])  # one ran a statement
    assert set((await swept(config, "--dry-run"))[0]) == postgres.ours(OWNER)
    assert len(postgres.ours(OWNER)) == 3 + READY
    async with running(postgres, owner=OWNER, ready=0):  # starts, and sweeps
        assert postgres.ours(OWNER) == set()
    assert await swept(config) == ([], 0)


async def test_the_sweep_command_removes_leftovers_of_this_owner_and_nothing_else(
    postgres: Postgres, tmp_path: Path
) -> None:
    own, another, dead = prefix_of(OWNER), prefix_of("another"), "0" * 16
    leftovers = [f"{own}{dead}_0000000{number}" for number in range(3)]
    strangers = [f"{another}{dead}_00000000", f"{own}{dead}_0000000g", f"{own}x", "turnwire_of_somebody"]
    postgres.execute(f"create database {leftovers[0]} template shop")
    for role in (leftovers[0], f"{leftovers[0]}_r", leftovers[1], f"{leftovers[2]}_r", f"{own}y_r"):
        postgres.execute(f"create role {role} login")  # a service may have died between any two steps
    try:
        for stranger in strangers:
            postgres.execute(f"create database {stranger}")
        config = config_file(postgres, tmp_path)
        before = await asyncio.to_thread(postgres.footprint)
        assert await swept(config, "--dry-run") == (leftovers, 0)
        assert await asyncio.to_thread(postgres.footprint) == before
        assert await swept(config) == (leftovers, 3)
        assert await swept(config) == ([], 0)
        after = await asyncio.to_thread(postgres.footprint)
        assert set(strangers) <= after["databases"]
        assert f"{own}y_r" in after["roles"]
        assert not any(leftover in name for name in after["databases"] | after["roles"] for leftover in leftovers)
    finally:
        for stranger in strangers:
            postgres.execute(f"drop database if exists {stranger}")
        postgres.execute(f"drop role if exists {own}y_r")


async def test_a_sweep_does_not_wait_again_and_again_where_the_server_removes_no_database(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It removes none as long as one session does not look up; a lock on one database is that one's own trouble."""
    monkeypatch.setattr(server, "_DROP_SECONDS", 2.0)
    monkeypatch.setattr(server, "_LOCK_SECONDS", 0.5)
    names = [f"{prefix_of(OWNER)}{'0' * 16}_0000000{number}" for number in range(3)]
    for name in names:
        postgres.execute(f"create database {name}")
    config = convert(postgres.config(owner=OWNER), PostgresConfig)
    deaf, locking = connection(postgres), connection(postgres)
    ((pid,),) = deaf.execute("select pg_backend_pid()")
    postgres.container.exec_run(["sh", "-c", f"kill -STOP {pid}"])
    try:
        assert await sweep(config) == []
        assert len(caplog.records) == 1
    finally:
        postgres.container.exec_run(["sh", "-c", f"kill -CONT {pid}"])
        deaf.close()
    locking.execute("begin")
    locking.execute(f"alter role current_user in database {names[0]} set work_mem = '4MB'")
    assert await sweep(config) == names[1:]
    locking.close()
    assert await sweep(config) == names[:1]


def connection(postgres: Postgres) -> psycopg.Connection[Any]:
    """A session of the superuser's."""
    return psycopg.connect(
        host=postgres.host, port=postgres.port, user="postgres", password=PASSWORD, dbname="postgres", autocommit=True
    )


def config_file(postgres: Postgres, folder: Path) -> Path:
    """Of a service on that server."""
    config = folder / "tools.yaml"
    config.write_text(
        dump(harness.config_of(exclude=("bash", "python"), tools={"sql": {"postgres": postgres.config(owner=OWNER)}}))
    )
    return config


async def swept(config: Path, *options: str) -> tuple[list[str], int]:
    """The databases that `turnwire sandbox sweep` finds, and how many leftovers it removes."""
    command = ["sweep", "--config", str(config), "--json", *options]
    done = await asyncio.to_thread(CliRunner().invoke, sandbox.command, command)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    return [one["name"] for one in found["leftovers"] if one["kind"] == "database"], found["removed"]


class _Stub:
    """What `Trajectory` needs of a service in another process."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = tool_pb2_grpc.ToolServiceStub(channel)
