"""The attached stream of a container, cut wherever a network may cut it: an engine's part is played by bytes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tool_service.sandbox import SandboxUnavailable
from tool_service.sandbox.docker_config import Endpoint
from tool_service.sandbox.docker_stream import AttachedStream, attach

UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n"


class Heard(asyncio.Protocol):
    """What reached the protocol behind."""

    def __init__(self) -> None:
        self.data = b""
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


def frame(stream: int, data: bytes) -> bytes:
    return struct.pack(">B3xI", stream, len(data)) + data


SENT = UPGRADED + frame(1, b"one") + frame(2, b"oops") + frame(1, b"") + frame(1, b"two" * 1000) + frame(2, b"!")


class Engine:
    """Answers each connection with `answer` in pieces of `size` bytes, and closes it."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = Endpoint("test", unix_path=f"{folder}/engine.sock")
        self.answer, self.size = SENT, len(SENT)
        self.request = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request = await reader.readuntil(b"\r\n\r\n")
        for place in range(0, len(self.answer), self.size):
            writer.write(self.answer[place : place + self.size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    made = Engine(tmp_path)
    server = await asyncio.start_unix_server(made.serve, made.endpoint.unix_path)
    yield made
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 100, len(SENT)])
async def test_stdout_arrives_whole_and_alone(engine: Engine, size: int) -> None:
    engine.size = size
    heard, ends = Heard(), []
    stream = await attach(engine.endpoint, "box", heard, lambda: ends.append(1))
    await heard.ended.wait()
    assert heard.data == b"one" + b"two" * 1000
    assert stream.stderr == "oops!"
    assert ends == [1]
    assert engine.request.startswith(b"POST /containers/box/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n")


async def test_what_is_kept_of_stderr_is_bounded(engine: Engine) -> None:
    engine.answer = UPGRADED + frame(2, b"x" * 10**6)
    heard = Heard()
    stream = await attach(engine.endpoint, "box", heard, lambda: None)
    await heard.ended.wait()
    assert len(stream.stderr) == 4096


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n" + b'{"message":"No such container: box"}', "No such container"),
        (b"HTTP/1.1 200 OK", "closed the connection"),
        (b"", "closed the connection"),
    ],
)
async def test_an_engine_that_does_not_attach_is_told(engine: Engine, answer: bytes, reason: str) -> None:
    engine.answer = answer
    with pytest.raises(SandboxUnavailable, match=reason):
        await attach(engine.endpoint, "box", Heard(), lambda: None)


async def test_an_engine_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="failed"):
        await attach(Endpoint("test", unix_path=f"{tmp_path}/none"), "box", Heard(), lambda: None)


async def test_nothing_is_kept_waiting_for_an_engine_that_was_given_up(engine: Engine) -> None:
    stream = AttachedStream("box", "docker", Heard(), lambda: None)
    stream.connection_lost(None)
    with pytest.raises(SandboxUnavailable):
        await stream.attached
