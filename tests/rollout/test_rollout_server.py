"""The service over gRPC with a real engine: trajectories that hold what was sampled, generation, weights, control."""

# ruff: noqa: ASYNC110, ASYNC240 - what is waited for is on the other side of gRPC

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_reference import TOLERANCE, Reference
from google.protobuf import json_format
from rollout_harness import Running, check_trajectory, rollouts
from tiny_models import TINY, make_model

from rollout_service.engines.base import GenerateJob, Sampling, VersionSpan
from turnwire.client.rollout import rollout_limits, rollout_task
from turnwire.errors import ExhaustedError, InvalidRequestError, WrongOrderError
from turnwire.tensors import from_tensor
from turnwire.torch_weights import specs_of, weight_tensors, write_file
from turnwire.v1 import common_pb2, rollout_pb2
from turnwire.weights import checksum, chunks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=TINY)


@pytest.fixture
def reference(folder: Path) -> Reference:
    return Reference(folder)


def assert_logprobs(trajectory: rollout_pb2.Trajectory, reference: Reference, sampling: Sampling) -> None:
    """Each sampled token's logprob is that of a fresh pass, under the version of its span."""
    (segment,) = trajectory.segments
    tokens, logprobs = from_tensor(segment.token_ids, np.int32), from_tensor(segment.logprobs, np.float32)
    for span in segment.weight_spans:
        part = slice(span.start, span.end)
        spans = [VersionSpan(0, span.end - span.start, span.version)]
        reference.check(tokens[: span.start], tokens[part], logprobs[part], sampling, spans)


async def test_trajectories_hold_what_was_sampled_amid_weight_updates(folder: Path, reference: Reference) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.9)
    async with rollouts(folder, engine={"max_sequences": 16, "cached_sequences": 24}) as running:
        limits = rollout_limits(max_turns=5, max_action_tokens=14, max_trajectory_tokens=200)
        tasks = [
            rollout_task(f"t{n}", f"question {n // 4}", ["echo"], temperature=0.9, top_p=0.9, seed=n, limits=limits)
            for n in range(40)
        ]
        ended = []

        async def watch() -> None:
            async for event in running.client.run(tasks):
                if isinstance(event, rollout_pb2.Trajectory):
                    check_trajectory(event)
                    ended.append(event)

        updates = {version: list(weight_tensors(reference.perturbed(version))) for version in (1, 2, 3)}
        watching = asyncio.create_task(watch())
        for version, tensors in updates.items():
            while (await running.client.get_server_info()).tokens_generated_total < version * 40:
                await asyncio.sleep(0.002)
            answer = await running.client.update_weights(tensors, version)
            assert answer.checksum == checksum(specs_of(reference.weights[version]))
        await watching
        assert len(ended) == 40
        versions = {span.version for t in ended for span in t.segments[0].weight_spans}
        assert len(versions) >= 2
        for trajectory in ended:
            assert_logprobs(trajectory, reference, sampling)


async def test_multi_turn_logprobs_are_those_of_one_pass_over_all(folder: Path, reference: Reference) -> None:
    """Observations between the turns, the cache kept from one to the next."""
    async with rollouts(folder, tools=False) as running:
        chat = running.chat
        tokens = chat.prompt([{"role": "user", "content": "q"}])
        sampling = Sampling(temperature=1.1, top_k=50, seed=2)
        for turn in range(4):
            job = GenerateJob(f"x#{turn}", tokens, 9, sampling, sequence_key="x")
            (delta,) = [delta async for delta in running.engine.generate(job)]
            reference.check(tokens, delta.token_ids, delta.logprobs, sampling, delta.spans)
            observed = chat.bridge.around(delta.token_ids, chat.text("some text"))
            tokens = np.concatenate([tokens, delta.token_ids, observed])


async def test_generate_streams_what_a_fresh_pass_gives(folder: Path, reference: Reference) -> None:
    async with rollouts(folder, tools=False) as running:
        prompt = np.arange(5, 25, dtype=np.int32)
        params = common_pb2.SamplingParams(temperature=0.7, top_p=0.8, seed=9)
        parts = [part async for part in running.client.generate_stream(prompt, 15, sampling=params)]
        assert len(parts) > 1
        whole = await running.client.generate(prompt, 15, sampling=params)
        assert np.concatenate([part.token_ids for part in parts]).tolist() == whole.token_ids.tolist()
        assert whole.stop == rollout_pb2.GENERATE_STOP_LENGTH
        spans = tuple(VersionSpan(span.start, span.end, span.version) for span in whole.weight_spans)
        reference.check(prompt, whole.token_ids, whole.logprobs, Sampling(0.7, 0.8), spans)
        with pytest.raises(InvalidRequestError):
            await running.client.generate([10**7], 3)


