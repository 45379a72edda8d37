"""Whatever a client of the rollout service does wrong has a defined status, leaves nothing behind, and harms nobody."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from bad_requests import INVALID, ORDER, an_update, ids, named
from calls import outcome
from google.protobuf import duration_pb2
from rollout_harness import Running, nothing_left, reason, refused, rollouts
from tiny_models import TINY, make_model

from turnwire.client.rollout import rollout_task
from turnwire.v1 import common_pb2 as common
from turnwire.v1 import rollout_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

Code = grpc.StatusCode

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["RolloutService"].methods}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One service for all of them: who comes after a bad client finds it whole."""
    folder = make_model(tmp_path_factory.mktemp("model"), template=TINY)
    async with rollouts(folder, update_idle_seconds=1) as service:
        yield service


def raw(running: Running, name: str, *messages: bytes) -> Any:
    """Call a method with bytes as they are."""
    method = METHODS[name]
    kinds = ("stream" if flag else "unary" for flag in (method.client_streaming, method.server_streaming))
    call = getattr(running.client.channel, "_".join(kinds))(f"/turnwire.v1.RolloutService/{name}")
    return call(iter(messages)) if method.client_streaming else call(*messages)


# -- bytes and empty messages


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05ab"], ids=repr)
@pytest.mark.parametrize("name", METHODS)
async def test_bytes_that_are_no_message(running: Running, name: str, junk: bytes) -> None:
    await refused(running, raw(running, name, junk), INVALID, "not a message of this method")


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"Pause"}))  # which others would feel; see below
async def test_an_empty_message(running: Running, name: str) -> None:
    code, says = {
        "Rollout": (INVALID, "neither a task nor"),
        "Generate": (INVALID, "DATA_TYPE_UNSPECIFIED"),
        "UpdateWeights": (ORDER, "must be a WeightUpdate"),
    }.get(name, (Code.OK, ""))
    await refused(running, raw(running, name, b""), code, says)


@pytest.mark.parametrize(("name", "code"), [("Rollout", Code.OK), ("UpdateWeights", ORDER)])
async def test_a_stream_without_a_message(running: Running, name: str, code: Code) -> None:
    await refused(running, raw(running, name), code, "")


@pytest.mark.parametrize("name", METHODS)
async def test_a_message_above_the_transports_limit(running: Running, name: str) -> None:
    size = running.service._config.server.max_message_bytes + 1
    message = b"\xfa\x7f" + b"\x80\x80\x80\x08" + b"x" * size  # an unknown field: every method's message may hold it
    await refused(running, raw(running, name, message), Code.RESOURCE_EXHAUSTED, "")


async def test_text_that_is_not_utf8(running: Running) -> None:
    task = rollout_task("name", "q").SerializeToString().replace(b"name", b"\xff\xfe\xfd\xfc")
    message = b"\x0a" + bytes([len(task)]) + task
    await refused(running, raw(running, "Rollout", message), INVALID, "not a message of this method")


# -- tasks


def a_task(**fields: Any) -> pb.RolloutTask:
    task = rollout_task("bad", "q", ["echo"])
    for name in fields:
        task.ClearField(name)  # type: ignore[arg-type]
    task.MergeFrom(pb.RolloutTask(**fields))
    return task


def said(text: str, role: str = "user", count: int = 1) -> list[pb.ChatMessage]:
    return [pb.ChatMessage(role=role, content=[common.ContentPart(text=text)])] * count


SAMPLING, LIMITS, SECONDS = common.SamplingParams, pb.RolloutLimits, duration_pb2.Duration
IMAGE = common.ContentPart(image=common.MediaPart(data=b"x", media_type="image/png"))
VIDEO = common.ContentPart(video=common.MediaPart(data=b"x", media_type="video/mp4"))

BAD_TASKS: list[tuple[dict[str, Any], str]] = [
    ({"trajectory_id": ""}, "trajectory_id is empty"),
    ({"trajectory_id": "x" * 100_000}, "trajectory_id has 100000 bytes"),
    ({"messages": []}, "no messages"),
    ({"messages": said("q", "wizard")}, "unknown role 'wizard'"),
    ({"messages": said("q", "")}, "unknown role ''"),
    ({"messages": [pb.ChatMessage(role="user", content=[VIDEO])]}, "content holds video"),
    ({"messages": [pb.ChatMessage(role="user", content=[common.ContentPart()])]}, "an unknown part"),
    ({"tools": [common.ToolBinding(name="echo")] * 2}, "bound twice"),
    ({"final_answer": pb.FinalAnswer(open="<a>")}, "both open and close"),
    ({"final_answer": pb.FinalAnswer(open="<a>", close="x" * 5000)}, "final_answer may have 1024 bytes"),
    ({"metadata": {"big": "x" * 2**21}}, "metadata has"),
    *(
        ({"sampling": SAMPLING(temperature=value)}, "temperature is")
        for value in (-1.0, 1e-9, 1000.0, math.nan, math.inf, -math.inf)
    ),
    *(({"sampling": SAMPLING(top_p=value)}, "top_p is") for value in (-0.5, 0.0, 1.5, math.nan, math.inf)),
    *(
        ({"limits": LIMITS(**{name: SECONDS(seconds=seconds)})}, f"{name} is")
        for name in ("tool_timeout", "trajectory_timeout")
        for seconds in (0, -5, 2**62)
    ),
]


