"""A stream that breaks does not break its trajectory: turns are executed once and answered the same."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import tool_harness as harness
from tool_harness import Service, Trajectory, nothing_left, texts
from waiting import ENDLESS, eventually

from turnwire.v1 import tool_pb2

Code = grpc.StatusCode
ADD = '<count>{"by": 1}</count>'
HOLD = "<hold></hold>"


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """With a lease that lasts: a session that is released is released by what a test does."""
    async with harness.running(harness.config_of(sessions={"lease_seconds": ENDLESS})) as running:
        yield running


@pytest.fixture
async def short_lease() -> AsyncIterator[Service]:
    async with harness.running(harness.config_of(sessions={"lease_seconds": 1.0})) as running:
        yield running


async def test_a_repeated_turn_is_executed_once_and_answered_the_same(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("count")
    first = await trajectory.act(0, ADD)
    assert await trajectory.act(0, ADD) == first
    assert await trajectory.act(0, "something else") == first
    assert texts(await trajectory.act(1, ADD)) == ["2"]


async def test_a_client_takes_its_trajectory_up_again_within_the_lease(short_lease: Service) -> None:
    async with nothing_left(short_lease):
        trajectory = Trajectory(short_lease)
        await trajectory.open("count")
        first = await trajectory.act(0, ADD)
        trajectory.call.cancel()
        await short_lease.leases(1)
        again = Trajectory(short_lease)
        opened = await again.open("count", turns_done=1)
        assert (opened.resumed, opened.turns_done) == (True, 1)
        assert await again.act(0, ADD) == first
        await asyncio.sleep(1.2)  # the old lease does not end the session that was taken up again
        assert texts(await again.act(1, ADD)) == ["2"]
        await again.close()


async def test_after_the_lease_the_session_is_gone(short_lease: Service) -> None:
    async with nothing_left(short_lease):
        trajectory = Trajectory(short_lease)
        await trajectory.open("count")
        await trajectory.act(0, ADD)
        trajectory.call.cancel()
        await eventually(lambda: _released(short_lease))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Trajectory(short_lease).open("count", turns_done=1)
        assert caught.value.code() is Code.NOT_FOUND
        fresh = Trajectory(short_lease)
        assert not (await fresh.open("count")).resumed
        assert texts(await fresh.act(0, ADD)) == ["1"]
        await fresh.close()


async def _released(service: Service) -> bool:
    return await service.sessions() == 0


async def test_a_turn_that_was_running_when_the_stream_broke_is_answered_to_the_next(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("hold")
        await trajectory.send(action=tool_pb2.ActionTurn(turn=0, text=HOLD))
        await service.runs(1)
        trajectory.call.cancel()
        again = Trajectory(service)
        assert (await again.open("hold")).turns_done == 0
        service.probe("hold").let_go.set()
        assert texts(await again.act(0, HOLD)) == ["let go"]
        await again.close()
    assert service.probe("hold").executed == 1


async def test_a_turn_that_ended_while_nobody_was_there_is_answered_later(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("hold")
    await trajectory.send(action=tool_pb2.ActionTurn(turn=0, text=HOLD))
    await service.runs(1)
    trajectory.call.cancel()
    await service.leases(1)
    service.probe("hold").let_go.set()
    await service.runs(0)
    again = Trajectory(service)
    assert (await again.open("hold")).turns_done == 1
    assert texts(await again.act(0, HOLD)) == ["let go"]


@pytest.mark.parametrize("in_mid_turn", [False, True])
async def test_a_new_stream_takes_over_from_a_living_one(service: Service, in_mid_turn: bool) -> None:
    async with nothing_left(service):
        old = Trajectory(service)
        await old.open("hold")
        if in_mid_turn:
            await old.send(action=tool_pb2.ActionTurn(turn=0, text=HOLD))
            await service.runs(1)
        new = Trajectory(service)
        assert (await new.open("hold")).resumed
        assert await old.code() is Code.ABORTED
        service.probe("hold").let_go.set()
        assert texts(await new.act(0, HOLD)) == ["let go"]
        await new.close()


async def test_streams_that_take_over_from_each_other_all_at_once_leave_one(service: Service) -> None:
    async with nothing_left(service):
        streams = [Trajectory(service) for _ in range(20)]
        results = await asyncio.gather(*(stream.open("count") for stream in streams), return_exceptions=True)
        ended = [stream for stream in streams if stream.call.done()]
        assert all(
            isinstance(result, tool_pb2.Opened)
            or (isinstance(result, grpc.aio.AioRpcError) and result.code() is Code.ABORTED)
            for result in results
        )
        await eventually(lambda: sum(stream.call.done() for stream in streams) == 19)
        assert all([await stream.code() is Code.ABORTED for stream in ended])
        (alive,) = [stream for stream in streams if not stream.call.done()]
        assert texts(await alive.act(0, ADD)) == ["1"]
        await alive.close()


async def test_a_client_that_claims_answers_it_never_had_is_refused(service: Service) -> None:
    await Trajectory(service).open("count")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Trajectory(service).open("count", turns_done=1)
    assert caught.value.code() is Code.FAILED_PRECONDITION


async def test_other_tools_at_a_reconnection_are_refused(service: Service) -> None:
    await Trajectory(service).open("count")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Trajectory(service).open("noop")
    assert caught.value.code() is Code.FAILED_PRECONDITION
