"""One stream is one trajectory: the order of its messages, and what each is answered."""

import asyncio
import re
from collections.abc import AsyncIterator

import grpc
import pytest
import tool_harness as harness
from google.protobuf import duration_pb2, struct_pb2
from tool_harness import Service, Trajectory, binding, error_of, nothing_left, texts
from waiting import ENDLESS

from turnwire.v1 import tool_pb2


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with harness.running(harness.config_of()) as running:
        yield running


async def test_a_trajectory_opens_acts_and_closes(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        opened = await trajectory.open("count", "noop")
        assert (opened.resumed, opened.turns_done) == (False, 0)
        assert opened.lease.ToTimedelta().total_seconds() == pytest.approx(0.3)
        first = await trajectory.act(0, 'I add <count>{"by": 2}</count>')
        assert (first.turn, texts(first), first.done) == (0, ["2"], False)
        assert first.elapsed.nanos > 0
        assert first.observations[0].data["number"] == 2
        second = await trajectory.act(1, '<count>{"by": 3}</count> and <noop></noop>')
        assert texts(second) == ["5", "ok"]
        assert [observation.call_id for observation in second.observations] == ["0", "1"]
        assert (await trajectory.close()).turns_done == 2
        assert await trajectory.code() is grpc.StatusCode.OK
        assert await service.sessions() == 0


async def test_closed_means_that_everything_is_released(service: Service) -> None:
    counter = next(tool.tool for tool in service.server.registry.list_tools() if tool.name == "count")
    alive = counter.alive  # type: ignore[attr-defined]
    trajectory = Trajectory(service)
    await trajectory.open("count")
    assert counter.alive == alive + 1  # type: ignore[attr-defined]
    await trajectory.close()
    assert counter.alive == alive  # type: ignore[attr-defined]


async def test_a_text_without_a_call_is_answered_with_no_observation(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("noop")
    assert list((await trajectory.act(0, "I think that the answer is 4")).observations) == []
    assert list((await trajectory.act(1, "")).observations) == []


async def test_structured_calls_keep_their_ids_and_are_checked(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("count", "noop")
    calls = tool_pb2.ToolCalls()
    for tool, arguments, call_id in [
        ("count", {"by": 4}, "a"),
        ("count", {"by": "four"}, "b"),
        ("cuont", {}, "c"),
        ("count", {"by": 1, "extra": 1}, "d"),
        ("count", {"by": 1.5}, "e"),
        ("count", {"by": 1}, ""),
    ]:
        struct = struct_pb2.Struct()
        struct.update(arguments)
        calls.calls.add(tool=tool, arguments=struct, call_id=call_id)
    await trajectory.send(action=tool_pb2.ActionTurn(turn=0, calls=calls))
    answer = (await trajectory.receive()).observation
    assert [observation.call_id for observation in answer.observations] == ["a", "b", "c", "d", "e", "5"]
    assert [error_of(observation) for observation in answer.observations] == ["", *["INVALID_ACTION"] * 4, ""]
    said = texts(answer)
    assert (said[0], said[5]) == ("4", "5")
    assert "`int`" in said[1]
    assert "did you mean 'count'" in said[2]
    assert "unknown argument 'extra'" in said[3]


async def test_observations_are_in_the_order_of_the_calls(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("noop", "sleep", "count")
    text = '<sleep>0.05</sleep><count>{"by": 1}</count><sleep>0.01</sleep><noop></noop><count>{"by": 1}</count>'
    for turn in range(3):
        answer = await trajectory.act(turn, text)
        assert [observation.tool for observation in answer.observations] == ["sleep", "count", "sleep", "noop", "count"]
        assert texts(answer) == ["0.05", str(2 * turn + 1), "0.01", "ok", str(2 * turn + 2)]


async def test_trajectories_share_no_state(service: Service) -> None:
    async def one(number: int) -> list[str]:
        trajectory = Trajectory(service, f"t{number}")
        await trajectory.open(binding("count", {"start": 100 * number}))
        said = [texts(await trajectory.act(turn, '<count>{"by": 1}</count>'))[0] for turn in range(5)]
        await trajectory.close()
        return said

    async with nothing_left(service):
        everything = await asyncio.gather(*(one(number) for number in range(64)))
        for number, said in enumerate(everything):
            assert said == [str(100 * number + turn + 1) for turn in range(5)]


async def test_an_id_can_be_used_again_after_its_close(service: Service) -> None:
    for _ in range(3):
        trajectory = Trajectory(service)
        await trajectory.open("count")
        assert texts(await trajectory.act(0, '<count>{"by": 1}</count>')) == ["1"]
        await trajectory.close()


async def test_a_tool_can_end_the_task_and_later_calls_of_the_turn_do_not_run(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("trouble", "count")
    answer = await trajectory.act(0, '<trouble>done</trouble><count>{"by": 1}</count>')
    assert answer.done
    assert texts(answer) == ["bye", "invalid action: not run: the task was over"]


@pytest.mark.parametrize("what", ["crash", "exhausted", "nothing"])
async def test_a_bug_in_a_tool_is_infra_and_tells_the_agent_nothing(service: Service, what: str) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("trouble", "noop")
    answer = await trajectory.act(0, f"<trouble>{what}</trouble><noop></noop>")
    assert [error_of(observation) for observation in answer.observations] == ["INFRA", ""]
    assert "secret" not in str(answer)
    assert texts(await trajectory.act(1, "<noop></noop>")) == ["ok"]


async def test_a_turn_ends_at_its_own_deadline_and_the_trajectory_goes_on(service: Service) -> None:
    async with nothing_left(service):
        trajectory = Trajectory(service)
        await trajectory.open("sleep", "noop")
        answer = await trajectory.act(
            0, f"<noop></noop><sleep>{ENDLESS}</sleep><noop></noop>", timeout=duration_pb2.Duration(nanos=400_000_000)
        )
        assert [error_of(observation) for observation in answer.observations] == ["", "TIMEOUT", "TIMEOUT"]
        assert re.fullmatch(r"timeout: stopped after 0\.\d+ s", texts(answer)[1]), "what the call before had left of it"
        assert texts(await trajectory.act(1, "<noop></noop>")) == ["ok"]
        await trajectory.close()


async def test_a_turn_without_a_deadline_has_the_trajectorys(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("sleep", turn_timeout=duration_pb2.Duration(nanos=100_000_000))
    assert error_of((await trajectory.act(0, f"<sleep>{ENDLESS}</sleep>")).observations[0]) == "TIMEOUT"


async def test_a_tools_own_timeout_holds_inside_a_longer_turn() -> None:
    async with harness.running(harness.config_of(tools={"sleep": {"timeout_seconds": 0.1}})) as service:
        trajectory = Trajectory(service)
        await trajectory.open("sleep", "noop")
        answer = await trajectory.act(0, f"<sleep>{ENDLESS}</sleep><noop></noop>")
        assert [error_of(observation) for observation in answer.observations] == ["TIMEOUT", ""]
