"""LoRA adapters on the engine `vllm`: a request that names one gets what a model with the adapter merged in gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from engine_reference import Reference
from rollout_harness import Running, reason, rollouts
from service_conformance import checked, params
from tiny_models import TINY, make_adapter, make_model
from vllm_engines import VLLM

from rollout_service.engines.base import Sampling, VersionSpan
from turnwire.client.rollout import rollout_limits, rollout_task
from turnwire.errors import ConfigError, InvalidRequestError
from turnwire.tensors import from_tensor
from turnwire.torch_weights import weight_tensors

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

PROMPT = np.arange(5, 75, dtype=np.int32)
"""Longer than two blocks of the prefix cache."""

ADAPTERS = {"": 0, "formal": 100, "brief": 200}
"""By adapter, what its merged weights are counted from among the reference's versions."""


class Merged(Reference):
    """The model as it is, and with each of the adapters merged in, at any number of weight versions."""

    def __init__(self, folder: Path, adapters: Path) -> None:
        super().__init__(folder)
        self.places = {name: str(adapters / name) for name in ADAPTERS if name}
        self._added = {
            name: make_adapter(adapters / name, self.weights[0], rank, seed=rank)
            for name, rank in (("formal", 4), ("brief", 20))
        }
        self.merge(0)

    def merge(self, version: int) -> None:
        """Add the adapters to these weights."""
        for adapter, added in self._added.items():
            self.weights[ADAPTERS[adapter] + version] = {
                name: tensor + added[name] if name in added else tensor
                for name, tensor in self.weights[version].items()
            }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=TINY, head_dim=32)


@pytest.fixture(scope="module")
def merged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    return Merged(folder, tmp_path_factory.mktemp("adapters"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(folder: Path, merged: Merged) -> AsyncIterator[Running]:
    engine = {"kind": "vllm", "threads": None, "max_sequences": 16, "vllm": {**VLLM, "adapters": merged.places}}
    async with rollouts(folder, engine=engine) as service:
        yield service


def check(
    merged: Merged, adapter: str, prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, spans: list
) -> None:
    moved = [VersionSpan(span.start, span.end, span.version + ADAPTERS[adapter]) for span in spans]
    merged.check(prompt, tokens, logprobs, Sampling(), moved)


async def test_the_service_says_which_adapters_it_has(running: Running) -> None:
    assert list((await running.client.get_server_info()).adapters) == ["formal", "brief"]


async def test_each_request_of_a_mixed_batch_gets_its_own(running: Running, merged: Merged) -> None:
    """Twice: the second time their prompts are in the prefix cache, each adapter's apart."""
    for _ in range(2):
        names = [*ADAPTERS] * 4
        answers = await asyncio.gather(
            *(
                running.client.generate(PROMPT, 12 + n, sampling=params(Sampling(seed=n)), adapter=name)
                for n, name in enumerate(names)
            )
        )
        for name, answer in zip(names, answers, strict=True):
            check(merged, name, PROMPT, answer.token_ids, answer.logprobs, list(answer.weight_spans))


async def test_requests_without_one_are_as_ever_when_alone(running: Running, merged: Merged) -> None:
    sampling = Sampling(seed=5)
    checked(PROMPT, await running.client.generate(PROMPT, 10, sampling=params(sampling)), merged, sampling)


async def test_a_trajectory_keeps_to_its_adapter(running: Running, merged: Merged) -> None:
    limits = rollout_limits(max_turns=3, max_action_tokens=10)
    tasks = [rollout_task(f"{name}.", "q", ["echo"], seed=1, limits=limits, adapter=name) for name in ADAPTERS]
    _, ended = await running.run(*tasks)
    for name in ADAPTERS:
        (segment,) = ended[f"{name}."].segments
        tokens, logprobs = from_tensor(segment.token_ids, np.int32), from_tensor(segment.logprobs, np.float32)
        for span in segment.weight_spans:
            part = slice(span.start, span.end)
            spans = [VersionSpan(0, span.end - span.start, span.version)]
            check(merged, name, tokens[: span.start], tokens[part], logprobs[part], spans)


async def test_new_weights_go_beneath_the_adapters(running: Running, merged: Merged) -> None:
    update = list(weight_tensors(merged.perturbed(1)))
    merged.merge(1)
    goal = (await running.client.get_server_info()).tokens_generated_total + 40
    generating = [
        asyncio.create_task(running.client.generate(PROMPT, 150, sampling=params(Sampling(seed=3)), adapter=name))
        for name in ADAPTERS
    ]
    while (await running.client.get_server_info()).tokens_generated_total < goal:  # noqa: ASYNC110 - of the other side
        await asyncio.sleep(0.002)
    await running.client.update_weights(update, 1)
    for name, answer in zip(ADAPTERS, await asyncio.gather(*generating), strict=True):
        assert [span.version for span in answer.weight_spans] == [0, 1]
        check(merged, name, PROMPT, answer.token_ids, answer.logprobs, list(answer.weight_spans))


async def test_an_unknown_adapter_is_refused_with_those_there_are(running: Running) -> None:
    with pytest.raises(InvalidRequestError, match="unknown adapter 'formel'; did you mean 'formal'"):
        await running.client.generate(PROMPT, 3, adapter="formel")
    _, ended = await running.run(
        rollout_task("bad", "q", adapter="formel"), rollout_task("good", "q", adapter="formal")
    )
    assert (reason(ended["bad"]), "'formal'" in ended["bad"].error) == ("INVALID_TASK", True)
    assert reason(ended["good"]) != "INVALID_TASK"


async def test_an_adapter_of_another_model_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", hidden_size=96, head_dim=32)
    make_adapter(tmp_path / "strange", Reference(other).weights[0], rank=4, seed=1)
    engine = {"kind": "vllm", "threads": None, "vllm": {**VLLM, "adapters": {"strange": str(tmp_path / "strange")}}}
    with pytest.raises(ConfigError, match=r"engine\.vllm\.adapters\.strange"):
        async with rollouts(folder, engine=engine):
            pass
