"""What trajectories share of a PostgreSQL server: the connection of its superuser, the room on it, and cleanliness.

Invariants:

- Every database and role of ours is called `turnwire_OWNER_INSTANCE_NUMBER` from the moment in which it exists: OWNER
  and INSTANCE say whose it is, and a name needs no second step that could fail.
- A service holds a lock on the server under its instance's number while it lives, whichever machine it runs on. A
  leftover is of our owner, its instance holds no lock, and nobody is connected to it; or it is of this instance, and no
  trajectory has it. Exactly these are removed, at start and from then on.
- No message holds a password.
"""

# ruff: noqa: S608 - names are of our making

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from tool_service.sql.config import PostgresConfig
from tool_service.sql.connection import Connection, ConnectionLost, ServerError, decoded
from tool_service.sql.dial import Endpoint, connect
from turnwire.errors import ConfigError, ExhaustedError, Problem, UnavailableError

logger = logging.getLogger(__name__)
T = TypeVar("T")

SWEEP_SECONDS = 10.0
CONTROL_SECONDS = 10.0
"""How long the server may take for a small request, as to cancel a statement."""
MAKE_SECONDS = 50.0
"""How long making or removing a database may take."""
_MAKERS = 4
"""Databases that are made or removed at once."""
_OLDEST = 140000
_RETRY_SECONDS = 1.0