async def test_pause_and_resume_and_score(folder: Path, reference: Reference) -> None:
    async with rollouts(folder, tools=False) as running:
        client = running.client
        await client.pause()
        assert (await client.get_server_info()).paused
        generating = asyncio.create_task(client.generate([5, 6, 7], 5))
        scores = await client.score([[5, 6, 7, 8], [9, 10]])
        assert [len(item) for item in scores.logprobs] == [3, 1]
        rows = reference.logprobs(np.array([5, 6, 7, 8], np.int32), Sampling())
        wanted = [float(rows[n, n + 6]) for n in range(3)]
        np.testing.assert_allclose(scores.logprobs[0], wanted, atol=TOLERANCE, rtol=0)
        assert not generating.done()
        await client.resume()
        assert len((await generating).token_ids) == 5


async def test_server_info_says_what_runs(folder: Path) -> None:
    async with rollouts(folder, tools=False, limits={"max_turns": 3}, max_trajectories=300) as running:
        await running.client.generate([5, 6, 7], 4)
        info = json_format.MessageToDict(await running.client.get_server_info(), preserving_proto_field_name=True)
        assert info["engine"] == "transformers"
        assert info["model"] == str(folder)
        assert (info["max_trajectories"], info["max_model_tokens"]) == (300, 256)
        assert (info["tokens_generated_total"], info["tokens_prefilled_total"]) == ("4", "3")
        assert info["default_limits"]["max_turns"] == 3
        assert info["default_limits"]["max_trajectory_tokens"] == 256


async def test_tools_without_a_tool_service_are_refused(folder: Path) -> None:
    async with rollouts(folder, tools=False) as running:
        with pytest.raises(InvalidRequestError, match="tool_target"):
            await running.one(rollout_task("t", "q", ["echo"]))


# -- weights


async def send(running: Running, update: rollout_pb2.WeightUpdate, buffers: list[bytes]) -> None:
    call = running.client._stub.UpdateWeights()
    await call.write(rollout_pb2.UpdateWeightsRequest(update=update))
    for chunk in chunks(buffers):
        await call.write(rollout_pb2.UpdateWeightsRequest(chunk=chunk))
    await call.done_writing()
    await call


def drop(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("model.norm.weight")


def extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


def misshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


def retype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, "1 tensors are missing: model.norm.weight"),
        (extra, "not the policy's: lm_head.weight; a tied weight"),
        (misshape, "shape \\[47\\], the policy's has \\[48\\]"),
        (retype, "DATA_TYPE_BFLOAT16, the policy's is DATA_TYPE_FLOAT32"),
    ],
)
async def test_bad_weights_leave_the_old_ones_whole(
    folder: Path,
    reference: Reference,
    tmp_path: Path,
    spoil: Callable[[dict[str, torch.Tensor]], None],
    message: str,
    as_file: bool,
) -> None:
    async with rollouts(folder, tools=False) as running:
        before = await running.client.get_weight_info()
        tensors = dict(reference.perturbed(1))
        spoil(tensors)
        source = tmp_path / "weights.safetensors" if as_file else weight_tensors(tensors)
        if as_file:
            write_file(source, {name: tensor.clone() for name, tensor in tensors.items()})
        with pytest.raises(InvalidRequestError, match=message):
            await running.client.update_weights(source, 1)
        assert await running.client.get_weight_info() == before
        await assert_weights(running, reference, 0)


async def assert_weights(running: Running, reference: Reference, version: int) -> None:
    tokens = np.arange(10, 40, dtype=np.int32)
    scores = await running.client.score([tokens])
    rows = reference.logprobs(tokens, Sampling(), version)
    wanted = [float(rows[n, tokens[n + 1]]) for n in range(len(tokens) - 1)]
    np.testing.assert_allclose(scores.logprobs[0], wanted, atol=TOLERANCE, rtol=0)
    assert scores.version == version


