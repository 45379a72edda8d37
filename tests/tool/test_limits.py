"""Everything is bounded, and what was cut says so."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import tool_harness as harness
from hypothesis import given
from hypothesis import strategies as st
from tool_harness import Service, Trajectory, error_of, text_of, texts

from tool_service.action import cut
from tool_service.config import TurnLimits
from turnwire.v1 import tool_pb2


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    limits = {
        "observation_bytes": 1000,
        "media_bytes": 10,
        "action_bytes": 2000,
        "calls_per_turn": 3,
        "data_bytes": 100,
    }
    async with harness.running(harness.config_of(limits=limits)) as running:
        yield running


async def test_a_long_text_is_cut_and_says_how_long_it_was(service: Service) -> None:
    observation = await service.call("trouble", "long")
    assert text_of(observation) == "é" * 500 + "\n[cut: first 1000 of 60000 bytes shown]"
    assert (observation.truncated, observation.full_bytes) == (True, 60000)


async def test_a_client_can_ask_for_less(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("trouble", max_observation_bytes=7, max_calls_per_turn=1)
    answer = await trajectory.act(0, "<trouble>long</trouble><trouble>long</trouble>")
    assert texts(answer)[0] == "ééé\n[cut: first 6 of 60000 bytes shown]"
    assert [error_of(observation) for observation in answer.observations] == ["", "INVALID_ACTION"]
    observation = await service.call("trouble", "long", max_observation_bytes=2)
    assert text_of(observation) == "é\n[cut: first 2 of 60000 bytes shown]"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.call("trouble", "long", max_observation_bytes=1001)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_short_text_is_whole(service: Service) -> None:
    observation = await service.call("noop", "")
    assert (text_of(observation), observation.truncated, observation.full_bytes) == ("ok", False, 2)


async def test_calls_beyond_the_limit_are_answered_but_not_run(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("count")
    answer = await trajectory.act(0, '<count>{"by": 1}</count>' * 5)
    assert texts(answer) == ["1", "2", "3", *["invalid action: not run: a turn has at most 3 calls"] * 2]
    assert texts(await trajectory.act(1, '<count>{"by": 1}</count>')) == ["4"]


async def test_a_giant_action_is_the_agents_mistake_not_the_streams_end(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("noop")
    answer = await trajectory.act(0, "<noop>" + "é" * 1000 + "</noop>")
    assert texts(answer) == ["invalid action: it is 2013 bytes long; at most 2000 are read"]
    assert error_of(answer.observations[0]) == "INVALID_ACTION"
    assert texts(await trajectory.act(1, "<noop></noop>")) == ["ok"]


async def test_media_come_in_order_and_what_does_not_fit_is_named(service: Service) -> None:
    observation = await service.call("trouble", "pictures")
    kinds = [part.WhichOneof("part") for part in observation.content]
    assert kinds == ["text", "image", "text", "text", "text"]
    assert observation.content[1].image.media_type == "image/png"
    assert observation.content[3].text == "[left out: video/mp4 of 11 bytes]"
    assert observation.truncated


@pytest.mark.parametrize(
    ("what", "says"),
    [("bad data", "object is not a JSON value"), ("deep data", "nested"), ("much data", "at most 100 more are sent")],
)
async def test_data_that_cannot_be_sent_is_left_out_with_a_reason(service: Service, what: str, says: str) -> None:
    observation = await service.call("trouble", what)
    assert not observation.HasField("data")
    assert says in observation.error_detail
    assert text_of(observation)


async def test_what_calls_of_a_turn_return_is_bounded_together(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("trouble")
    first, again = (await trajectory.act(0, "<trouble>data</trouble><trouble>data</trouble>")).observations
    assert first.HasField("data")
    assert not again.HasField("data")
    assert f"at most {100 - first.data.ByteSize()} more are sent" in again.error_detail
    assert (await trajectory.act(1, "<trouble>data</trouble>")).observations[0].HasField("data")


def test_an_answer_fits_into_what_clients_take_by_default() -> None:
    limits = TurnLimits()
    answer = limits.calls_per_turn * limits.observation_bytes + limits.data_bytes + limits.media_bytes
    assert answer < 4 * 2**20 - 2**16


async def test_data_is_sent_without_loss(service: Service) -> None:
    data = (await service.call("trouble", "data")).data
    assert (data["big"], data["inf"]) == (str(2**70), "inf")
    assert list(data["list"])[:4] == [1, 1.5, None, True]


async def test_half_a_surrogate_pair_does_not_break_the_stream(service: Service) -> None:
    observation = await service.call("trouble", "surrogate")
    assert text_of(observation) == "half ? a pair"
    assert observation.data["?"] == "?"


@given(st.text(st.characters()), st.integers(1, 50))
def test_cutting_keeps_the_head_and_never_half_a_character(text: str, limit: int) -> None:
    data = text.encode("utf-8", "replace")
    shown, full = cut(text, limit)
    assert full == len(data)
    if full <= limit:
        assert shown.encode() == data
    else:
        head, _, note = shown.rpartition("\n")
        assert data.startswith(head.encode())
        assert limit - 3 <= len(head.encode()) <= limit
        assert note == f"[cut: first {len(head.encode())} of {full} bytes shown]"


async def test_many_calls_in_one_action_are_answered_in_bounded_time(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("noop")
    answer = await trajectory.act(0, "<noop></noop>" * 150)
    assert len(answer.observations) == 150
    assert isinstance(answer, tool_pb2.ObservationTurn)
