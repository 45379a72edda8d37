"""What an agent may try on a PostgreSQL server: each refused or bounded, typed, and without a trace.

The ids of cases begin with rows of the hostile inputs' list. I9 and I14's refusals at start are in
test_postgres_service.py. After each case its trajectory answers a clean call; after each batch a trajectory beside it
answers rightly, and the server has the databases, roles and sessions that it had before; the template stays as it was.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import pytest
import pytest_asyncio
import tool_harness as harness
from postgres_cases_any_role import ANY_ROLE
from postgres_cases_one_role import READ_ONLY, READ_WRITE
from postgres_harness import Postgres, running, session, shop
from postgres_steps import LOST, Step, ok
from tool_harness import Service, Trajectory, binding, error_of, text_of, texts

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.needs("isolated-sandbox", "postgres")]

Case: TypeAlias = tuple[str, tuple[Step, ...], bool]
"""Name, steps, and whether its database is read-only."""
CASES: tuple[Case, ...] = (
    *((f"{name}, reader", steps, True) for name, steps in ANY_ROLE.items()),
    *((f"{name}, owner", steps, False) for name, steps in ANY_ROLE.items()),
    *((name, steps, True) for name, steps in READ_ONLY.items()),
    *((name, steps, False) for name, steps in READ_WRITE.items()),
)
CLEAN = (Step("rollback", ("", LOST)), ok("select 6 * 7 as clean", "clean\n42"))
"""With which every case ends."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(postgres: Postgres) -> AsyncIterator[Service]:
    async with running(postgres, max_database_bytes=64 * 2**20, temp_bytes=16 * 2**20) as started:
        yield started


async def run(service: Service, name: str, steps: tuple[Step, ...], read_only: bool) -> list[str]:
    """A case in a trajectory of its own; what did not end as it should."""
    steps = (*steps, *CLEAN)
    deadlines = [step.seconds for step in steps]
    statements = (step.statement for step in steps)
    said = await session(service, *statements, context=shop(read_only), seconds=deadlines, name=name)
    return [
        f"{name}: {step.statement[:150]!r}: {error_of(observation) or 'OK'}: {text_of(observation)[:300]!r} "
        f"({observation.error_detail[:300]})"
        for step, observation in zip(steps, said, strict=True)
        if error_of(observation) not in step.ends or step.shows not in text_of(observation)
    ]


@pytest.mark.timeout(1200)
async def test_every_case_has_its_outcome_and_leaves_nothing(service: Service, postgres: Postgres) -> None:
    for at_once in (1, 8):
        await one_pass(service, postgres, at_once)


async def one_pass(service: Service, postgres: Postgres, at_once: int) -> None:
    """All cases, that many at a time."""
    failures: list[str] = []
    canary = Trajectory(service, f"canary {at_once}")
    await canary.open(binding("sql", shop()))
    await canary.act(0, "<sql>update orders set total = 7</sql>")
    before = await asyncio.to_thread(postgres.footprint)
    for turn, start in enumerate(range(0, len(CASES), at_once), 1):
        batch = CASES[start : start + at_once]
        async with harness.nothing_left(service):
            for failed in await asyncio.gather(*(run(service, *case) for case in batch)):
                failures += failed
            assert texts(await canary.act(turn, "<sql>select sum(total) from orders</sql>")) == ["sum\n21.00"]
        await postgres.settled(before)
    await canary.close()
    assert not failures, "\n".join(failures)
    assert await asyncio.to_thread(postgres.execute, "select count(*) from orders", "shop") == [(3,)]
    assert await asyncio.to_thread(postgres.execute, "select count(*) from customers", "shop") == [(2,)]
