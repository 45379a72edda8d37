"""Whatever a client of the rollout service does wrong has a defined status, leaves nothing behind, and harms nobody."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from calls import outcome
from google.protobuf import duration_pb2
from rollout_harness import Running, nothing_left, reason, rollouts
from tiny_models import TINY, make_model

from turnwire.client.rollout import rollout_task
from turnwire.tensors import to_tensor
from turnwire.torch_weights import specs_of, weight_tensors
from turnwire.v1 import common_pb2 as common
from turnwire.v1 import rollout_pb2 as pb
from turnwire.weights import chunks

pytestmark = pytest.mark.asyncio(loop_scope="module")

Code = grpc.StatusCode
INVALID, ORDER = Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["RolloutService"].methods}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One service for all of them: who comes after a bad client finds it whole."""
    folder = make_model(tmp_path_factory.mktemp("model"), template=TINY)
    async with rollouts(folder, update_idle_seconds=0.3) as service:
        yield service


def raw(running: Running, name: str, *messages: bytes) -> Any:
    """Call a method with bytes as they are."""
    method = METHODS[name]
    kinds = ("stream" if flag else "unary" for flag in (method.client_streaming, method.server_streaming))
    call = getattr(running.client.channel, "_".join(kinds))(f"/turnwire.v1.RolloutService/{name}")
    return call(iter(messages)) if method.client_streaming else call(*messages)


async def refused(running: Running, call: Any, code: Code, says: str) -> None:
    """The call ends with this status, which says this and is cut to what a header may hold."""
    async with nothing_left(running):
        found, details = await outcome(call)
        assert (found, says if says in details else details) == (code, says)
        assert len(details.encode()) <= 1200


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

BAD_TASKS: list[tuple[dict[str, Any], str]] = [
    ({"trajectory_id": ""}, "trajectory_id is empty"),
    ({"trajectory_id": "x" * 100_000}, "trajectory_id has 100000 bytes"),
    ({"messages": []}, "no messages"),
    ({"messages": said("q", "wizard")}, "unknown role 'wizard'"),
    ({"messages": said("q", "")}, "unknown role ''"),
    ({"messages": [pb.ChatMessage(role="user", content=[IMAGE])]}, "reads text only"),
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


def named(values: list[tuple[Any, ...]]) -> Iterator[Any]:
    return (pytest.param(*row, id=f"{number}-{row[-1]}") for number, row in enumerate(values))


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


# -- tensors


def tensor(
    dtype: Any = common.DATA_TYPE_INT32, shape: tuple[int, ...] = (2,), data: bytes = b"\5\0\0\0\6\0\0\0"
) -> Any:
    return common.Tensor(dtype=dtype, shape=shape, data=data)


def ids(*values: int) -> common.Tensor:
    return to_tensor(np.array(values, np.int32))


BAD_TENSORS: list[tuple[common.Tensor, str]] = [
    (common.Tensor(), "DATA_TYPE_UNSPECIFIED"),
    (tensor(99), "tensor of 99"),
    (tensor(common.DATA_TYPE_BFLOAT16), "cannot decode"),
    (tensor(common.DATA_TYPE_INT64, (1,)), "expected a tensor of int32"),
    (tensor(common.DATA_TYPE_FLOAT32), "expected a tensor of int32"),
    (tensor(shape=(1, 2)), "one row"),
    (tensor(shape=(), data=b"\5\0\0\0"), "one row"),
    (tensor(shape=(3,)), "cannot have 8 bytes"),
    (tensor(shape=(-2,)), "cannot have 8 bytes"),
    (tensor(shape=(-1, -2)), "cannot have 8 bytes"),
    (tensor(shape=(2**62, 2**62)), "cannot have 8 bytes"),
    (tensor(shape=(0, 2**62), data=b""), "2 dimensions"),
    (tensor(shape=(1,) * 99 + (2,)), "100 dimensions"),
    (tensor(data=b"\5\0\0\0\6\0\0"), "cannot have 7 bytes"),
    (ids(), "tokens"),
    (ids(5, -1), "token ids must be in"),
    (ids(5, 2**31 - 1), "token ids must be in"),
    (ids(*[5] * 1000), "tokens"),
]


@pytest.mark.parametrize(("bad", "says"), named(BAD_TENSORS))
@pytest.mark.parametrize("method", ["Generate", "Score"])
async def test_tensors_that_are_no_token_ids(running: Running, method: str, bad: common.Tensor, says: str) -> None:
    request: Any = pb.ScoreRequest(sequences=[ids(5, 6), bad])
    if method == "Generate":
        request = pb.GenerateRequest(prompt_token_ids=bad, max_tokens=3)
    await refused(running, getattr(running.client._stub, method)(request), INVALID, says)


BAD_GENERATIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"sampling": SAMPLING(temperature=math.nan)}, "temperature"),
    ({"stop_strings": [""]}, "stop string is empty"),
    ({"stop_strings": ["x"] * 1000}, "there are 1000 stop_strings"),
    ({"stop_strings": ["x" * 5000]}, "stop_strings may have"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"stop_token_ids": [5] * 1000}, "stop_token_ids"),
]


