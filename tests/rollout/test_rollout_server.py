"""The service over gRPC with the `transformers` engine: the cases that hold on every one, and what is this one's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from engine_reference import Reference
from google.protobuf import json_format
from rollout_harness import Running, reason, rollouts
from service_conformance import ServiceConformance
from tiny_models import TINY, make_model

from rollout_service.engines.base import GenerateJob, Sampling
from turnwire.client.rollout import rollout_task
from turnwire.errors import InvalidRequestError
from turnwire.v1 import common_pb2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=TINY)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(folder: Path) -> AsyncIterator[Running]:
    async with rollouts(folder, engine={"max_sequences": 16, "cached_sequences": 24}) as service:
        yield service


class TestTransformersService(ServiceConformance):
    kind = "transformers"
    scores_while_paused = True


async def test_multi_turn_logprobs_are_those_of_one_pass_over_all(folder: Path) -> None:
    """Observations between the turns, the cache kept from one to the next."""
    reference = Reference(folder)
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


async def test_an_adapter_is_refused_by_an_engine_without(folder: Path) -> None:
    async with rollouts(folder, tools=False) as running:
        with pytest.raises(InvalidRequestError, match=r"this engine has none; engine\.vllm\.adapters names"):
            await running.client.generate([5, 6, 7], 3, adapter="style")
        _, ended = await running.run(rollout_task("t", "q", adapter="style"), rollout_task("u", "q"))
        assert (reason(ended["t"]), "'style'" in ended["t"].error) == ("INVALID_TASK", True)
        assert reason(ended["u"]) != "INVALID_TASK"


async def test_an_image_is_refused_by_an_engine_of_text(folder: Path) -> None:
    image = common_pb2.MediaPart(data=b"x", media_type="image/png")
    async with rollouts(folder, tools=False) as running:
        assert list((await running.client.get_server_info()).modalities) == [common_pb2.MODALITY_TEXT]
        with pytest.raises(InvalidRequestError, match=r"reads text only: use engine\.kind vllm"):
            await running.client.generate([5, 6, 7], 3, images=[image])


async def test_tools_without_a_tool_service_are_refused(folder: Path) -> None:
    async with rollouts(folder, tools=False) as running:
        with pytest.raises(InvalidRequestError, match="tool_target"):
            await running.one(rollout_task("t", "q", ["echo"]))
