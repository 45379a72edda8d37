"""Copies of templates that wait for trajectories: taken, replaced, done without, and gone in the end."""

import asyncio
from typing import Any

import grpc
import psycopg
import pytest
from postgres_harness import PASSWORD, READY, Postgres, running, session, shop
from tool_harness import Service, Trajectory, binding, text_of, texts
from waiting import eventually

from tool_service.sql.config import PostgresConfig

OWNER = "clones"


async def waiting(postgres: Postgres) -> set[str]:
    """The databases of this module's services, once there are as many as should wait, each behind its walls."""
    walled = "select count(*) from pg_database where datacl is not null and datname = any (array{}::name[])"
    await eventually(lambda: postgres.execute(walled.format(list(postgres.ours(OWNER)))) == [(READY,)])
    return postgres.ours(OWNER)


async def database_of(service: Service, name: str, read_only: bool = False) -> str:
    (said,) = await session(service, "select current_database()", context=shop(read_only), name=name)
    return text_of(said).splitlines()[1]


@pytest.mark.needs("isolated-sandbox", "postgres")
@pytest.mark.parametrize("read_only", [True, False])
async def test_a_first_call_takes_a_copy_that_waits_and_another_takes_its_place(
    postgres: Postgres, read_only: bool
) -> None:
    async with running(postgres, owner=OWNER) as service:
        before = await waiting(postgres)
        taken = await database_of(service, "a", read_only)
        assert taken in before
        assert taken not in (after := await waiting(postgres))
        assert len(after & before) == READY - 1
    assert postgres.ours(OWNER) == set()


@pytest.mark.needs("isolated-sandbox", "postgres")
async def test_more_trajectories_than_copies_have_a_database_each(postgres: Postgres) -> None:
    async with running(postgres, owner=OWNER) as service:
        before = await waiting(postgres)
        had = await asyncio.gather(*(database_of(service, str(number)) for number in range(READY + 3)))
        assert len(set(had)) == READY + 3
        assert before <= set(had)
        await waiting(postgres)
    assert postgres.ours(OWNER) == set()


@pytest.mark.needs("isolated-sandbox", "postgres")
async def test_a_copy_that_vanished_costs_a_turn_that_may_be_sent_again(postgres: Postgres) -> None:
    async with running(postgres, owner=OWNER) as service:
        for name in await waiting(postgres):
            postgres.execute(f"drop database {name} with (force)")
            postgres.execute(f"drop role {name}")
        for number in range(READY):
            trajectory = Trajectory(service, str(number))
            await trajectory.open(binding("sql", shop()))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await trajectory.act(0, "<sql>select 1</sql>")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await database_of(service, "again") not in ("", "postgres")
    assert postgres.ours(OWNER) == set()


@pytest.mark.needs("isolated-sandbox", "postgres")
async def test_copies_that_cannot_be_made_are_made_when_they_can(postgres: Postgres) -> None:
    guest = psycopg.connect(host=postgres.host, port=postgres.port, user="postgres", password=PASSWORD, dbname="shop")
    try:
        async with running(postgres, owner=OWNER) as service:
            trajectory = Trajectory(service)
            await trajectory.open(binding("sql", shop()))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await trajectory.act(0, "<sql>select 1</sql>")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert 'source database "shop" is being accessed by other users' in (caught.value.details() or "")
            guest.close()
            await waiting(postgres)
            again = Trajectory(service)
            await again.open(binding("sql", shop()))
            assert texts(await again.act(0, "<sql>select count(*) from orders</sql>")) == ["count\n3"]
            await again.close()
    finally:
        guest.close()
    assert postgres.ours(OWNER) == set()


@pytest.mark.parametrize(
    ("settings", "warm"),
    [
        ({}, {"": 2}),
        ({"templates": ["a", "b"]}, {"a": 2, "b": 2}),
        ({"templates": ["a", "b"], "ready": 0}, {"a": 0, "b": 0}),
        ({"templates": ["a", "b"], "ready": 9, "max_databases": 7}, {"a": 3, "b": 3}),
        ({"templates": ["a", "b", "c"], "max_databases": 2}, {"a": 0, "b": 0, "c": 0}),
    ],
)
def test_together_no_more_copies_wait_than_trajectories_may_have(
    settings: dict[str, Any], warm: dict[str, int]
) -> None:
    assert PostgresConfig(host="db", **settings).warm() == warm
