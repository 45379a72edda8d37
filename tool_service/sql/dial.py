"""From a server's address to a session there, encrypted from the first byte that matters where that is asked for."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct

import msgspec

from tool_service.sql.connection import CHUNK, Connection, ConnectionLost, loss

_TLS_REQUEST = 80877103


class Endpoint(msgspec.Struct, frozen=True):
    """Where a server is and how it is spoken to."""

    host: str
    port: int
    tls: ssl.SSLContext | None


async def connect(endpoint: Endpoint, user: str, password: str, database: str, seconds: float = 10.0) -> Connection:
    """Begin a session. Raises ServerError for a log-in that is refused, ConnectionLost for all else."""
    with loss():
        async with asyncio.timeout(seconds):
            plain = await asyncio.to_thread(_dial, endpoint, seconds)
            try:
                reader, writer = await asyncio.open_connection(
                    sock=plain,
                    ssl=endpoint.tls,
                    server_hostname=endpoint.host if endpoint.tls else None,
                    limit=CHUNK,
                )
            except BaseException:
                plain.close()
                raise
            connection = Connection(reader, writer)
            try:
                await connection.log_in(user, password, database)
            except BaseException:
                connection.abort()
                raise
            return connection


def _dial(endpoint: Endpoint, seconds: float) -> socket.socket:
    """A socket on which TLS, if it is wanted, may begin. Reads not a byte more than the server's consent."""
    plain = socket.create_connection((endpoint.host, endpoint.port), seconds)
    try:
        if endpoint.tls is not None:
            plain.sendall(struct.pack("!ii", 8, _TLS_REQUEST))
            _check_consent(plain.recv(1))
    except BaseException:
        plain.close()
        raise
    plain.setblocking(False)
    return plain


def _check_consent(answer: bytes) -> None:
    if answer != b"S":
        raise ConnectionLost("the server speaks no TLS (tools.sql.postgres.tls: off does without)")
