"""What a client may say while its turn runs: Close, which ends the turn at once, or the same turn again."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import tool_harness as harness
from tool_harness import Service, Trajectory, binding, nothing_left, texts
from waiting import ENDLESS

from turnwire.v1 import tool_pb2


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with harness.running(harness.config_of(sessions={"lease_seconds": ENDLESS})) as running:
        yield running


HOLD = "<hold></hold>"
SLEEP = f"<sleep>{ENDLESS}</sleep>"


async def in_mid_turn(service: Service) -> Trajectory:
    """A trajectory with one turn answered, and its next one running until it is let go."""
    trajectory = Trajectory(service)
    await trajectory.open("hold", "sleep", "noop")
    await trajectory.act(0, "<noop></noop>")
    await trajectory.send(action=tool_pb2.ActionTurn(turn=1, text=HOLD))
    await service.runs(1)
    return trajectory


async def test_close_ends_the_running_turn_and_releases_everything_at_once(service: Service) -> None:
    async with nothing_left(service):
        trajectory = await in_mid_turn(service)
        assert (await trajectory.close()).turns_done == 1
        status = await service.status()
        assert (status.sessions_open, status.sessions_leased, status.turns_running, status.turns_total) == (0, 0, 0, 1)
        again = Trajectory(service)
        assert not (await again.open("noop")).resumed
        await again.close()


async def test_close_right_behind_the_action(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("sleep")
        await trajectory.send(action=tool_pb2.ActionTurn(turn=0, text=SLEEP))
        assert (await trajectory.close()).turns_done == 0


async def test_close_in_mid_turn_on_the_stream_that_took_over(service: Service) -> None:
    async with nothing_left(service):
        await in_mid_turn(service)
        again = Trajectory(service)
        assert (await again.open("hold", "sleep", "noop", turns_done=1)).resumed
        await again.send(action=tool_pb2.ActionTurn(turn=1, text=HOLD))
        assert (await again.close()).turns_done == 1


@pytest.mark.parametrize(
    ("message", "code", "says"),
    [
        ({"action": tool_pb2.ActionTurn(turn=2, text="x")}, grpc.StatusCode.FAILED_PRECONDITION, "turn 1 is running"),
        ({"action": tool_pb2.ActionTurn(turn=0, text="x")}, grpc.StatusCode.FAILED_PRECONDITION, "turn 1 is running"),
        (
            {"open": tool_pb2.Open(trajectory_id="t", session_key="k", tools=[binding("noop")])},
            grpc.StatusCode.FAILED_PRECONDITION,
            "one Open",
        ),
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "neither"),
    ],
    ids=["next turn", "last turn", "open", "nothing"],
)
async def test_another_message_is_refused_at_once_and_the_turn_goes_on(
    service: Service, message: dict[str, Any], code: grpc.StatusCode, says: str
) -> None:
    async with nothing_left(service):
        trajectory = await in_mid_turn(service)
        await trajectory.send(**message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trajectory.receive()
        assert (caught.value.code(), says in (caught.value.details() or "")) == (code, True)
        assert (await service.status()).turns_running == 1
        again = Trajectory(service)
        await again.open("hold", "sleep", "noop", turns_done=1)
        service.probe("hold").let_go.set()
        assert texts(await again.act(1, HOLD)) == ["let go"]
        assert (await service.status()).turns_total == 2
        await again.close()


async def test_bytes_that_are_no_message_are_refused_at_once(service: Service) -> None:
    async with nothing_left(service):
        call = service.channel.stream_stream("/turnwire.v1.ToolService/Interact")()
        opening = tool_pb2.Open(trajectory_id="t", session_key="k", tools=[binding("sleep")])
        await call.write(tool_pb2.InteractRequest(open=opening).SerializeToString())
        await call.read()
        action = tool_pb2.ActionTurn(turn=0, text=SLEEP)
        await call.write(tool_pb2.InteractRequest(action=action).SerializeToString())
        await service.runs(1)
        await call.write(b"\xff\xff\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        again = Trajectory(service)
        assert (await again.open("sleep")).resumed
        await again.close()


async def test_the_running_turn_again_is_executed_once_and_answered_as_often_as_asked(service: Service) -> None:
    async with nothing_left(service):
        trajectory = await in_mid_turn(service)
        for _ in range(2):
            await trajectory.send(action=tool_pb2.ActionTurn(turn=1, text=HOLD))
        await service.status()  # behind them
        service.probe("hold").let_go.set()
        answers = [(await trajectory.receive()).observation for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert texts(answers[0]) == ["let go"]
        assert texts(await trajectory.act(2, "<noop></noop>")) == ["ok"]  # what was read beside the turn is not lost
        await trajectory.send(action=tool_pb2.ActionTurn(turn=3, text=SLEEP))
        await trajectory.send(action=tool_pb2.ActionTurn(turn=3, text=SLEEP))
        assert (await trajectory.close()).turns_done == 3
    assert service.probe("hold").executed == 1
