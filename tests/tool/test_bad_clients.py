"""Whatever a client does wrong has a defined status, and leaves nothing behind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import tool_harness as harness
from google.protobuf import duration_pb2
from tool_harness import Service, Trajectory, binding, nothing_left, retry_seconds, texts
from waiting import ENDLESS, eventually

from turnwire.v1 import tool_pb2

Code = grpc.StatusCode


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with harness.running(harness.config_of()) as running:
        yield running


def an_open(**fields: Any) -> tool_pb2.Open:
    values: dict[str, Any] = {"trajectory_id": "t", "session_key": "k", "tools": [binding("noop")]}
    return tool_pb2.Open(**{**values, **fields})


LIMITS = tool_pb2.TrajectoryLimits


@pytest.mark.parametrize(
    ("message", "code", "says"),
    [
        ({"action": tool_pb2.ActionTurn(text="x")}, Code.FAILED_PRECONDITION, "must be Open"),
        ({"close": tool_pb2.Close()}, Code.FAILED_PRECONDITION, "must be Open"),
        ({}, Code.FAILED_PRECONDITION, "must be Open"),
        ({"open": an_open(trajectory_id="")}, Code.INVALID_ARGUMENT, "trajectory_id"),
        ({"open": an_open(trajectory_id="x" * 5000)}, Code.INVALID_ARGUMENT, "trajectory_id"),
        ({"open": an_open(session_key="")}, Code.INVALID_ARGUMENT, "session_key"),
        ({"open": an_open(tools=[])}, Code.INVALID_ARGUMENT, "at least one tool"),
        ({"open": an_open(tools=[binding("noop"), binding("noop")])}, Code.INVALID_ARGUMENT, "twice"),
        ({"open": an_open(tools=[binding("nop")])}, Code.NOT_FOUND, "did you mean 'noop'"),
        ({"open": an_open(tools=[binding("noop", {"a": 1})])}, Code.INVALID_ARGUMENT, "unknown key 'a'"),
        ({"open": an_open(tools=[binding("count", {"start": "x"})])}, Code.INVALID_ARGUMENT, "$.start"),
        ({"open": an_open(tools=[binding("count", {"start": -1})])}, Code.INVALID_ARGUMENT, "$.start"),
        ({"open": an_open(tools=[binding("count", {"nested": {"a": ["b"]}})])}, Code.INVALID_ARGUMENT, "$.nested"),
        ({"open": an_open(tools=[binding("trouble", {"bad": "refuse"})])}, Code.INVALID_ARGUMENT, "refused"),
        ({"open": an_open(tools=[binding("trouble", {"bad": "crash"})])}, Code.INTERNAL, "internal error"),
        ({"open": an_open(turns_done=3)}, Code.NOT_FOUND, "gone"),
        ({"open": an_open(limits=LIMITS(max_observation_bytes=2**30))}, Code.INVALID_ARGUMENT, "allows"),
        ({"open": an_open(limits=LIMITS(max_calls_per_turn=2**30))}, Code.INVALID_ARGUMENT, "allows"),
        (
            {"open": an_open(limits=LIMITS(turn_timeout=duration_pb2.Duration(seconds=10**6)))},
            Code.INVALID_ARGUMENT,
            "allows",
        ),
        (
            {"open": an_open(limits=LIMITS(turn_timeout=duration_pb2.Duration(seconds=-1)))},
            Code.INVALID_ARGUMENT,
            "positive",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_stream_that_begins_wrong(service: Service, message: dict[str, Any], code: Code, says: str) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.send(**message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trajectory.receive()
        assert caught.value.code() is code
        assert says in (caught.value.details() or "")
        assert "secret" not in (caught.value.details() or "")
        assert await service.sessions() == 0


@pytest.mark.parametrize(
    ("message", "code", "says"),
    [
        ({"open": an_open()}, Code.FAILED_PRECONDITION, "one Open"),
        ({"action": tool_pb2.ActionTurn(turn=7, text="x")}, Code.FAILED_PRECONDITION, "the next is 1"),
        ({"action": tool_pb2.ActionTurn(turn=2, text="x")}, Code.FAILED_PRECONDITION, "the next is 1"),
        ({"action": tool_pb2.ActionTurn(turn=1)}, Code.INVALID_ARGUMENT, "neither text nor calls"),
        (
            {"action": tool_pb2.ActionTurn(turn=1, text="x", timeout=duration_pb2.Duration(seconds=-5))},
            Code.INVALID_ARGUMENT,
            "positive",
        ),
        (
            {"action": tool_pb2.ActionTurn(turn=1, text="x", timeout=duration_pb2.Duration())},
            Code.INVALID_ARGUMENT,
            "positive",
        ),
        ({}, Code.INVALID_ARGUMENT, "neither"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_message_that_is_wrong_later_ends_the_stream_and_leaves_the_session(
    service: Service, message: dict[str, Any], code: Code, says: str
) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("noop")
        await trajectory.act(0, "<noop></noop>")
        await trajectory.send(**message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trajectory.receive()
        assert caught.value.code() is code
        assert says in (caught.value.details() or "")
        again = Trajectory(service)
        assert (await again.open("noop", turns_done=1)).resumed
        assert texts(await again.act(1, "<noop></noop>")) == ["ok"]
        await again.close()


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05ab", b"\x00"])
async def test_bytes_that_are_no_message(service: Service, opened: bool, junk: bytes) -> None:
    async with nothing_left(service):
        call = service.channel.stream_stream("/turnwire.v1.ToolService/Interact")()
        if opened:
            await call.write(tool_pb2.InteractRequest(open=an_open()).SerializeToString())
            await call.read()
        await call.write(junk)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is Code.INVALID_ARGUMENT
    async with nothing_left(service):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.channel.unary_unary("/turnwire.v1.ToolService/Execute")(junk)
        assert caught.value.code() is Code.INVALID_ARGUMENT


async def test_a_message_above_the_transports_limit(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("noop")
        with contextlib.suppress(grpc.aio.AioRpcError):
            await trajectory.act(0, "x" * (service.server.config.server.max_message_bytes + 1))
        assert await trajectory.code() is Code.RESOURCE_EXHAUSTED


async def test_the_same_id_under_another_key_is_refused_also_during_the_lease(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("noop")
    for _ in range(2):
        thief = Trajectory(service, key="other")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await thief.open("noop")
        assert caught.value.code() is Code.ALREADY_EXISTS
        trajectory.call.cancel()
        await service.leases(1)


async def test_too_many_sessions_are_refused_with_a_delay() -> None:
    async with harness.running(harness.config_of(sessions={"max_sessions": 4})) as service:
        trajectories = [Trajectory(service, str(number)) for number in range(4)]
        for trajectory in trajectories:
            await trajectory.open("noop")
        for attempt in (Trajectory(service, "5").open("noop"), service.call("noop", "")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await attempt
            assert caught.value.code() is Code.RESOURCE_EXHAUSTED
            assert retry_seconds(caught.value) > 0
        await trajectories[0].close()
        await Trajectory(service, "5").open("noop")


async def test_silence_before_open() -> None:
    async with (
        harness.running(harness.config_of(sessions={"open_timeout_seconds": 0.1})) as service,
        nothing_left(service),
    ):
        trajectory = Trajectory(service)
        assert await trajectory.code() is Code.DEADLINE_EXCEEDED


async def test_silence_between_turns_ends_the_stream_and_releases_the_session() -> None:
    config = harness.config_of(sessions={"idle_timeout_seconds": 0.2, "lease_seconds": ENDLESS})
    async with harness.running(config) as service, nothing_left(service):
        trajectory = Trajectory(service)
        # All at once: what a crowded machine needs between two messages would be silence, too.
        await trajectory.send(open=an_open(tools=[binding("noop"), binding("sleep")]))
        await trajectory.send(action=tool_pb2.ActionTurn(turn=0, text="<sleep>0.5</sleep>"))  # long, but no silence
        assert not (await trajectory.receive()).opened.resumed
        assert texts((await trajectory.receive()).observation) == ["0.5"]
        assert await trajectory.code() is Code.DEADLINE_EXCEEDED
        await eventually(lambda: _sessions(service, 0))


async def _sessions(service: Service, count: int) -> bool:
    return await service.sessions() == count


async def test_a_client_that_never_reads_holds_bounded_memory_and_is_ended_by_the_idle_timeout() -> None:
    config = harness.config_of(sessions={"idle_timeout_seconds": 0.5, "lease_seconds": ENDLESS})
    async with harness.running(config) as service, nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("trouble")

        async def talk() -> None:
            for turn in range(1000):  # each is answered by 60 KB
                await trajectory.send(action=tool_pb2.ActionTurn(turn=turn, text="<trouble>long</trouble>"))

        talking = asyncio.create_task(talk())
        await eventually(lambda: _sessions(service, 0))
        assert (await service.status()).turns_total < 400
        trajectory.call.cancel()
        await asyncio.gather(talking, return_exceptions=True)


@pytest.mark.parametrize("how", ["cancel", "half-close"])
@pytest.mark.parametrize("when", ["before open", "right after open", "after opened", "in mid-turn", "after an answer"])
async def test_a_client_that_goes_away(service: Service, when: str, how: str) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        if when == "right after open":
            await trajectory.send(open=an_open(tools=[binding("noop"), binding("sleep")]))
        elif when != "before open":
            await trajectory.open("noop", "sleep")
        if when == "in mid-turn":
            await trajectory.send(action=tool_pb2.ActionTurn(turn=0, text="<sleep>0.1</sleep>"))
        elif when == "after an answer":
            await trajectory.act(0, "<noop></noop>")
        if how == "cancel":
            trajectory.call.cancel()
            return
        await trajectory.call.done_writing()
        if when == "before open":
            assert await trajectory.code() is Code.INVALID_ARGUMENT
            return
        if when == "right after open":
            await trajectory.receive()
        if when == "in mid-turn":  # the running turn is still answered
            assert texts((await trajectory.receive()).observation) == ["0.1"]
        assert await trajectory.code() is Code.OK


async def test_a_turn_outlives_its_stream_only_as_long_as_the_lease(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("hold")
        await trajectory.send(action=tool_pb2.ActionTurn(turn=0, text="<hold></hold>"))
        await service.runs(1)
        trajectory.call.cancel()
        await service.runs(0)
        assert service.probe("hold").executed == 0


async def test_a_hundred_clients_that_all_go_away_in_mid_turn(service: Service) -> None:
    async with nothing_left(service):
        trajectories = [Trajectory(service, str(number)) for number in range(100)]
        for trajectory in trajectories:
            await trajectory.open("sleep")
            await trajectory.send(action=tool_pb2.ActionTurn(turn=0, text=f"<sleep>{ENDLESS}</sleep>"))
        await service.runs(100)
        for trajectory in trajectories:
            trajectory.call.cancel()