class PostgresServer:
    """See the module's docstring. `start` first, `close` last."""

    def __init__(self, config: PostgresConfig) -> None:
        self.config = config
        self.removed_total = 0
        self._endpoint = Endpoint(config.host, config.port, config.tls_context())
        self._instance = secrets.token_hex(8)
        self._prefix = prefix_of(config.owner)
        self._names: set[str] = set()
        """Of this instance's trajectories."""
        self._room = asyncio.Semaphore(config.max_databases)
        self._makers = asyncio.Semaphore(_MAKERS)
        self._control: Connection | None = None
        self._control_lock = asyncio.Lock()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Refuse a server that cannot hold what is promised; remove leftovers. Raises UnavailableError."""
        await self._check()
        await self.sweep()
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def close(self) -> None:
        """Trajectories must have been closed."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._control is not None:
            await self._control.close()

    async def health(self) -> str:
        """Why there is no database to be had; empty when there is."""
        try:
            await self.ask("SELECT 1")
        except UnavailableError as error:
            return error.message
        return ""

    # For a trajectory

    async def take_name(self) -> str:
        """A name for a database, when there is room for one. Raises ExhaustedError."""
        try:
            async with asyncio.timeout(self.config.wait_seconds):
                await self._room.acquire()
        except TimeoutError:
            limit = self.config.max_databases
            raise ExhaustedError(
                f"all {limit} databases are in use (tools.sql.postgres.max_databases)", retry_after=_RETRY_SECONDS
            ) from None
        name = f"{self._prefix}{self._instance}_{secrets.token_hex(4)}"
        self._names.add(name)
        return name

    async def remove(self, name: str) -> None:
        """Remove a trajectory's database and roles, whatever exists of them. Never raises: the sweep would find it."""
        try:
            async with self.maker() as maker:
                await _drop(maker, name)
        except (UnavailableError, ServerError) as error:
            logger.warning("database %s is left to the next sweep: %s", name, error)
        finally:
            self._names.discard(name)
            self._room.release()

    @contextlib.asynccontextmanager
    async def maker(self, database: str = "") -> AsyncIterator[Connection]:
        """A connection of the superuser, for what takes long. Raises UnavailableError when it is lost."""
        async with self._makers:
            try:
                async with asyncio.timeout(MAKE_SECONDS):
                    connection = await self.connect(self.config.user, self.config.password(), database)
                    try:
                        yield connection
                    except BaseException:
                        connection.abort()
                        raise
                    await connection.close()
            except (ConnectionLost, TimeoutError) as error:
                raise self.unavailable(error) from error

    async def connect(self, user: str, password: str, database: str = "") -> Connection:
        """A session. Raises UnavailableError for all that may go wrong."""
        try:
            return await connect(self._endpoint, user, password, database or self.config.database)
        except (ConnectionLost, ServerError) as error:
            raise self.unavailable(error) from error

    async def cancel(self, role: str) -> None:
        """Stop what a role's session runs. Raises UnavailableError."""
        await self.ask(f"SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")

    async def terminate(self, role: str) -> None:
        """End a role's sessions, and wait until they are gone. Raises UnavailableError."""
        async with self.maker() as maker:
            await maker.run(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = '{role}'")

    async def bytes_of(self, database: str) -> int:
        """On the server's disk. Raises UnavailableError."""
        ((size,),) = await self.ask(f"SELECT pg_database_size('{database}')")
        return int(size)

    async def ask(self, statement: str) -> list[list[str]]:
        """A small request; its rows as text, NULL as nothing. Raises UnavailableError."""

        async def run(control: Connection) -> list[list[str]]:
            outcome = await control.run(statement)
            return [[decoded(cell.data) if cell else "" for cell in row] for row in outcome.rows]

        return await self._with_control(run)

    async def order(self, statements: Sequence[str]) -> None:
        """Several small ones, in one transaction. Raises UnavailableError."""
        await self._with_control(lambda control: control.script("; ".join(statements)))

    async def _with_control(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Requests go one after the other over one connection, which is made again when it was lost."""
        async with self._control_lock:
            for last in (False, True):
                try:
                    async with asyncio.timeout(CONTROL_SECONDS):
                        if self._control is None:
                            self._control = await self._control_connection()
                        return await work(self._control)
                except (ConnectionLost, TimeoutError, ServerError) as error:
                    if last or (isinstance(error, ServerError) and not error.fatal):
                        raise self.unavailable(error) from error
                finally:
                    if self._control is not None and not self._control.usable:
                        self._control.abort()
                        self._control = None
        raise AssertionError("unreachable")

    async def _control_connection(self) -> Connection:
        connection = await connect(self._endpoint, self.config.user, self.config.password(), self.config.database)
        number = int.from_bytes(bytes.fromhex(self._instance), "big", signed=True)
        await connection.run(f"SELECT pg_try_advisory_lock_shared({number})")  # shared: one lost may linger
        return connection

    def unavailable(self, error: BaseException) -> UnavailableError:
        """What a failure of the server's, or of the way there, is to others."""
        config = self.config
        reason = str(error) or type(error).__name__
        return UnavailableError(f"PostgreSQL at {config.host}:{config.port}: {reason}", retry_after=_RETRY_SECONDS)

    # At start, and from then on

    async def _check(self) -> None:
        config = self.config
        ((version, superuser, prepared, connections),) = await self.ask(
            "SELECT current_setting('server_version_num'), rolsuper, current_setting('max_prepared_transactions'), "
            "current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int "
            "FROM pg_roles WHERE rolname = current_user"
        )
        there = {name for (name,) in await self.ask("SELECT datname FROM pg_database")}
        problems = []
        if int(version) < _OLDEST:
            problems.append(Problem("host", f"the server's version is {version}; at least {_OLDEST} is needed"))
        if superuser != "t":
            problems.append(Problem("user", f"{config.user} is no superuser, so trajectories could not be shut in"))
        if prepared != "0":
            problems.append(
                Problem("host", "set the server's max_prepared_transactions = 0: prepared ones outlive their session")
            )
        needed = config.max_databases + _MAKERS + 1
        if int(connections) < needed:
            problems.append(
                Problem(
                    "max_databases",
                    f"{config.max_databases} trajectories need {needed} connections, and the server has {connections}; "
                    "raise its max_connections, or lower this",
                )
            )
        for name in config.templates:
            if name not in there:
                problems.append(Problem("templates", f"the server has no database {name!r}"))
        if problems:
            raise ConfigError(
                [Problem(f"tools.sql.postgres.{problem.key}", problem.message) for problem in problems],
                f"PostgreSQL at {config.host}:{config.port}",
            )

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except UnavailableError as error:
                logger.warning("no search for leftovers: %s", error.message)

    async def leftovers(self) -> list[str]:
        """Names of leftovers. Raises UnavailableError."""
        rows = await self.ask(
            "SELECT name, EXISTS (SELECT FROM pg_stat_activity WHERE datname = name) "
            "FROM (SELECT datname AS name FROM pg_database "
            "UNION SELECT regexp_replace(rolname, '_r$', '') FROM pg_roles) AS names "
            f"WHERE starts_with(name, '{self._prefix}') ORDER BY name"
        )
        locks = await self.ask(
            "SELECT lpad(to_hex(classid::bigint), 8, '0') || lpad(to_hex(objid::bigint), 8, '0') FROM pg_locks "
            "WHERE locktype = 'advisory' AND objsubid = 1 "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        alive = {instance for (instance,) in locks}
        found = []
        for name, connected in rows:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            if match["instance"] == self._instance:
                dead = name not in self._names
            else:
                dead = match["instance"] not in alive and connected == "f"
            if dead:
                found.append(name)
        return found

    async def sweep(self) -> list[str]:
        """Remove leftovers; the names of those removed. Raises UnavailableError."""
        removed = []
        for name in await self.leftovers():
            try:
                async with self.maker() as maker:
                    await _drop(maker, name)
            except ServerError as error:
                logger.warning("leftover %s could not be removed: %s", name, error)
            else:
                removed.append(name)
        self.removed_total += len(removed)
        if removed:
            logger.info("removed %d leftover databases: %s", len(removed), ", ".join(removed))
        return removed


_NAME = re.compile(r"turnwire_[0-9a-f]{12}_(?P<instance>[0-9a-f]{16})_[0-9a-f]{8}")


def prefix_of(owner: str) -> str:
    """With what the names of an owner's databases begin."""
    return f"turnwire_{hashlib.blake2b(owner.encode(), digest_size=6).hexdigest()}_"


async def _drop(maker: Connection, name: str) -> None:
    """Raises ServerError, ConnectionLost."""
    await maker.run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    await maker.run(f"DROP ROLE IF EXISTS {name}, {name}_r")


async def sweep(config: PostgresConfig, remove: bool = True) -> list[str]:
    """Leftovers of dead services of the config's owner, from outside any service; removed unless that is not wanted.

    Raises UnavailableError.
    """
    server = PostgresServer(config)
    try:
        return await server.sweep() if remove else await server.leftovers()
    finally:
        await server.close()