@pytest.mark.parametrize(("fields", "says"), named(BAD_TASKS))
async def test_a_task_that_cannot_be_ends_its_stream(running: Running, fields: dict[str, Any], says: str) -> None:
    good = rollout_task("good", "q", ["echo"])
    call = running.client._stub.Rollout(iter([pb.RolloutRequest(task=task) for task in (good, a_task(**fields))]))
    await refused(running, call, INVALID, says)


@pytest.mark.parametrize(
    ("fields", "why"),
    named(
        [
            ({"messages": said("word " * 200_000)}, "cannot fit into 256 tokens"),
            ({"messages": said("", count=1000)}, "cannot fit into 256 tokens"),
            ({"messages": [pb.ChatMessage(role="user", content=[IMAGE])]}, "reads text only: use engine.kind vllm"),
            ({"tools": [common.ToolBinding(name="ecko")]}, "did you mean 'echo'"),
            ({"tools": [common.ToolBinding(name="x" * 100_000)]}, "unknown tool"),
        ]
    ),
)
async def test_a_task_that_is_refused_leaves_the_others_alone(
    running: Running, fields: dict[str, Any], why: str
) -> None:
    async with nothing_left(running):
        good = rollout_task("good", "q", ["echo"])
        ended = {}
        async for event in running.client.run([a_task(**fields, metadata={"n": 1}), good]):
            if isinstance(event, pb.Trajectory):
                ended[event.trajectory_id] = event
        assert reason(ended["bad"]) == "INVALID_TASK"
        assert why in ended["bad"].error
        assert ended["bad"].metadata["n"] == 1
        assert reason(ended["good"]) not in ("INVALID_TASK", "INFRA_ERROR", "CANCELLED")


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SAMPLING(seed=0)},
        {"sampling": SAMPLING(seed=2**64 - 1)},
        {"sampling": SAMPLING(top_k=2**32 - 1)},
        {"sampling": SAMPLING(top_p=1e-300)},
        {"limits": LIMITS(max_turns=2**32 - 1, max_action_tokens=2**32 - 1, max_observation_tokens=2**32 - 1)},
        {"limits": LIMITS(max_trajectory_tokens=2**32 - 1)},
        {"limits": LIMITS(max_trajectory_tokens=1)},
        {"limits": LIMITS(tool_timeout=SECONDS(nanos=1))},
        {"messages": said("word " * 300)},
        {"messages": said("")},
        {"messages": said("\0\ud7ff\uffff")},
        {"trajectory_id": "../\0#/\u202e" * 50},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_values_at_the_edge_are_taken(running: Running, fields: dict[str, Any]) -> None:
    async with nothing_left(running):
        (trajectory,) = [e async for e in running.client.run([a_task(**fields)]) if isinstance(e, pb.Trajectory)]
        assert reason(trajectory) not in ("INVALID_TASK", "INFRA_ERROR", "CANCELLED")


# -- scores


async def test_too_much_to_score(running: Running) -> None:
    request = pb.ScoreRequest(sequences=[ids(*[5] * 200)] * 6000)
    await refused(running, running.client._stub.Score(request), Code.RESOURCE_EXHAUSTED, "at most 1048576 tokens")


# -- weights and control


@pytest.mark.parametrize("what", ["", "\0", "nowhere", "folder", "pipe", "empty", "junk"])
async def test_weights_from_what_is_no_file(running: Running, tmp_path: Path, what: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "junk").write_bytes(b"\xff" * 1000)
    update = pb.WeightUpdate(version=1, file=pb.FileSource(path=what and f"{tmp_path}/{what}"))
    call = running.client._stub.UpdateWeights(iter([pb.UpdateWeightsRequest(update=update)]))
    await refused(running, call, INVALID, "cannot be read as a safetensors file")


@pytest.mark.parametrize("messages", [0, 1, 2])
async def test_an_update_that_falls_silent_holds_up_others_only_so_long(running: Running, messages: int) -> None:
    before = await running.client.get_weight_info()
    async with nothing_left(running):
        call = running.client._stub.UpdateWeights()
        for request in an_update(running.engine._runner.weights)[:messages]:
            await call.write(request)
        code, details = await outcome(call)
        assert (code, "update_idle_seconds" in details) == (Code.DEADLINE_EXCEEDED, True)
    assert await running.client.get_weight_info() == before


@pytest.mark.parametrize("messages", [0, 1, 2])
async def test_an_update_that_is_abandoned(running: Running, messages: int) -> None:
    before = await running.client.get_weight_info()
    async with nothing_left(running):
        call = running.client._stub.UpdateWeights()
        for request in an_update(running.engine._runner.weights)[:messages]:
            await call.write(request)
        call.cancel()
    assert await running.client.get_weight_info() == before
    requests = an_update(running.engine._runner.weights, "a wrong checksum")
    code = await running.client._stub.UpdateWeights(iter(requests)).code()
    assert code is INVALID  # and not RESOURCE_EXHAUSTED: the one before is gone


async def test_pausing_twice_and_resuming_without_a_pause(running: Running) -> None:
    async with nothing_left(running):
        await running.client.resume()
        await running.client.pause()
        await running.client.pause()
        assert (await running.client.get_server_info()).paused
        await running.client.resume()
        assert not (await running.client.get_server_info()).paused
