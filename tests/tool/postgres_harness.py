"""A PostgreSQL server in a container, looked at from outside by a driver that is not the tool's own client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import docker
import docker.errors
import psycopg
import tool_harness as harness
from docker.models.containers import Container
from google.protobuf import duration_pb2
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from tool_harness import Service, Trajectory, binding
from waiting import PATIENCE

from tool_service.sql.server import prefix_of
from turnwire.v1 import tool_pb2

IMAGE = "turnwire-test-postgres:15"
PASSWORD_ENV = "TURNWIRE_TEST_POSTGRES_PASSWORD"
PASSWORD = "turnwire-test"
READY = 2
"""Copies of the template that wait in each service."""
SHOP = """
create type size as enum ('small', 'large');
create table customers(id integer primary key, name text not null);
create table orders(
    id serial primary key, customer_id integer not null references customers(id), total numeric(10, 2), size size
);
create view totals as select customer_id, sum(total) as total from orders group by 1;
insert into customers values (1, 'Bamo'), (2, 'Kuti');
insert into orders(customer_id, total, size) values (1, 10.50, 'small'), (1, 4.25, 'large'), (2, 99.00, null);
grant insert on customers to public;
create function gain() returns text language sql security definer as
    $$ insert into customers values (66, 'Mallory'); select current_user::text $$;
create function gain(text, text) returns text language sql security definer as 'select public.gain()';
create aggregate gains(text) (sfunc = gain, stype = text);
"""
"""The template `shop`: what a careless operator may have granted in it must not reach the agent."""


@functools.cache
def lack() -> str:
    """Why there can be no server here; empty if there can. Builds the image where it is missing."""
    try:
        engine = docker.from_env(timeout=170)
        try:
            engine.images.get(IMAGE)
        except docker.errors.ImageNotFound:
            folder = Path(__file__).parent / "postgres_server"
            engine.images.build(path=str(folder), tag=IMAGE, network_mode="host", rm=True)
    except (docker.errors.DockerException, OSError) as error:
        return f"an image of PostgreSQL cannot be had: {error}"
    return ""


class Postgres:
    """A running server, and its superuser's view of it."""

    def __init__(self, container: DockerContainer, port: int) -> None:
        self.container: Container = container.get_wrapped_container()
        self.host, self.port = "127.0.0.1", port

    def config(self, **changes: Any) -> dict[str, Any]:
        """For `tools.sql.postgres`."""
        return {
            "host": self.host,
            "port": self.port,
            "password_env": PASSWORD_ENV,
            "tls": "off",
            "templates": ["shop"],
            "max_databases": 16,
            "ready": READY,
            **changes,
        }

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run statements as the superuser; the rows of a single one."""
        with psycopg.connect(
            host=self.host, port=self.port, user="postgres", password=PASSWORD, dbname=database, autocommit=True
        ) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def footprint(self) -> dict[str, set[str]]:
        """What trajectories may leave behind on the server: all but clones that wait for one, into which nobody can log
        in yet."""
        waiting = "select rolname from pg_roles r where not rolcanlogin and rolname like 'turnwire%' " + (
            "and not exists (select from pg_roles where rolname = r.rolname || '_r')"
        )
        return {
            "databases": self._names(f"select datname from pg_database where datname not in ({waiting})"),
            "roles": self._names(f"select rolname from pg_roles where rolname not in ({waiting})"),
            "sessions": self._names(
                "select usename || ' in ' || datname from pg_stat_activity where usename <> 'postgres'"
            ),
        }

    def log(self) -> str:
        """What the server has said so far."""
        engine = docker.from_env()  # one of our own, so that no connection is kept
        with contextlib.closing(engine):
            return str(engine.containers.get(self.container.id).logs().decode())

    def ours(self, owner: str = "turnwire") -> set[str]:
        """Databases of an owner's services, with those that wait, and roles of databases that are gone."""
        every = "select datname from pg_database union select regexp_replace(rolname, '_r$', '') from pg_roles"
        return {name for name in self._names(every) if name.startswith(prefix_of(owner))}

    def _names(self, query: str) -> set[str]:
        return {name for (name,) in self.execute(query)}

    def wait(self, seconds: float = PATIENCE) -> None:
        """Until it answers."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.execute("select 1")
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, self.container.logs().decode()[-2000:]
                time.sleep(0.05)
            else:
                return

    async def settled(self, before: dict[str, set[str]], seconds: float = PATIENCE) -> None:
        """Until nothing is there that was not there before."""
        deadline = time.monotonic() + seconds
        while True:
            after = await asyncio.to_thread(self.footprint)
            more = {name: after[name] - before[name] for name in after if after[name] - before[name]}
            if not more:
                return
            assert time.monotonic() < deadline, f"left behind: {more}"
            await asyncio.sleep(0.05)


def serve(*options: str) -> Iterator[Postgres]:
    """A server with the template `shop`, for a fixture.

    It is in the host's network: tests of the engine's restart take its bridge away from under others.
    """
    os.environ[PASSWORD_ENV] = PASSWORD
    testcontainers_config.ryuk_disabled = True  # its image cannot be had everywhere; the fixture itself cleans up
    port = _free_port()
    settings = [f"port={port}", "listen_addresses=127.0.0.1", *options]
    command = [part for setting in settings for part in ("-c", setting)]
    with DockerContainer(IMAGE).with_kwargs(network_mode="host").with_command(command) as container:
        postgres = Postgres(container, port)
        postgres.wait()
        postgres.execute("create database shop")
        postgres.execute(SHOP, "shop")
        yield postgres


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def running(postgres: Postgres, **changes: Any) -> AsyncIterator[Service]:
    """A tool service with the tool `sql` on that server, with small caps."""
    sql = {"shown_rows": 5, "max_rows": 20, "max_cell_bytes": 64, "postgres": postgres.config(**changes)}
    async with harness.running(harness.config_of(exclude=("bash", "python"), tools={"sql": sql})) as service:
        yield service


def shop(read_only: bool = False, **more: Any) -> dict[str, Any]:
    """The context of a trajectory on a copy of the template."""
    return {"postgres": {"template": "shop"}, "read_only": read_only, **more}


async def session(
    service: Service,
    *statements: str,
    context: dict[str, Any] | None = None,
    seconds: Sequence[int] = (),
    name: str = "pg",
) -> list[tool_pb2.Observation]:
    """Statements of one trajectory, a turn each, under a deadline each where `seconds` gives them."""
    trajectory = Trajectory(service, name)
    await trajectory.open(binding("sql", shop() if context is None else context))
    said = []
    for turn, statement in enumerate(statements):
        timeout = duration_pb2.Duration(seconds=seconds[turn] if seconds else 30)
        action = tool_pb2.ActionTurn(turn=turn, text=f"<sql>{statement}</sql>", timeout=timeout)
        await trajectory.send(action=action)
        answer = await asyncio.wait_for(trajectory.call.read(), 120)  # a crowded server takes long to make a database
        said.append(answer.observation.observations[0])
    await trajectory.close()
    return said