@pytest.mark.parametrize(("fields", "says"), named(BAD_GENERATIONS))
async def test_a_generation_that_cannot_be(running: Running, fields: dict[str, Any], says: str) -> None:
    request = pb.GenerateRequest(**{"prompt_token_ids": ids(5, 6), "max_tokens": 3, **fields})
    await refused(running, running.client._stub.Generate(request), INVALID, says)


async def test_too_much_to_score(running: Running) -> None:
    request = pb.ScoreRequest(sequences=[ids(*[5] * 200)] * 6000)
    await refused(running, running.client._stub.Score(request), Code.RESOURCE_EXHAUSTED, "at most 1048576 tokens")


# -- weights and control


async def an_update(running: Running, fault: str) -> list[pb.UpdateWeightsRequest]:
    """The messages of an update, with one fault."""
    tensors = {name: tensor.clone() for name, tensor in running.engine._runner.weights.items()}
    specs = specs_of(tensors)
    update = pb.WeightUpdate(version=1, stream=pb.StreamSource(), tensors=specs)
    parts = list(chunks([item[3] for item in weight_tensors(tensors)]))
    if fault == "twice the same tensor":
        update.tensors.append(specs[0])
    elif fault == "an unknown type":
        update.tensors[0].dtype = 99  # type: ignore[assignment]
    elif fault == "a negative size":
        update.tensors[0].shape[0] *= -1
    elif fault == "an unknown mode":
        update.mode = 99  # type: ignore[assignment]
    elif fault == "a wrong checksum":
        update.tensors[1].crc32 ^= 1
    elif fault == "chunks out of order":
        parts[0], parts[1] = parts[1], parts[0]
    elif fault == "chunks that overlap":
        parts[1].offset -= 1
    elif fault == "a chunk twice":
        parts.insert(1, parts[0])
    elif fault == "an empty chunk":
        parts.insert(1, pb.WeightChunk(offset=parts[1].offset))
    elif fault == "bytes beyond the end":
        parts.append(pb.WeightChunk(offset=parts[-1].offset + len(parts[-1].data), data=b"x"))
    elif fault == "a far offset":
        parts.append(pb.WeightChunk(offset=2**64 - 1, data=b"x"))
    elif fault == "bytes missing":
        parts.pop()
    elif fault == "no source":
        update.ClearField("stream")
    requests = [pb.UpdateWeightsRequest(update=update), *(pb.UpdateWeightsRequest(chunk=part) for part in parts)]
    if fault == "a second update":
        requests.insert(2, requests[0])
    elif fault == "an empty message":
        requests.insert(2, pb.UpdateWeightsRequest())
    elif fault == "chunks first":
        del requests[0]
    return requests


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("twice the same tensor", INVALID, "come twice"),
        ("an unknown type", INVALID, "no tensor has type 99"),
        ("a negative size", INVALID, "no tensor has"),
        ("an unknown mode", INVALID, "update mode 99"),
        ("a wrong checksum", INVALID, "CRC-32"),
        ("chunks out of order", INVALID, "expected offset 0 "),
        ("chunks that overlap", INVALID, "expected offset"),
        ("a chunk twice", INVALID, "expected offset"),
        ("an empty chunk", INVALID, "empty"),
        ("bytes beyond the end", INVALID, "expected offset"),
        ("a far offset", INVALID, "expected offset"),
        ("bytes missing", INVALID, "bytes came"),
        ("no source", INVALID, "no source"),
        ("a second update", ORDER, "only WeightChunks"),
        ("an empty message", ORDER, "only WeightChunks"),
        ("chunks first", ORDER, "must be a WeightUpdate"),
    ],
)
async def test_an_update_that_cannot_be(running: Running, fault: str, code: Code, says: str) -> None:
    before = await running.client.get_weight_info()
    await refused(running, running.client._stub.UpdateWeights(iter(await an_update(running, fault))), code, says)
    assert await running.client.get_weight_info() == before


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
        for request in (await an_update(running, ""))[:messages]:
            await call.write(request)
        code, details = await outcome(call)
        assert (code, "update_idle_seconds" in details) == (Code.DEADLINE_EXCEEDED, True)
    assert await running.client.get_weight_info() == before


@pytest.mark.parametrize("messages", [0, 1, 2])
async def test_an_update_that_is_abandoned(running: Running, messages: int) -> None:
    before = await running.client.get_weight_info()
    async with nothing_left(running):
        call = running.client._stub.UpdateWeights()
        for request in (await an_update(running, ""))[:messages]:
            await call.write(request)
        call.cancel()
    assert await running.client.get_weight_info() == before
    answer = await running.client._stub.UpdateWeights(iter(await an_update(running, "a wrong checksum"))).code()
    assert answer is INVALID  # and not RESOURCE_EXHAUSTED: the one before is gone


async def test_pausing_twice_and_resuming_without_a_pause(running: Running) -> None:
    async with nothing_left(running):
        await running.client.resume()
        await running.client.pause()
        await running.client.pause()
        assert (await running.client.get_server_info()).paused
        await running.client.resume()
        assert not (await running.client.get_server_info()).paused
