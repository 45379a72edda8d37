"""PostgreSQL's wire protocol (version 3), as far as the `sql` tool needs it: log in, run a statement, read its result.

Why no driver does this: each takes a row into memory whole before anybody can look at it. One cell of 500 MB raised the
peak of a process by 1,430 MiB with psycopg 3.3 (libpq; the same with `stream` and with server-side cursors), 954 MiB
with asyncpg 0.32 and 1,430 MiB with pg8000 1.31, which takes results whole as well; by 1 MiB here. None has a limit to
set. A capped process for each session would cost 37 MiB of psycopg a trajectory, and its death the session, where here
the cell is cut while it streams by and the session goes on. libpq also ends a long result only by cancelling the
statement, which undoes what it did; here the protocol's own row limit ends it without harm.

A statement goes through the extended protocol, in which the server itself refuses several statements at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterator

import msgspec

from tool_service.sql import scram

CHUNK = 64 * 1024
"""Read at once."""
_MESSAGE_BYTES = 2**20
"""Kept of a message that is not a row; what is beyond is read and thrown away."""
_ROWS_AT_ONCE = 64
"""Asked for in one go: so many may still come after the byte cap is reached."""
_CELL_OVERHEAD = 64
"""Bytes of this process's memory that a cell costs beside its own."""
_PROTOCOL = 196608
_SKIPPED = frozenset({b"N", b"S", b"A", b"1", b"2", b"3", b"n", b"t"})
"""Notices, settings, notifications; parse, bind and close done; no row description; parameter description."""


