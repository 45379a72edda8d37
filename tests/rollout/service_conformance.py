"""The cases of the service over gRPC that hold on every engine: generation for callers with their own loop, scores,
weights, control.

A module of tests subclasses `ServiceConformance` and gives two fixtures: `folder` (a model folder) and `running` (one
service on it, with a tool service beside it, for the whole module). Each test finds the service at its first weights.
"""

# ruff: noqa: ASYNC110 - what is waited for is on the other side of gRPC

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from bad_requests import BAD_GENERATIONS, BAD_TENSORS, BAD_UPDATES, an_update, ids, named
from calls import outcome
from engine_reference import TOLERANCE, Reference
from grpc import StatusCode
from rollout_harness import Running, check_trajectory, refused
from tiny_models import make_tokenizer
from waiting import eventually

from rollout_service.engines.base import Sampling, VersionSpan
from turnwire.client.rollout import Generation, rollout_limits, rollout_task
from turnwire.errors import ExhaustedError, InvalidRequestError, WrongOrderError
from turnwire.tensors import from_tensor
from turnwire.torch_weights import specs_of, weight_tensors, write_file
from turnwire.v1 import common_pb2, rollout_pb2
from turnwire.weights import checksum

PROMPT = np.arange(5, 25, dtype=np.int32)
SCORED = np.arange(10, 40, dtype=np.int32)

Tensors = dict[str, torch.Tensor]


def params(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed
    )


def checked(prompt: Any, answer: Generation, reference: Reference, sampling: Sampling) -> list[int]:
    """The tokens, whose logprobs must be those of a fresh pass under the versions of their spans."""
    spans = tuple(VersionSpan(span.start, span.end, span.version) for span in answer.weight_spans)
    assert [0, *(span.end for span in spans)] == [*(span.start for span in spans), len(answer.token_ids)]
    reference.check(np.asarray(prompt, np.int32), answer.token_ids, answer.logprobs, sampling, spans)
    return answer.token_ids.tolist()


async def assert_weights(running: Running, reference: Reference, version: int) -> None:
    scores = await running.client.score([SCORED])
    rows = reference.logprobs(SCORED, Sampling(), version)
    wanted = [float(rows[n, SCORED[n + 1]]) for n in range(len(SCORED) - 1)]
    np.testing.assert_allclose(scores.logprobs[0], wanted, atol=TOLERANCE, rtol=0)
    assert scores.version == version


async def weights(running: Running) -> tuple[int, str, list[rollout_pb2.TensorSpec]]:
    """Those that the service says it has."""
    info = await running.client.get_weight_info()
    return info.version, info.checksum, list(info.tensors)


async def idle(running: Running) -> None:
    """Wait until nothing generates."""

    async def so() -> bool:
        info = await running.client.get_server_info()
        return info.requests_running + info.requests_waiting == 0

    await eventually(so)


def drop(tensors: Tensors) -> None:
    tensors.pop("model.norm.weight")


