"""One client that takes too much is refused, and told when to come back; the others are served."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from certificates import add_token, client, make, serving, tls
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import PATIENCE, eventually

from turnwire.client import ConnectionSecurity, ToolClient, TrainerClient, open_channel
from turnwire.errors import ExhaustedError, UnavailableError
from turnwire.security.config import QuotasConfig
from turnwire.serving import ServerConfig
from turnwire.v1 import tool_pb2, tool_pb2_grpc


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("certificates"))
    for name in ("one", "other"):
        add_token(folder, name, "tool")
    return folder


def security(folder: Path, name: str) -> ConnectionSecurity:
    """Tokens tell clients apart; on loopback they need no TLS."""
    return ConnectionSecurity(token_file=str(folder / f"{name}.token"))


def quotas(folder: Path, **values: Any) -> ServerConfig:
    return ServerConfig(tokens=str(folder / "tokens.yaml"), quotas=QuotasConfig(**values))


async def opened(tools: ToolClient) -> Any:
    """An Interact stream that stays open."""
    stream = tool_pb2_grpc.ToolServiceStub(tools.channel).Interact()
    await stream.write(tool_pb2.InteractRequest())
    assert (await stream.read()).HasField("opened")
    return stream


async def test_a_client_has_so_many_calls_in_flight_and_others_have_their_own(made: Path) -> None:
    async with (
        serving(quotas(made, streams=3)) as server,
        ToolClient(server.address, security(made, "one")) as one,
        ToolClient(server.address, security(made, "one")) as the_same,
        ToolClient(server.address, security(made, "other")) as other,
    ):
        streams = [await opened(one) for _ in range(3)]
        with pytest.raises(ExhaustedError, match="one has 3 calls in flight") as caught:
            await the_same.get_status()
        assert caught.value.retry_after is not None
        await other.get_status()
        await opened(other)
        await streams[0].done_writing()
        assert await streams[0].read() is grpc.aio.EOF
        await the_same.get_status()


async def test_calls_that_end_in_any_way_are_given_back(made: Path) -> None:
    async with (
        serving(quotas(made, streams=2)) as server,
        ToolClient(server.address, security(made, "one")) as tools,
    ):
        for _ in range(20):
            stream = await opened(tools)
            stream.cancel()
            await asyncio.wait([asyncio.ensure_future(stream.code())])
        await eventually(lambda: not server._gate._running)  # a cancelled call ends at the server a little later
        assert server._gate._quotas._clients == {}
        await tools.get_status()


async def test_a_client_that_calls_too_often_is_told_when_to_come_back(made: Path) -> None:
    async with (
        serving(quotas(made, requests_per_second=0.01, burst=4)) as server,
        ToolClient(server.address, security(made, "one")) as one,
        ToolClient(server.address, security(made, "other")) as other,
    ):
        for _ in range(4):
            await one.get_status()
        with pytest.raises(ExhaustedError, match=r"one calls more often than 0\.01 times a second") as caught:
            await one.get_status()
        assert caught.value.retry_after == pytest.approx(100, rel=0.1)
        await other.get_status()
        assert await one.is_healthy(), "who asks for health is not counted"


async def test_a_rate_lets_calls_begin_again_with_time(made: Path) -> None:
    async with (
        serving(quotas(made, requests_per_second=2, burst=1)) as server,
        ToolClient(server.address, security(made, "one")) as tools,
    ):
        answers = await asyncio.gather(*(tools.get_status() for _ in range(3)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, ExhaustedError)]
        assert refused
        await asyncio.sleep(max(error.retry_after or 0 for error in refused))
        await tools.get_status()


async def test_without_tokens_a_client_is_a_certificate(made: Path, tmp_path: Path) -> None:
    folder = make(Path(shutil.copytree(made, tmp_path / "certificates")), "second")
    config = ServerConfig(tls=tls(folder), quotas=QuotasConfig(streams=1))
    second = client(folder, certificate=str(folder / "second.crt"), key=str(folder / "second.key"))
    async with (
        serving(config) as server,
        ToolClient(server.address, client(folder)) as first,
        ToolClient(server.address, second) as other,
    ):
        await opened(first)
        with pytest.raises(ExhaustedError, match="certificate client has 1 calls"):
            await first.get_status()
        await other.get_status()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_without_either_a_client_is_a_host(host: str) -> None:
    async with (
        serving(ServerConfig(host=host, quotas=QuotasConfig(streams=1))) as server,
        ToolClient(server.address) as first,
        ToolClient(server.address) as same_host,
    ):
        await opened(first)
        with pytest.raises(ExhaustedError, match=rf"host \[?{host}\]? has 1 calls"):
            await same_host.get_status()


async def test_ten_thousand_idle_streams_of_one_client_leave_room_for_others(made: Path) -> None:
    held = 4096 * 15 // 16  # what the default limits leave to one client
    ended: list[grpc.StatusCode] = []

    async def idle(stub: Any) -> None:
        ended.append(await stub.Interact().code())

    async with (
        serving(quotas(made)) as server,
        open_channel(server.address, security(made, "one")) as channel,
        ToolClient(server.address, security(made, "other")) as other,
    ):
        stub: Any = tool_pb2_grpc.ToolServiceStub(channel)
        streams = [asyncio.create_task(idle(stub)) for _ in range(10_000)]
        while len(ended) < 10_000 - held:
            await other.get_status()
            assert await other.is_healthy()
            await asyncio.sleep(0.05)
        stream = await opened(other)
        assert ended == [grpc.StatusCode.RESOURCE_EXHAUSTED] * (10_000 - held)
        stream.cancel()
        for task in streams:
            task.cancel()


async def test_streams_that_watch_health_are_counted_without_a_token_being_asked_for(made: Path) -> None:
    async with (
        serving(quotas(made, streams=2)) as server,
        open_channel(server.address) as channel,
        ToolClient(server.address, security(made, "one")) as one,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        third = health.Watch(health_pb2.HealthCheckRequest())
        assert await third.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await one.get_status()


@pytest.mark.parametrize("token", ["one", None])
async def test_a_message_above_the_limit_is_refused_and_the_connection_goes_on(made: Path, token: str | None) -> None:
    config = ServerConfig(tokens=None if token is None else str(made / "tokens.yaml"), max_message_bytes=65536)
    how = ConnectionSecurity() if token is None else security(made, token)
    async with (
        serving(config) as server,
        ToolClient(server.address, how) as tools,
        ToolClient(server.address, how) as other,
    ):
        idle = await opened(tools)
        for _ in range(3):
            with pytest.raises(ExhaustedError, match="larger than max"):
                await tools.execute("python", "x" * 1_000_000)
        stream = await opened(tools)
        await stream.write(tool_pb2.InteractRequest(action=tool_pb2.ActionTurn(text="x" * 1_000_000)))
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await other.get_status()
        await tools.get_status()
        await idle.write(tool_pb2.InteractRequest())
        assert (await idle.read()).HasField("opened")


async def drained(tools: ToolClient) -> None:
    """Wait until the service says that it begins nothing new."""
    while await tools.is_healthy():
        pass


async def test_a_draining_service_says_when_to_come_back_serves_who_looks_and_ends_with_the_last_call(
    made: Path,
) -> None:
    config = ServerConfig(tokens=str(made / "tokens.yaml"), drain_seconds=60)
    async with (
        serving(config) as server,
        ToolClient(server.address, security(made, "one")) as tools,
        TrainerClient(server.address, ConnectionSecurity(token_file=str(made / "admin.token"))) as trainer,
    ):
        stream = await opened(tools)
        stopping = asyncio.create_task(server.stop())
        await drained(tools)
        raw: Any = tools.channel.stream_stream("/turnwire.v1.ToolService/Interact")()  # streams are not retried
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert ("grpc-retry-pushback-ms", "2000") in list(caught.value.trailing_metadata())
        with pytest.raises(UnavailableError, match="draining") as refused:
            await tools.open("mine", ["python"], patience=0.5)
        assert refused.value.retry_after == 2.0
        assert (await trainer.get_run("mine")).run_id == "mine"
        await stream.write(tool_pb2.InteractRequest())
        assert (await stream.read()).HasField("opened")
        assert not stopping.done()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, PATIENCE)


async def test_a_call_that_a_draining_service_refuses_is_served_by_the_one_that_comes_after(made: Path) -> None:
    async with serving(quotas(made)) as first, ToolClient(first.address, security(made, "one")) as tools:
        await tools.get_status()
        idle = await opened(tools)
        stopping = asyncio.create_task(first.stop(60))
        await drained(tools)
        calls = [asyncio.create_task(tools.execute("python", "1")) for _ in range(20)]
        await asyncio.sleep(0)
        idle.cancel()
        await stopping
        again = ServerConfig(port=first.port, tokens=str(made / "tokens.yaml"))
        async with serving(again):
            assert len(await asyncio.gather(*calls)) == 20
