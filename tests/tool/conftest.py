"""Fixtures that several modules share."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import postgres_harness
import pytest
import pytest_asyncio
import tool_harness as harness
from postgres_harness import Postgres
from tool_harness import Service

from turnwire.v1 import tool_pb2


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether the run may take longer: see `--thorough`."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture
def passes(thorough: bool) -> tuple[int, ...]:
    """How many hostile cases run at a time in the restricted tier. One by one finds little more than who left what,
    and is done for the other walls."""
    return (1, 8) if thorough else (8,)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server; for tests that need it by `@pytest.mark.needs("postgres")`."""
    yield from postgres_harness.serve()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def postgres_service(postgres: Postgres) -> AsyncIterator[Service]:
    """A tool service with the tool `sql` on that server."""
    async with postgres_harness.running(postgres) as service:
        yield service


@pytest_asyncio.fixture(loop_scope="module")
async def nothing_left(postgres_service: Service, postgres: Postgres) -> AsyncIterator[None]:
    """What a test does leaves nothing behind, in the service and on its PostgreSQL server."""
    before = await asyncio.to_thread(postgres.footprint)
    await postgres_service.stub.ListTools(tool_pb2.ListToolsRequest())  # asks the server: makes what is made once
    async with harness.nothing_left(postgres_service):
        yield
    await postgres.settled(before)
