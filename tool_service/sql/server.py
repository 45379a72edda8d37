"""What trajectories share of a PostgreSQL server: the connection of its superuser, the room on it, and cleanliness.

Invariants:

- Every database and role of ours is called `turnwire_OWNER_INSTANCE_NUMBER` from the moment in which it exists: OWNER
  and INSTANCE say whose it is, and a name needs no second step that could fail.
- A service holds a lock on the server under its instance's number while it lives, whichever machine it runs on. A
  leftover is of our owner, its instance holds no lock, and nobody is connected to it; or it is of this instance, and
  neither has a trajectory got it, nor does it wait for one. Exactly these are removed, at start and from then on.
- No trajectory waits long for another's removal: while some statement runs that nothing can stop, PostgreSQL removes no
  database at all, since each session must first let go of its files. What cannot be removed is left to the sweep.
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
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from tool_service.sql import walls
from tool_service.sql.clones import Clones
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
"""How long making a database may take."""
_DROP_SECONDS = 10.0
"""How long removing one may take. The sweep tries again."""
_LOCK_SECONDS = 2.0
"""How long that may wait for a lock, as another trajectory can hold one: it then fails for this database alone."""
_CANCELED = "57014"
_PATIENCE_SECONDS = 4.0
"""How long a trajectory's end waits for that."""
_END_SECONDS = 3.0
"""How long a session may take to end when it is told to."""
_LOOK_SECONDS = 0.05
_FILE_BYTES = 16384
"""What a file of a database counts at least. An empty table has no bytes, but measuring and removing it takes time."""
_MAKERS = 4
"""Databases that are made at once."""
_DROPPERS = 4
"""Databases that are removed at once."""
_OLDEST = 140000
_LATE_SECONDS = 2.0
"""After which a server that should have ended a statement itself is taken for lost."""
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
        """Of this instance's trajectories, and of clones that wait for one."""
        self._clones = Clones(config.warm(), self._make, self._drop_soon)
        self._room = asyncio.Semaphore(config.max_databases)
        self._makers = asyncio.Semaphore(_MAKERS)
        self._droppers = asyncio.Semaphore(_DROPPERS)
        self._drops: set[asyncio.Task[None]] = set()
        self._control: Connection | None = None
        self._control_lock = asyncio.Lock()
        self._requests: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Refuse a server that cannot hold what is promised; remove leftovers. Raises UnavailableError."""
        await self._check()
        await self.sweep()
        self._sweeper = asyncio.create_task(self._sweep_for_ever())
        self._clones.start()

    async def close(self) -> None:
        """Trajectories must have been closed."""
        await self._clones.close()
        if self._drops:
            await asyncio.wait(self._drops, timeout=_DROP_SECONDS)
            for drop in self._drops:
                drop.cancel()
            await asyncio.gather(*self._drops, return_exceptions=True)
        await asyncio.gather(*self._requests, return_exceptions=True)
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

    async def take(self, template: str) -> str:
        """When there is room for a trajectory, a copy of a template (empty: of none) with nobody in it; its name.

        Raises ExhaustedError, UnavailableError.
        """
        try:
            async with asyncio.timeout(self.config.wait_seconds):
                await self._room.acquire()
        except TimeoutError:
            limit = self.config.max_databases
            raise ExhaustedError(
                f"all {limit} databases are in use (tools.sql.postgres.max_databases)", retry_after=_RETRY_SECONDS
            ) from None
        try:
            return await self._clones.take(template)
        except BaseException:
            self._room.release()
            raise

    async def give_back(self, name: str) -> None:
        """Remove a trajectory's database and roles. Never raises: the sweep would find what is left."""
        drop = self._drop_soon(name)
        try:
            await asyncio.wait((drop,), timeout=_PATIENCE_SECONDS)
        finally:
            self._room.release()

    async def _make(self, template: str) -> str:
        """Raises UnavailableError."""
        name = f"{self._prefix}{self._instance}_{secrets.token_hex(4)}"
        self._names.add(name)
        try:
            async with self._superuser(self._makers, MAKE_SECONDS) as maker:
                await maker.run(walls.create_role(name))
                await maker.run(f"CREATE DATABASE {name} TEMPLATE {walls.quoted(template or 'template0')}")
            async with self._superuser(self._makers, MAKE_SECONDS, name) as maker:
                await maker.script(walls.build(name, name))
        except BaseException as error:
            await self._drop(name)
            if isinstance(error, ServerError):
                raise self.unavailable(error) from error
            raise
        return name

    def _drop_soon(self, name: str) -> asyncio.Task[None]:
        drop = asyncio.create_task(self._drop(name))
        self._drops.add(drop)
        drop.add_done_callback(self._drops.discard)
        return drop

    async def _drop(self, name: str) -> None:
        try:
            await self._remove(name)
        except (UnavailableError, ServerError) as error:
            logger.warning("database %s is left to the next sweep: %s", name, error)
        finally:
            self._names.discard(name)

    async def _remove(self, name: str) -> None:
        """A database and its roles, whatever exists of them. Raises ServerError, UnavailableError."""
        async with self._superuser(self._droppers, _DROP_SECONDS) as dropper:
            await dropper.run(f"SET lock_timeout = '{_LOCK_SECONDS:g}s'")
            await dropper.run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
            await dropper.run(f"DROP ROLE IF EXISTS {name}, {name}_r")

    @contextlib.asynccontextmanager
    async def _superuser(
        self, slots: asyncio.Semaphore, seconds: float, database: str = ""
    ) -> AsyncIterator[Connection]:
        """A connection for what takes long. Raises UnavailableError when it is lost."""
        async with slots:
            try:
                async with asyncio.timeout(seconds + _LATE_SECONDS):
                    connection = await self.connect(self.config.user, self.config.password(), database)
                    try:  # the server ends it itself, or it would go on when this end has gone
                        await connection.run(f"SET statement_timeout = '{seconds:g}s'")
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

    async def vacate(self, name: str, role: str) -> bool:
        """End a role's session in its database. False: that cannot be done, as with statements that nothing stops, or
        the database is no more. Raises UnavailableError."""
        end = time.monotonic() + _END_SECONDS
        while True:
            ((there, sessions),) = await self.ask(
                f"SELECT EXISTS (SELECT FROM pg_database WHERE datname = '{name}'), count(pg_terminate_backend(pid)) "
                f"FROM pg_stat_activity WHERE usename = '{role}'"  # those that WHERE has chosen, and no others
            )
            if there != "t" or sessions == "0" or time.monotonic() > end:
                return there == "t" and sessions == "0"
            await asyncio.sleep(_LOOK_SECONDS)

    async def bytes_of(self, database: str, role: str) -> int:
        """On the server's disk, with the catalogs of all databases in which the role is writing: its own settings and
        password are in such. Past the limit it may be an estimate. Raises UnavailableError."""
        most = self.config.max_database_bytes
        ((size,),) = await self.ask(
            f"SELECT CASE WHEN files * {_FILE_BYTES} > {most} THEN files * {_FILE_BYTES} "
            f"ELSE pg_database_size('{database}') + beside END "
            "FROM (SELECT count(*) AS files FROM pg_database AS d, pg_ls_dir('base/' || d.oid, true, false) "
            f"WHERE datname = '{database}') AS own, "
            "(SELECT coalesce(sum(pg_total_relation_size(relation)), 0) AS beside "
            f"FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE usename = '{role}' "
            "AND locktype = 'relation' AND database = 0 AND mode = 'RowExclusiveLock') AS shared"
        )
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
        """Raises UnavailableError."""
        request = asyncio.create_task(self._request(work))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        return await asyncio.shield(request)  # cut short, it would cost the connection, and with it the lock

    async def _request(self, work: Callable[[Connection], Awaitable[T]]) -> T:
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
        needed = config.max_databases + _MAKERS + _DROPPERS + 1
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
                await self._remove(name)
            except ServerError as error:
                logger.warning("leftover %s could not be removed: %s", name, error)
                if error.code == _CANCELED:
                    break  # some statement runs that nothing can stop: the others could not be removed either
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


async def sweep(config: PostgresConfig, remove: bool = True) -> list[str]:
    """Leftovers of dead services of the config's owner, from outside any service; removed unless that is not wanted.

    Raises UnavailableError.
    """
    server = PostgresServer(config)
    try:
        return await server.sweep() if remove else await server.leftovers()
    finally:
        await server.close()
