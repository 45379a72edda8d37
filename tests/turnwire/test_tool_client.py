"""The tool client against a real gRPC server whose servicer is scripted (see scripted_tool_service)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from scripted_tool_service import ScriptedToolService
from waiting import PATIENCE, eventually

import turnwire
from turnwire.client import ToolClient, text_of, tool_call
from turnwire.errors import (
    AlreadyExistsError,
    ConfigError,
    ExhaustedError,
    InfraError,
    InternalError,
    InvalidRequestError,
    Problem,
    UnavailableError,
    WrongOrderError,
)
from turnwire.serving import Server, ServerConfig
from turnwire.v1 import tool_pb2_grpc


class Running:
    def __init__(self, servicer: ScriptedToolService, server: Server) -> None:
        self.script, self.server = servicer, server
        self.address = server.address


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    servicer = ScriptedToolService()
    server = Server(ServerConfig(), ["turnwire.v1.ToolService"])
    tool_pb2_grpc.add_ToolServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    yield Running(servicer, server)
    await server.stop(0)


@pytest.fixture
async def client(running: Running) -> AsyncIterator[ToolClient]:
    async with ToolClient(running.address) as tools:
        yield tools


async def test_turns_are_answered_in_order_and_close_releases_the_session(running: Running, client: ToolClient) -> None:
    async with await client.open("t", ["echo"]) as session:
        for text in ("one", "two"):
            answer = await session.act(text)
            assert text_of(answer.observations[0]) == text
        assert session.turns_done == 2
        assert "t" in running.script.sessions
    assert running.script.sessions == {}


@pytest.mark.parametrize("how", ["drop_before_answer", "end_before_answer", "full_at"])
async def test_a_turn_whose_answer_was_lost_is_sent_again_and_executed_once(
    running: Running, client: ToolClient, how: str
) -> None:
    getattr(running.script, how).add(1)
    async with await client.open("t", ["echo"]) as session:
        texts = [text_of((await session.act(text)).observations[0]) for text in ("one", "two", "three")]
    assert texts == ["one", "two", "three"]
    assert running.script.executed == [("t", 0), ("t", 1), ("t", 2)]
    assert running.script.opens == 2


async def test_a_session_that_is_gone_is_an_infrastructure_failure(running: Running, client: ToolClient) -> None:
    session = await client.open("t", ["echo"])
    await session.act("one")
    running.script.drop_before_answer.add(1)
    running.script.may_answer.clear()
    task = asyncio.create_task(session.act("two"))
    await eventually(lambda: len(running.script.executed) == 2)
    running.script.sessions.clear()
    running.script.may_answer.set()
    with pytest.raises(InfraError, match="is lost: no session t"):
        await task
    with pytest.raises(WrongOrderError):
        await session.act("three")
    await session.close()


async def test_a_dead_service_is_given_up_after_the_lease(running: Running, client: ToolClient) -> None:
    running.script.lease = 0.5
    session = await client.open("t", ["echo"])
    await running.server.stop(0)
    with pytest.raises(InfraError, match="is lost"):
        await asyncio.wait_for(session.act("one"), PATIENCE)
    await session.close()
    await client.close()
    running.server = Server(ServerConfig(), [])  # for the fixture to stop


async def test_a_cancelled_turn_can_be_closed_at_once(running: Running, client: ToolClient) -> None:
    running.script.may_answer.clear()
    async with await client.open("t", ["echo"]) as session:
        turn = asyncio.create_task(session.act("slow"))
        await eventually(lambda: running.script.executed)
        turn.cancel()
        await asyncio.wait([turn])
        with pytest.raises(WrongOrderError):
            await session.act("next")
        running.script.may_answer.set()
    assert running.script.sessions == {}
    assert running.script.opens == 1


async def test_a_turn_cancelled_while_it_was_sent_is_closed_on_another_stream(
    running: Running, client: ToolClient
) -> None:
    for number in range(30):  # whether the stream's end is seen before Close is a matter of luck
        async with await client.open(str(number), ["echo"]) as session:
            turn = asyncio.create_task(session.act("one"))
            await asyncio.sleep(0)  # it is in the write, whose cancellation ends the stream
            turn.cancel()
            await asyncio.wait([turn])
        assert running.script.sessions == {}


async def test_opening_waits_while_the_service_is_full(running: Running, client: ToolClient) -> None:
    running.script.refuse_opens = 2
    async with await client.open("t", ["echo"]):
        pass
    running.script.refuse_opens = 100
    with pytest.raises(ExhaustedError, match="full") as caught:
        await client.open("t", ["echo"], patience=0.3)
    assert caught.value.retry_after == pytest.approx(0.1)


async def test_refusals_are_raised_as_their_classes(running: Running, client: ToolClient) -> None:
    async with await client.open("t", ["echo"]):
        with pytest.raises(AlreadyExistsError):
            await client.open("t", ["echo"])
    with pytest.raises(ConfigError, match=r"tool.yaml: 2 problems") as config:
        await client.list_tools()
    assert config.value.problems == (Problem("tools.python", "is broken"), Problem("sandbox.tier", "too weak"))
    assert config.value.source == "tool.yaml"
    with pytest.raises(InternalError) as internal:
        await client.get_status()
    assert "secret" not in str(internal.value)


async def test_bad_arguments_are_refused_before_anything_is_sent(client: ToolClient) -> None:
    with pytest.raises(InvalidRequestError, match="list of names"):
        await client.open("t", "python")
    with pytest.raises(InvalidRequestError, match="JSON"):
        tool_call("python", code=object())
    with pytest.raises(InvalidRequestError, match="host:port"):
        ToolClient("localhost")
    with pytest.raises(InvalidRequestError, match="either"):
        await client.execute("python")


async def test_an_unreachable_service_is_named() -> None:
    with pytest.raises(UnavailableError, match=r"no tool service answers at 127.0.0.1:1: .*turnwire up"):
        async with turnwire.connect_async(tools="127.0.0.1:1", timeout=0.3):
            pass
    async with ToolClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"tool service at 127.0.0.1:1: "):
            await client.list_tools()


async def test_the_blocking_twin_does_the_same(running: Running) -> None:
    def work() -> list[str]:
        with turnwire.connect(tools=running.address) as there, there.tools.open("t", {"echo": None}) as session:
            texts = [text_of(session.act(text).observations[0]) for text in ("one", "two")]
            with pytest.raises(AlreadyExistsError):
                there.tools.open("t", ["echo"])
            with pytest.raises(InvalidRequestError, match="rollout="):
                _ = there.rollout
            return texts

    assert await asyncio.to_thread(work) == ["one", "two"]
    assert running.script.sessions == {}