class ServerError(Exception):
    """What the server answered instead of a result, by the protocol's field names."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__(fields.get("M", ""))
        self.fields = fields

    @property
    def code(self) -> str:
        """SQLSTATE."""
        return self.fields.get("C", "")

    @property
    def fatal(self) -> bool:
        """Whether the session is over."""
        return self.fields.get("V") in ("FATAL", "PANIC")


class ConnectionLost(ConnectionError):  # noqa: N818 - says what is the case
    """The connection could not be made, or ended without the server saying why."""


class Caps(msgspec.Struct, frozen=True):
    """What is kept of a result."""

    rows: int = 100_000
    cell_bytes: int = 65536
    total_bytes: int = 16 * 2**20


_CAPS = Caps()


class Cell(msgspec.Struct, frozen=True):
    """A value as the server writes it: the first bytes, and how many there were."""

    data: bytes
    size: int


class Outcome(msgspec.Struct):
    """What a statement did. Columns are (name, type's oid); none where it returns no rows."""

    columns: list[tuple[str, int]] = []
    rows: list[list[Cell | None]] = []
    truncated: bool = False
    changes: int = 0
    """Rows changed, by a statement that returns none."""


class Connection:
    """One session. Calls do not overlap. A call that is cancelled leaves it unusable: `abort` it then."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """By `dial.connect` only."""
        self._reader = reader
        self._writer = writer
        self.pid = 0
        """Of the server's process."""
        self.in_transaction = False
        """Whether a transaction block is open, sound or failed, after the last statement."""
        self.usable = True
        """False once the session is over, or in the middle of an answer."""
        self._ahead: asyncio.Task[bytes] | None = None
        """Begun while the server waits for a statement: why it ends a session, it says before the next one is sent."""

    async def run(self, statement: str, caps: Caps = _CAPS) -> Outcome:
        """Run one statement. Raises ServerError, ConnectionLost, and ValueError for what cannot be sent as text."""
        text = statement.encode()  # UnicodeEncodeError is a ValueError
        if b"\0" in text:
            raise ValueError("the statement holds a NUL character")
        await self._listen()
        batch = min(_ROWS_AT_ONCE, caps.rows + 1)
        self._send(
            (b"P", b"\0" + text + b"\0\0\0"),
            (b"B", bytes(8)),  # unnamed portal of the unnamed statement, no parameters, results as text
            (b"D", b"P\0"),
            *_fetch(batch),
        )
        outcome = Outcome()
        returns = False
        error: ServerError | None = None
        self.usable = False
        with loss():
            await self._writer.drain()
            room = caps.total_bytes
            while True:
                kind, size = await self._header()
                if kind == b"D":
                    room = await self._row(size, outcome, caps, room)
                elif kind == b"s":  # more rows are there
                    if len(outcome.rows) > caps.rows or outcome.truncated:
                        break
                    self._send(*_fetch(min(batch, caps.rows + 1 - len(outcome.rows))))
                elif kind == b"T":
                    returns = True  # perhaps no columns, as `SELECT` alone
                    outcome.columns = _columns(await self._body(size))
                elif kind == b"C":
                    tag = await self._body(size)
                    outcome.changes = 0 if returns else _changes(tag)
                    break
                elif kind == b"I":  # an empty statement
                    break
                elif kind == b"E":
                    error = await self._error(size)
                    break
                else:
                    error = await self._other(kind, size) or error
            if len(outcome.rows) > caps.rows:
                del outcome.rows[caps.rows :]
                outcome.truncated = True
            self._send((b"S", b""))
            await self._ready()
        if error is not None:
            raise error
        return outcome

    async def script(self, statements: str) -> None:
        """Run statements in one transaction, unless they begin one themselves. Results are not kept.

        Raises as `run`.
        """
        text = statements.encode()
        if b"\0" in text:
            raise ValueError("the script holds a NUL character")
        await self._listen()
        self._send((b"Q", text + b"\0"))
        self.usable = False
        with loss():
            await self._writer.drain()
            error = await self._ready()
        if error is not None:
            raise error

    async def close(self) -> None:
        """Say goodbye, if that is possible, and close."""
        if self.usable:
            self._send((b"X", b""))
        self._stop()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await self._writer.wait_closed()

    def abort(self) -> None:
        """Close at once, whatever is under way. The server may still be at work on the statement."""
        self._stop()
        self._writer.transport.abort()

    def _stop(self) -> None:
        self.usable = False
        if self._ahead is not None:
            self._ahead.cancel()

    # Messages

    def _send(self, *messages: tuple[bytes, bytes]) -> None:
        """All in one write: the server may end the session after the first of them, and a second write would then fail
        before anybody has read why."""
        self._writer.write(b"".join(kind + struct.pack("!i", len(body) + 4) + body for kind, body in messages))

    async def _listen(self) -> None:
        """Take in what the server said while nothing was asked of it. Raises as `run` when it has ended the session."""
        with loss():
            while self._ahead is not None and self._ahead.done():
                self.usable = False
                kind, size = await self._header()
                if kind == b"E":
                    raise await self._error(size)
                await self._other(kind, size)
                self._listen_on()

    def _listen_on(self) -> None:
        self._ahead = asyncio.create_task(self._reader.readexactly(5))
        self.usable = True

    async def _header(self) -> tuple[bytes, int]:
        """A message's kind and the bytes that follow."""
        ahead, self._ahead = self._ahead, None
        head = await (ahead or self._reader.readexactly(5))
        size = int.from_bytes(head[1:], "big") - 4
        if size < 0:
            raise ConnectionLost("the server does not speak PostgreSQL's protocol")
        return head[:1], size

    async def _body(self, size: int, keep: int = _MESSAGE_BYTES) -> bytes:
        """The rest of a message, or of a cell, of which no more than `keep` bytes are taken into memory."""
        kept = await self._reader.readexactly(min(size, keep))
        left = size - len(kept)
        while left:
            chunk = await self._reader.read(min(left, CHUNK))
            if not chunk:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(chunk)
        return kept

    async def _row(self, size: int, outcome: Outcome, caps: Caps, room: int) -> int:
        """Take a row in, as far as there is room; the room that is then left."""
        if outcome.truncated:
            await self._body(size, 0)
            return 0
        row: list[Cell | None] = []
        for _ in range(int.from_bytes(await self._reader.readexactly(2), "big")):
            (length,) = struct.unpack("!i", await self._reader.readexactly(4))
            keep = min(max(length, 0), caps.cell_bytes)
            room -= keep + _CELL_OVERHEAD
            if length < 0:
                row.append(None)
            else:
                row.append(Cell(await self._body(length, keep if room >= 0 else 0), length))
        if room < 0:
            outcome.truncated = True
        else:
            outcome.rows.append(row)
        return room

    async def _error(self, size: int) -> ServerError:
        parts = (await self._body(size)).split(b"\0")
        error = ServerError({part[:1].decode("ascii", "replace"): decoded(part[1:]) for part in parts if part})
        if error.fatal:
            raise error
        return error

    async def _other(self, kind: bytes, size: int) -> ServerError | None:
        """A message that is not part of a result; what the statement is refused for, if it is."""
        await self._body(size, 0)
        if kind == b"G":  # COPY FROM STDIN: the server waits for data, and has passed over the Sync that went before
            self._send((b"f", b"there is no data to copy from here\0"))
        elif kind in (b"H", b"W"):
            return ServerError({"C": "0A000", "M": "COPY to the client is not read here: use SELECT"})
        elif kind not in _SKIPPED and kind not in (b"d", b"c"):
            raise ConnectionLost(f"the server does not speak PostgreSQL's protocol: it sent a message {kind!r}")
        return None

    async def _ready(self) -> ServerError | None:
        """Read until the server waits for a statement; its first error."""
        error: ServerError | None = None
        while True:
            kind, size = await self._header()
            if kind == b"Z":
                self.in_transaction = await self._body(size) != b"I"
                self._listen_on()
                return error
            if kind == b"E":
                error = error or await self._error(size)
            elif kind in (b"D", b"T", b"C", b"I", b"s"):
                await self._body(size, 0)
            else:
                error = error or await self._other(kind, size)

    # Logging in

    async def log_in(self, user: str, password: str, database: str) -> None:
        """Begin the session. Raises ServerError, ConnectionLost."""
        values = {"user": user, "database": database, "client_encoding": "UTF8", "application_name": "turnwire"}
        body = b"".join(name.encode() + b"\0" + value.encode() + b"\0" for name, value in values.items()) + b"\0"
        self._writer.write(struct.pack("!ii", len(body) + 8, _PROTOCOL) + body)
        client = scram.Client(password)
        with loss():
            await self._writer.drain()
            while True:
                kind, size = await self._header()
                if kind == b"R":
                    body = await self._body(size)
                    self._authenticate(client, int.from_bytes(body[:4], "big"), body[4:])
                elif kind == b"K":
                    self.pid = int.from_bytes((await self._body(size))[:4], "big")
                elif kind == b"Z":
                    await self._body(size)
                    self._listen_on()
                    return
                elif kind == b"E":
                    raise await self._error(size)
                else:
                    await self._other(kind, size)

    def _authenticate(self, client: scram.Client, step: int, data: bytes) -> None:
        try:
            if step == 10 and scram.MECHANISM.encode() in data.split(b"\0"):
                first = client.first()
                self._send((b"p", scram.MECHANISM.encode() + b"\0" + struct.pack("!i", len(first)) + first))
            elif step == 11:
                self._send((b"p", client.final(data)))
            elif step == 12:
                client.check(data)
            elif step != 0:
                raise ConnectionLost(f"the server asks for log-in method {step}; only scram-sha-256 is spoken here")
        except (ValueError, KeyError) as error:
            raise ConnectionLost(f"the server's log-in failed: {error}") from None


def _fetch(rows: int) -> tuple[tuple[bytes, bytes], ...]:
    """The messages that ask for so many rows more, now."""
    return (b"E", b"\0" + struct.pack("!i", rows)), (b"H", b"")


@contextlib.contextmanager
def loss() -> Iterator[None]:
    """The ways in which a connection fails, as one."""
    try:
        yield
    except (asyncio.IncompleteReadError, TimeoutError) as error:
        what = "did not answer in time" if isinstance(error, TimeoutError) else "ended the connection"
        raise ConnectionLost(f"the server {what}") from error
    except ConnectionLost:
        raise
    except OSError as error:  # refused, reset, unknown host, no valid certificate
        raise ConnectionLost(str(error)) from error


def decoded(data: bytes) -> str:
    """Text of the server's. What is cut in the middle of a character, or is in another encoding, is replaced."""
    return data.decode("utf-8", "replace")


def _columns(body: bytes) -> list[tuple[str, int]]:
    columns, position = [], 2
    for _ in range(int.from_bytes(body[:2], "big")):
        end = body.index(b"\0", position)
        columns.append((decoded(body[position:end]), int.from_bytes(body[end + 7 : end + 11], "big")))
        position = end + 19
    return columns


def _changes(tag: bytes) -> int:
    """Rows by a command tag, as `INSERT 0 2`, `DELETE 3`, `CREATE TABLE`."""
    count = tag.rstrip(b"\0").rpartition(b" ")[2]
    return int(count) if count.isdigit() else 0