def extra(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


def misshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


def retype(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()


@pytest.mark.asyncio(loop_scope="module")
class ServiceConformance:
    kind: str
    """As GetServerInfo names the engine."""
    scores_while_paused: bool

    @pytest.fixture
    def reference(self, folder: Path) -> Reference:
        return Reference(folder)

    @pytest_asyncio.fixture(loop_scope="module")
    async def service(self, running: Running, reference: Reference) -> AsyncIterator[Running]:
        yield running
        await running.client.resume()
        if (await running.client.get_weight_info()).version:
            await running.client.update_weights(weight_tensors(reference.weights[0]), 0)

    # -- generation

    async def test_tokens_stream_as_they_come_and_are_those_of_one_answer(
        self, service: Running, reference: Reference
    ) -> None:
        sampling = Sampling(0.7, 0.8, seed=9)
        stream = service.client.generate_stream(PROMPT, 15, sampling=params(sampling))
        parts = [part async for part in stream]
        stops = [part.stop for part in parts]
        assert len(parts) > 3
        assert stops == [*[rollout_pb2.GENERATE_STOP_UNSPECIFIED] * (len(parts) - 1), rollout_pb2.GENERATE_STOP_LENGTH]
        whole = await service.client.generate(PROMPT, 15, sampling=params(sampling))
        assert np.concatenate([part.token_ids for part in parts]).tolist() == whole.token_ids.tolist()
        joined = np.concatenate([part.logprobs for part in parts])
        np.testing.assert_allclose(joined, whole.logprobs, atol=TOLERANCE, rtol=0)
        assert len(checked(PROMPT, whole, reference, sampling)) == 15

    async def test_greedy_tokens_are_the_most_likely_ones(self, service: Running, reference: Reference) -> None:
        answer = await service.client.generate(PROMPT, 12, sampling=common_pb2.SamplingParams(temperature=0))
        logits = reference.logits(np.concatenate([PROMPT, answer.token_ids]))
        assert answer.token_ids.tolist() == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
        assert not answer.logprobs.any()

    async def test_a_seed_decides_the_tokens(self, service: Running) -> None:
        seeds = [1, 2, 1, None, None, 2**64 - 1, 2**64 - 1]
        calls = [service.client.generate(PROMPT, 20, sampling=common_pb2.SamplingParams(seed=seed)) for seed in seeds]
        first, second, again, free, other, last, last_again = [
            answer.token_ids.tolist() for answer in await asyncio.gather(*calls)
        ]
        assert (first, last) == (again, last_again)
        assert len({tuple(tokens) for tokens in (first, second, free, other, last)}) == 5

    async def test_stop_ids_and_stop_strings_end_a_generation(self, service: Running) -> None:
        sampling = common_pb2.SamplingParams(seed=3)
        free = (await service.client.generate(PROMPT, 60, sampling=sampling)).token_ids.tolist()
        tokenizer, last = make_tokenizer(), free[17]
        by_id = await service.client.generate(PROMPT, 60, sampling=sampling, stop_token_ids=[last, 3])
        assert by_id.stop == rollout_pb2.GENERATE_STOP_END_OF_TURN
        assert by_id.token_ids.tolist() == free[: free.index(last) + 1]
        place = next(n for n in range(5, 60) if tokenizer.decode(free[n : n + 1]).strip().isalnum())
        text = tokenizer.decode(free[place : place + 1]).strip()
        by_text = await service.client.generate(PROMPT, 60, sampling=sampling, stop_strings=["never so", text])
        ends = next(n for n in range(60) if text in tokenizer.decode(free[: n + 1]))
        assert by_text.stop == rollout_pb2.GENERATE_STOP_STRING
        assert by_text.token_ids.tolist() == free[: ends + 1]

    async def test_a_generation_that_its_caller_leaves_makes_room(self, service: Running) -> None:
        stream = service.client.generate_stream(PROMPT, 220)
        await anext(stream)
        assert (await service.client.get_server_info()).requests_running == 1
        await stream.aclose()
        await idle(service)
        assert len((await service.client.generate(PROMPT, 3)).token_ids) == 3

    @pytest.mark.parametrize(("bad", "says"), named(BAD_TENSORS))
    @pytest.mark.parametrize("method", ["Generate", "Score"])
    async def test_tensors_that_are_no_token_ids(
        self, service: Running, method: str, bad: common_pb2.Tensor, says: str
    ) -> None:
        request: Any = rollout_pb2.ScoreRequest(sequences=[ids(5, 6), bad])
        if method == "Generate":
            request = rollout_pb2.GenerateRequest(prompt_token_ids=bad, max_tokens=3)
        call = getattr(service.client._stub, method)(request)
        await refused(service, call, StatusCode.INVALID_ARGUMENT, says)

    @pytest.mark.parametrize(("fields", "says"), named(BAD_GENERATIONS))
    async def test_a_generation_that_cannot_be(self, service: Running, fields: dict[str, Any], says: str) -> None:
        request = rollout_pb2.GenerateRequest(**{"prompt_token_ids": ids(5, 6), "max_tokens": 3, **fields})
        await refused(service, service.client._stub.Generate(request), StatusCode.INVALID_ARGUMENT, says)

    # -- scores and control

    async def test_scores_are_those_of_a_fresh_pass(self, service: Running, reference: Reference) -> None:
        await assert_weights(service, reference, 0)
        scores = await service.client.score([[5, 6, 7, 8], [9], [9, 10]])
        assert [len(item) for item in scores.logprobs] == [3, 0, 1]
        assert (await service.client.score([])).logprobs == ()

    async def test_a_paused_service_holds_generations(self, service: Running, reference: Reference) -> None:
        await service.client.pause()
        assert (await service.client.get_server_info()).paused
        generating = asyncio.create_task(service.client.generate(PROMPT, 5))
        if self.scores_while_paused:
            await assert_weights(service, reference, 0)
        else:
            with pytest.raises(WrongOrderError, match="resume first"):
                await service.client.score([SCORED])
        assert not generating.done()
        await service.client.resume()
        assert len((await generating).token_ids) == 5

    async def test_server_info_says_what_it_did(self, service: Running, folder: Path) -> None:
        before = await service.client.get_server_info()
        await service.client.generate(PROMPT[::-1], 4)
        await idle(service)
        after = await service.client.get_server_info()
        assert (after.engine, after.model, after.max_model_tokens) == (self.kind, str(folder), 256)
        assert after.tokens_generated_total - before.tokens_generated_total == 4
        assert after.tokens_prefilled_total - before.tokens_prefilled_total == len(PROMPT)

    # -- weights

    async def test_trajectories_hold_what_was_sampled_amid_weight_updates(
        self, service: Running, reference: Reference
    ) -> None:
        client, sampling = service.client, Sampling(temperature=0.9, top_p=0.9)
        limits = rollout_limits(max_turns=5, max_action_tokens=14, max_trajectory_tokens=200)
        tasks = [
            rollout_task(f"t{n}", f"question {n // 4}", ["echo"], temperature=0.9, top_p=0.9, seed=n, limits=limits)
            for n in range(40)
        ]
        updates = {version: list(weight_tensors(reference.perturbed(version))) for version in (1, 2, 3)}
        before = (await client.get_server_info()).tokens_generated_total
        ended = []
        async with client.rollouts() as stream:

            async def watch() -> None:
                async for event in stream:
                    if isinstance(event, rollout_pb2.Trajectory):
                        check_trajectory(event)
                        ended.append(event)

            watching = asyncio.create_task(watch())
            for task in tasks[:20]:
                await stream.submit(task)
            for version, tensors in updates.items():
                while (await client.get_server_info()).tokens_generated_total - before < version * 5:
                    await asyncio.sleep(0.002)
                answer = await client.update_weights(tensors, version)
                assert answer.checksum == checksum(specs_of(reference.weights[version]))
            for task in tasks[20:]:  # so that there are some after the updates, however fast the first ones were
                await stream.submit(task)
            await stream.finish()
            await watching
        assert len(ended) == 40
        assert len({span.version for t in ended for span in t.segments[0].weight_spans}) >= 2
        for trajectory in ended:
            assert_logprobs(trajectory, reference, sampling)

    async def test_a_generation_goes_on_under_new_weights(self, service: Running, reference: Reference) -> None:
        sampling = Sampling(seed=4)
        generating = asyncio.create_task(service.client.generate(PROMPT, 200, sampling=params(sampling)))
        goal = (await service.client.get_server_info()).tokens_generated_total
        for version in (2, 1):  # a trainer that resumes from a checkpoint comes with a lower one
            goal += 20
            while (await service.client.get_server_info()).tokens_generated_total < goal:
                await asyncio.sleep(0.002)
            await service.client.update_weights(weight_tensors(reference.perturbed(version)), version)
        answer = await generating
        assert len(checked(PROMPT, answer, reference, sampling)) == 200
        assert [span.version for span in answer.weight_spans] == [0, 2, 1]

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
        self,
        service: Running,
        reference: Reference,
        tmp_path: Path,
        spoil: Callable[[Tensors], None],
        message: str,
        as_file: bool,
    ) -> None:
        before = await weights(service)
        tensors = dict(reference.perturbed(1))
        spoil(tensors)
        source = tmp_path / "weights.safetensors" if as_file else weight_tensors(tensors)
        if isinstance(source, Path):
            write_file(source, {name: tensor.clone() for name, tensor in tensors.items()})
        with pytest.raises(InvalidRequestError, match=message):
            await service.client.update_weights(source, 1)
        assert await weights(service) == before
        await assert_weights(service, reference, 0)

    @pytest.mark.parametrize(("fault", "code", "says"), BAD_UPDATES)
    async def test_a_broken_update_leaves_the_old_weights_whole(
        self, service: Running, reference: Reference, fault: str, code: StatusCode, says: str
    ) -> None:
        before = await weights(service)
        requests = an_update(reference.perturbed(1), fault)
        await refused(service, service.client._stub.UpdateWeights(iter(requests)), code, says)
        assert await weights(service) == before
        await assert_weights(service, reference, 0)

    async def test_an_update_that_breaks_off_can_be_sent_again(self, service: Running, reference: Reference) -> None:
        requests = an_update(reference.perturbed(1))
        call = service.client._stub.UpdateWeights()
        for request in requests[:3]:
            await call.write(request)
        call.cancel()
        await assert_weights(service, reference, 0)
        assert (await outcome(service.client._stub.UpdateWeights(iter(requests))))[0] is StatusCode.OK
        await assert_weights(service, reference, 1)

    async def test_weights_from_a_file(self, service: Running, reference: Reference, tmp_path: Path) -> None:
        path = tmp_path / "w.safetensors"
        write_file(path, reference.perturbed(4))
        update = rollout_pb2.WeightUpdate(version=4, tensors=specs_of(reference.weights[0]))
        update.file.path = str(path)
        call = service.client._stub.UpdateWeights(iter([rollout_pb2.UpdateWeightsRequest(update=update)]))
        await refused(service, call, StatusCode.INVALID_ARGUMENT, "the file's CRC-32")
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            await service.client.update_weights(tmp_path / "none", 4)
        await assert_weights(service, reference, 0)
        answer = await service.client.update_weights(path, 4, mode="wait")
        assert answer.checksum == checksum(specs_of(reference.weights[4]))
        assert (await service.client.get_weight_info()).checksum == answer.checksum
        await assert_weights(service, reference, 4)

    async def test_an_update_is_safe_to_repeat(self, service: Running, reference: Reference) -> None:
        tensors = weight_tensors(reference.perturbed(2))
        first = await service.client.update_weights(tensors, 2)
        again = await service.client.update_weights(tensors, 2)
        assert (first.version, first.checksum) == (again.version, again.checksum)
        with pytest.raises(WrongOrderError, match="version 2"):
            await service.client.update_weights(weight_tensors(reference.weights[0]), 2)
        await assert_weights(service, reference, 2)

    async def test_two_updates_at_once_are_refused(self, service: Running, reference: Reference) -> None:
        tensors = weight_tensors(reference.perturbed(1))
        slow = service.client._stub.UpdateWeights()
        await slow.write(an_update(reference.weights[1])[0])
        await eventually(lambda: service.service._updating)
        with pytest.raises(ExhaustedError) as caught:
            await service.client.update_weights(tensors, 2)
        assert caught.value.retry_after == 1.0
        slow.cancel()
        await eventually(lambda: not service.service._updating)
        await service.client.update_weights(tensors, 2)

    async def test_an_update_while_paused(self, service: Running, reference: Reference) -> None:
        sampling = Sampling(seed=4)
        stream = service.client.generate_stream(PROMPT, 60, sampling=params(sampling))
        await anext(stream)
        await service.client.pause()
        with pytest.raises(WrongOrderError, match="paused"):  # nothing would finish
            await service.client.update_weights(weight_tensors(reference.perturbed(1)), 1, mode="wait")
        assert (await service.client.get_weight_info()).version == 0
        await service.client.update_weights(weight_tensors(reference.perturbed(2)), 2, mode="keep")
        assert (await service.client.get_server_info()).paused
        await service.client.resume()
        rest = [part async for part in stream]
        spans = [span for part in rest for span in part.weight_spans]
        assert (spans[-1].version, spans[-1].end) == (2, 60)
        await assert_weights(service, reference, 2)


def assert_logprobs(trajectory: rollout_pb2.Trajectory, reference: Reference, sampling: Sampling) -> None:
    """Each sampled token's logprob is that of a fresh pass, under the version of its span."""
    (segment,) = trajectory.segments
    tokens, logprobs = from_tensor(segment.token_ids, np.int32), from_tensor(segment.logprobs, np.float32)
    for span in segment.weight_spans:
        part = slice(span.start, span.end)
        spans = [VersionSpan(0, span.end - span.start, span.version)]
        reference.check(tokens[: span.start], tokens[part], logprobs[part], sampling, spans)