@pytest.mark.parametrize("fault", ["flipped", "short", "gap", "long", "interrupted"])
async def test_corrupt_bytes_leave_the_old_weights_whole(folder: Path, reference: Reference, fault: str) -> None:
    async with rollouts(folder, tools=False) as running:
        tensors = weight_tensors(reference.perturbed(1))
        update = rollout_pb2.WeightUpdate(version=1, tensors=specs_of(reference.weights[1]))
        update.stream.SetInParent()
        buffers = [bytes(item[3]) for item in tensors]
        wanted = {"flipped": "CRC-32", "short": "bytes came", "gap": "offset", "long": "offset"}
        if fault == "flipped":
            broken = bytearray(buffers[2])
            broken[5] ^= 1
            buffers[2] = bytes(broken)
        elif fault == "short":
            buffers.pop()
        elif fault == "long":
            buffers.append(b"more")
        call = running.client._stub.UpdateWeights()
        await call.write(rollout_pb2.UpdateWeightsRequest(update=update))
        if fault == "interrupted":
            await call.write(rollout_pb2.UpdateWeightsRequest(chunk=next(chunks(buffers))))
            call.cancel()
        else:
            parts = list(chunks(buffers))
            if fault == "gap":
                del parts[3]
            for part in parts:
                await call.write(rollout_pb2.UpdateWeightsRequest(chunk=part))
            await call.done_writing()
            with pytest.raises(Exception, match=wanted[fault]):
                await call
        await assert_weights(running, reference, 0)
        good = await running.client.update_weights(tensors, 1)
        assert good.bytes == sum(len(item) for item in (bytes(t[3]) for t in tensors))
        await assert_weights(running, reference, 1)


async def test_weights_from_a_file(folder: Path, reference: Reference, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_file(path, reference.perturbed(4))
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.safetensors"]
    async with rollouts(folder, tools=False) as running:
        answer = await running.client.update_weights(path, 4, mode="wait")
        assert answer.checksum == checksum(specs_of(reference.weights[4]))
        assert answer.pause.ToTimedelta().total_seconds() < 5
        await assert_weights(running, reference, 4)
        assert (await running.client.get_weight_info()).checksum == answer.checksum
        update = rollout_pb2.WeightUpdate(version=5, tensors=specs_of(reference.weights[0]))
        update.file.path = str(path)
        with pytest.raises(Exception, match="the file's CRC-32"):
            await send(running, update, [])
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            await running.client.update_weights(tmp_path / "none", 6)


async def test_update_is_safe_to_repeat(folder: Path, reference: Reference) -> None:
    async with rollouts(folder, tools=False) as running:
        tensors = weight_tensors(reference.perturbed(2))
        first = await running.client.update_weights(tensors, 2)
        again = await running.client.update_weights(tensors, 2)
        assert (first.version, first.checksum) == (again.version, again.checksum)
        with pytest.raises(WrongOrderError, match="version 2"):
            await running.client.update_weights(weight_tensors(reference.weights[0]), 2)
        await assert_weights(running, reference, 2)


async def test_two_updates_at_once_are_refused(folder: Path, reference: Reference) -> None:
    async with rollouts(folder, tools=False) as running:
        tensors = weight_tensors(reference.perturbed(1))
        update = rollout_pb2.WeightUpdate(version=1, tensors=specs_of(reference.weights[1]))
        update.stream.SetInParent()
        slow = running.client._stub.UpdateWeights()
        await slow.write(rollout_pb2.UpdateWeightsRequest(update=update))
        while not running.service._updating:
            await asyncio.sleep(0.005)
        with pytest.raises(ExhaustedError) as caught:
            await running.client.update_weights(tensors, 2)
        assert caught.value.retry_after == 1.0
        slow.cancel()
        while running.service._updating:
            await asyncio.sleep(0.005)
        await running.client.update_weights(tensors, 2)


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [rollout_pb2.UpdateWeightsRequest(chunk=rollout_pb2.WeightChunk(data=b"x"))],
        [rollout_pb2.UpdateWeightsRequest(update=rollout_pb2.WeightUpdate(version=1))],
    ],
)
async def test_malformed_updates_are_refused(folder: Path, requests: list[rollout_pb2.UpdateWeightsRequest]) -> None:
    async with rollouts(folder, tools=False) as running:
        call = running.client._stub.UpdateWeights(iter(requests))
        with pytest.raises(Exception, match="WeightUpdate"):
            await call
