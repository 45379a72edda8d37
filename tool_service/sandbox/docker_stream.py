"""A container's stdin and stdout as one asyncio transport, through the engine's `attach`.

The engine takes the connection over (HTTP 101) and then carries stdin raw one way, and the other way stdout and stderr
in frames of 8 bytes (`stream, 0, 0, 0, u32 length`) and their bytes. The protocol behind sees stdout's bytes alone.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from tool_service.sandbox.base import SandboxUnavailable
from tool_service.sandbox.docker_config import Endpoint

_HEADER = 8
_STDOUT = 1
_ERROR_BYTES = 4096
_ATTACH_SECONDS = 15.0
_MOST_HEAD_BYTES = 16384


class AttachedStream(asyncio.Protocol):
    """Takes the connection over, then feeds `protocol` with what the container writes to stdout. `on_end` is called
    when the connection ends after that, by whichever side."""

    def __init__(self, container: str, host: str, protocol: asyncio.Protocol, on_end: Callable[[], None]) -> None:
        self._protocol = protocol
        self._on_end = on_end
        self._request = (
            f"POST /containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n"
            f"Host: {host}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
        ).encode()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._left = 0
        """Bytes still to come of the frame that has begun."""
        self._stream = 0
        self._stderr = bytearray()
        self.attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is taken over, or with the reason why not."""

    @property
    def stderr(self) -> str:
        """The first of what the container wrote to stderr: why it did not start."""
        return self._stderr.decode("utf-8", "replace").strip()

    def write(self, data: bytes) -> None:
        """To the container's stdin; also before it runs."""
        if self._transport is not None:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.attached.done():
            self._demultiplex(data)
            return
        self._buffer += data
        head, end, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not end and len(head) <= _MOST_HEAD_BYTES:
            return
        self._buffer.clear()
        status = head.split(b"\r\n", 1)[0].decode("latin-1")
        if " 101 " not in status + " " or self._transport is None:
            text = rest.decode("utf-8", "replace").strip()
            self.attached.set_exception(SandboxUnavailable(f"the engine refused to attach: {status} {text}"))
            return
        self.attached.set_result(None)
        self._protocol.connection_made(self._transport)
        if rest:
            self._demultiplex(rest)

    def _demultiplex(self, data: bytes) -> None:
        if self._buffer:
            data = bytes(self._buffer) + data
            self._buffer.clear()
        place, end = 0, len(data)
        while place < end:
            if not self._left:
                if end - place < _HEADER:
                    self._buffer += data[place:]
                    return
                self._stream = data[place]
                self._left = int.from_bytes(data[place + 4 : place + _HEADER], "big")
                place += _HEADER
            part = data[place : place + self._left]
            place += len(part)
            self._left -= len(part)
            if self._stream == _STDOUT and part:
                self._protocol.data_received(part)
            elif part:
                self._stderr += part[: _ERROR_BYTES - len(self._stderr)]

    def eof_received(self) -> None:
        """The container has ended. What it has not read of its stdin nobody will: without this the transport would wait
        for that to be sent."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.attached.done():
            self._protocol.connection_lost(exc)
            self._on_end()
        else:
            self.attached.set_exception(SandboxUnavailable(f"the engine closed the connection: {exc or 'no reason'}"))


async def attach(
    endpoint: Endpoint, container: str, protocol: asyncio.Protocol, on_end: Callable[[], None]
) -> AttachedStream:
    """Connect `protocol` to a container that has been created and not yet started. Raises `SandboxUnavailable`."""
    loop = asyncio.get_running_loop()
    stream = AttachedStream(container, endpoint.host or "docker", protocol, on_end)
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(_ATTACH_SECONDS):
            if endpoint.unix_path:
                transport, _ = await loop.create_unix_connection(lambda: stream, endpoint.unix_path)
            else:
                transport, _ = await loop.create_connection(
                    lambda: stream, endpoint.host, endpoint.port, ssl=endpoint.ssl_context()
                )
            await stream.attached
    except BaseException as error:
        if transport is not None:
            cast(asyncio.Transport, transport).abort()
        if isinstance(error, TimeoutError | OSError):
            raise SandboxUnavailable(f"attaching to a container at {endpoint.url} failed: {error}") from error
        raise
    return stream
