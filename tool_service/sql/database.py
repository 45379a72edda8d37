"""One trajectory's PostgreSQL database: made when it is first needed, gone with the trajectory.

Invariants:

- A statement is answered within its deadline and `GRACE_SECONDS`: it is cancelled, and where that does not help, its
  session is ended, both from outside, since a role may change its own time limits. Where nothing ends it, its database
  is given up: that is said in answer to the next statement, and the one after has a new database.
- What the agent's role sees and may do is by `walls.py`; what fails in making the database is never the agent's fault.
- `close` waits for a database that is being made, so that none can come into being after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec

from tool_service.sandbox.base import JSON, TurnResult, TurnStatus
from tool_service.sql import results, schema, walls
from tool_service.sql.connection import Caps, Connection, ConnectionLost, Outcome, ServerError, decoded
from tool_service.sql.scram import verifier
from tool_service.sql.server import PostgresServer
from turnwire.errors import InvalidRequestError, UnavailableError

ValueOf: TypeAlias = Callable[[Outcome], dict[str, Any]]

GRACE_SECONDS = 8.0
"""How long after its deadline a statement may take to be answered. It is a second, but for a server that is slow."""
_CANCEL_SECONDS = 1.0
"""How long a cancelled statement may take to stop before its session is ended."""
_LOOK_SECONDS = 0.5
"""Between two looks at the size of a database that a statement may be filling."""


class PostgresDatabase:
    """See the module's docstring. Calls do not overlap, but for `close`."""

    def __init__(
        self, server: PostgresServer, template: str, init_sql: str, init_seconds: float, read_only: bool
    ) -> None:
        self._server = server
        self._template = template
        self._init_sql = init_sql
        self._init_seconds = init_seconds
        self._read_only = read_only
        self._making: asyncio.Task[None] | None = None
        self._name = ""
        self._session: Connection | None = None
        self._lost = False
        """Whether a session of before is gone, with what was not committed there."""
        self._ending: asyncio.Task[bool] | None = None
        """Of a session that is lost."""
        self._given_up = False
        """Whether the database of before is, and the agent does not know yet."""

    async def ready(self) -> None:
        """Make the database and begin a session, where that is not done. May be tried again after an error.

        Raises ExhaustedError, UnavailableError, and InvalidRequestError for an `init_sql` that fails.
        """
        if self._session is not None:
            return
        if self._name and self._lost and not await self._vacated():
            await self._give_up()
            self._given_up = True
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        try:
            await asyncio.shield(self._making)
        except Exception:
            self._making = None
            raise
        self._session = await self._log_in(self._role)

    async def _vacated(self) -> bool:
        """Whether the database is there, and the session of before gone from it."""
        ending, self._ending = self._ending, None
        if ending is not None:
            with contextlib.suppress(UnavailableError):
                return await ending
        return await self._server.vacate(self._name, self._role)

    @property
    def _role(self) -> str:
        """The agent's."""
        return f"{self._name}_r" if self._read_only else self._name

    async def _make(self) -> None:
        self._name = await self._server.take(self._template)
        try:
            await self._server.order(walls.hand_over(self._name, self._role))
            if self._init_sql or self._read_only:
                await self._fill()
        except BaseException as error:
            await self._remove()
            if isinstance(error, ServerError | ConnectionLost):
                raise self._server.unavailable(error) from error
            raise

    async def _fill(self) -> None:
        """What the owner does before the agent comes."""
        owner = await self._log_in(self._name)
        try:
            if self._init_sql:
                await self._server.order([walls.may_create(self._name, self._name, True)])
                async with asyncio.timeout(self._init_seconds):
                    await owner.script(self._init_sql)
                if owner.in_transaction:
                    raise _bad_script("it leaves a transaction open: COMMIT it")
                await self._server.order([walls.may_create(self._name, self._name, False)])
            if self._read_only:
                await owner.script(walls.let_read(self._role))
                await self._server.order([f"ALTER ROLE {self._name} NOLOGIN"])
        except InvalidRequestError:
            raise
        except ServerError as error:
            if results.status_of(error) is TurnStatus.INFRA:
                raise
            raise _bad_script(results.describe(error, self._init_sql)) from error
        except TimeoutError as error:
            raise _bad_script(f"it takes longer than {self._init_seconds:g} s (tools.sql.init_seconds)") from error
        except ValueError as error:  # NUL, lone surrogates
            raise _bad_script(str(error)) from error
        finally:
            await owner.close()

    async def _log_in(self, role: str) -> Connection:
        """A session under a password that nobody knows and that holds until the next."""
        password = secrets.token_urlsafe(24)
        settings = walls.admit(role, self._name, verifier(password), self._server.config.temp_bytes)
        await self._server.order(settings)
        return await self._server.connect(role, password, self._name)

    async def run(self, statement: str, seconds: float, caps: Caps, shown_rows: int) -> TurnResult:
        """Run a statement of the agent's: `results.table_of` is the value.

        Raises nothing but cancellation, which ends the session. `ready` must have been called.
        """
        return await self._run(statement, seconds, caps, lambda outcome: results.table_of(outcome, shown_rows))

    async def schema(self, name: str, seconds: float) -> TurnResult:
        """Tables that the agent may read, all or those of a name: `schema.py` says what the value is. Else as `run`."""
        begin = time.monotonic()
        caps = Caps(rows=schema.MOST_COLUMNS)
        listed = await self._run(schema.listing(name), seconds, caps, _texts)
        if listed.status is not TurnStatus.OK:
            return listed
        found = cast(dict[str, Any], listed.value)
        tables = schema.tables_of(found["rows"])
        truncated = found["truncated"] or len(tables) > schema.MOST_TABLES
        del tables[schema.MOST_TABLES :]
        counted = [table for table in tables if table["kind"] in ("table", "materialized view")]
        if counted and self._session is not None:
            left = max(seconds - (time.monotonic() - begin), 0.001)
            counts = await self._run(schema.counting(counted), left, caps, _texts)
            if counts.status is not TurnStatus.OK:
                return counts
            for table, count in zip(counted, cast(dict[str, Any], counts.value)["rows"][0], strict=True):
                table["rows"] = int(count)
        for table in tables:
            del table["quoted"]
        value: JSON = {"tables": cast(JSON, tables), "truncated": truncated}
        return TurnResult(TurnStatus.OK, value=value)

    async def _run(self, statement: str, seconds: float, caps: Caps, value_of: ValueOf) -> TurnResult:
        begin = time.monotonic()
        session = self._session
        if session is None:
            raise RuntimeError("`ready` makes the session in which statements run")
        if self._given_up:
            self._given_up = self._lost = False
            return TurnResult(TurnStatus.SESSION_LOST, detail="a session could not be ended, and its database is lost")
        restarted, self._lost = self._lost, False
        work = asyncio.create_task(session.run(statement, caps))
        try:
            result = await self._result(work, statement, begin + seconds, value_of)
        except UnavailableError as error:
            result = TurnResult(TurnStatus.INFRA, detail=error.message)
        finally:
            await self._settle(work, session)
        return msgspec.structs.replace(result, wall_seconds=time.monotonic() - begin, restarted=restarted)

    async def _result(
        self, work: asyncio.Task[Outcome], statement: str, deadline: float, value_of: ValueOf
    ) -> TurnResult:
        stopped = await self._wait(work, deadline)
        if not self._read_only and stopped is not TurnStatus.TIMEOUT and await self._too_large():
            stopped = TurnStatus.SESSION_LOST
        if stopped is TurnStatus.SESSION_LOST:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._give_up()
            most = self._server.config.max_database_bytes
            return TurnResult(stopped, detail=f"the database grew past {most} bytes and is lost")
        if stopped is TurnStatus.TIMEOUT:
            return TurnResult(stopped, detail="the statement was stopped at its deadline")
        try:
            return TurnResult(TurnStatus.OK, value=value_of(work.result()))
        except ServerError as error:
            return results.failure(error, statement)
        except ConnectionLost as error:
            return TurnResult(TurnStatus.INFRA, detail=str(error))
        except ValueError as error:  # NUL, lone surrogates
            return TurnResult(TurnStatus.TOOL_ERROR, detail=str(error))

    async def _wait(self, work: asyncio.Task[Outcome], deadline: float) -> TurnStatus:
        """Until the statement is over (OK), or has to be: then it is, or its session is.

        A statement that ends just while it is stopped is over all the same.
        """
        while not work.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return await self._stop(work)
            await asyncio.wait((work,), timeout=min(left, _LOOK_SECONDS))
            if not work.done() and await self._too_large():
                return TurnStatus.SESSION_LOST
        return TurnStatus.OK

    async def _stop(self, work: asyncio.Task[Outcome]) -> TurnStatus:
        await self._server.cancel(self._role)
        await asyncio.wait((work,), timeout=_CANCEL_SECONDS)
        if work.done() and work.exception() is None:
            return TurnStatus.OK
        return TurnStatus.TIMEOUT

    async def _too_large(self) -> bool:
        return await self._server.bytes_of(self._name, self._role) > self._server.config.max_database_bytes

    async def _settle(self, work: asyncio.Task[Outcome], session: Connection | None) -> None:
        """After a statement: a session in the middle of an answer, or at its end, is of no more use."""
        if not work.done():
            work.cancel()
        await asyncio.gather(work, return_exceptions=True)  # whatever it was, the result says it, or why it cannot
        if session is not None and session is self._session and not session.usable:
            session.abort()
            self._session = None
            self._lost = True
            self._ending = asyncio.create_task(self._server.vacate(self._name, self._role))  # `ready` makes sure of it

    async def _give_up(self) -> None:
        """The next call has a new database."""
        if self._session is not None:
            self._session.abort()
        self._session = self._making = None
        await self._remove()
        self._lost = False  # what is told is that the database is gone

    async def _remove(self) -> None:
        name, self._name = self._name, ""
        if name:
            await self._server.give_back(name)

    async def close(self) -> None:
        """Remove the database. Idempotent."""
        if self._making is not None:
            await asyncio.gather(self._making, return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            session.abort()
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.gather(self._ending, return_exceptions=True)
        await self._remove()


def _bad_script(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"context of tool 'sql': init_sql failed: {why}")


def _texts(outcome: Outcome) -> dict[str, Any]:
    """Rows of texts."""
    rows = [[decoded(cell.data) if cell else None for cell in row] for row in outcome.rows]
    return {"rows": rows, "truncated": outcome.truncated}
