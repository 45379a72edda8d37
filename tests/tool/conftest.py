"""Fixtures that several modules share."""

from collections.abc import Iterator

import postgres_harness
import pytest
from postgres_harness import Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server; for tests that need it by `@pytest.mark.needs("postgres")`."""
    yield from postgres_harness.serve()
