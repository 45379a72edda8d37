"""The transformers engine: the conformance suite on three architectures, and what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_conformance import EngineConformance, collect, ids, job, until_tokens
from engine_reference import Reference
from tiny_models import make_model

from rollout_service.config import EngineConfig
from rollout_service.engines import slots
from rollout_service.engines.base import Sampling
from rollout_service.engines.transformers_engine import TransformersEngine
from turnwire.errors import ConfigError, ExhaustedError, InfraError


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"))


async def started(folder: Path, **settings: Any) -> TransformersEngine:
    engine = TransformersEngine(EngineConfig(model=str(folder), threads=1, **settings))
    await engine.start()
    return engine


class TestTransformersEngine(EngineConformance):
    @pytest.fixture
    async def engine(self, folder: Path) -> AsyncIterator[TransformersEngine]:
        engine = await started(folder, max_sequences=48, cached_sequences=64, prefill_tokens_per_step=64)
        yield engine
        await engine.close()


async def test_scores_while_it_is_paused(llama: Path) -> None:
    engine = await started(llama)
    await engine.pause()
    assert (await engine.score([ids(5)])).version == 0
    await engine.close()


async def test_many_sequences_share_few_rows(llama: Path) -> None:
    """Rows are taken, evicted and copied from, with gaps between the decoding; logprobs must still be right."""
    reference, rng = Reference(llama), np.random.default_rng(5)
    engine = await started(llama, max_sequences=6, cached_sequences=20, prefill_tokens_per_step=16)

    async def trajectory(number: int) -> None:
        tokens = ids(int(rng.integers(5, 40)), number // 3)
        for turn in range(5):
            sampling = Sampling(temperature=0.8, seed=turn)
            request = job(f"{number}#{turn}", tokens, int(rng.integers(1, 12)), sampling, sequence_key=str(number))
            answer = await collect(engine, request)
            reference.check(tokens, answer.token_ids, answer.logprobs, sampling, answer.spans)
            tokens = np.concatenate([tokens, answer.token_ids, ids(int(rng.integers(1, 20)), turn)])
            await asyncio.sleep(float(rng.uniform(0, 0.03)))
        engine.release(str(number))

    async def nuisance() -> None:
        for number in range(30):
            running = asyncio.create_task(collect(engine, job("n", ids(20, number), 50)))
            await asyncio.sleep(0.01)
            running.cancel()

    await asyncio.gather(nuisance(), *(trajectory(number) for number in range(24)))
    assert engine.info().running == 0
    await engine.close()


async def test_idle_sequences_beyond_the_cache_are_evicted_least_recently_used_first(llama: Path) -> None:
    engine = await started(llama, max_sequences=1, cached_sequences=3)
    prompts = {key: ids(50, number) for number, key in enumerate("abcd")}

    async def prefilled(key: str) -> int:
        before = engine.info().tokens_prefilled
        await collect(engine, job(key, prompts[key], 1, sequence_key=key))
        return engine.info().tokens_prefilled - before

    assert [await prefilled(key) for key in "abc"] == [50, 50, 50]
    assert await prefilled("a") == 0  # one token is computed again, to sample from
    assert await prefilled("d") == 50  # takes the place of b
    assert await prefilled("a") == 0
    assert await prefilled("b") == 50
    await engine.close()


async def test_queue_is_bounded(llama: Path) -> None:
    engine = await started(llama, max_sequences=1, cached_sequences=1, max_waiting=3)
    await engine.pause()
    running = [asyncio.create_task(collect(engine, job(str(n), ids(5), 3))) for n in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ExhaustedError) as caught:
        await collect(engine, job("x", ids(5), 3))
    assert caught.value.retry_after
    await engine.resume()
    await asyncio.gather(*running)
    assert (engine.info().waiting, engine.info().running) == (0, 0)
    await engine.close()


async def test_failed_step_fails_its_requests_and_no_others(llama: Path) -> None:
    engine = await started(llama)
    forward, calls = engine._runner.forward, 0

    def broken(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of memory")
        return forward(*arguments)

    engine._runner.forward = broken  # type: ignore[method-assign]
    with pytest.raises(InfraError, match="out of memory"):
        await collect(engine, job("a", ids(5), 50))
    assert engine.info().failures == 1
    answer = await collect(engine, job("b", ids(5), 10))
    Reference(llama).check(ids(5), answer.token_ids, answer.logprobs, Sampling(), answer.spans)
    await engine.close()


async def test_long_prompts_do_not_hold_up_those_who_generate(llama: Path) -> None:
    engine = await started(llama, prefill_tokens_per_step=16)
    running = asyncio.create_task(collect(engine, job("a", ids(5), 200)))
    await until_tokens(engine, 5)
    before = engine.info().tokens_generated
    await collect(engine, job("long", ids(240), 1))
    assert engine.info().tokens_generated - before >= 240 // 16 - 1
    await running
    await engine.close()


@pytest.mark.parametrize(
    ("changes", "settings", "key", "reason"),
    [
        ({}, {"max_model_tokens": 512}, "engine.max_model_tokens", "above what the model allows"),
        ({}, {"cached_sequences": 10**8}, "engine.cached_sequences", "use at most"),
        ({"kind": "mistral", "sliding_window": 32}, {}, "engine.max_model_tokens", "set it to 32"),
    ],
)
async def test_model_that_cannot_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], key: str, reason: str
) -> None:
    folder = make_model(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reason) as caught:
        await started(folder, **settings)
    assert caught.value.problems[0].key == key


async def test_attention_that_this_engine_lacks_is_found_at_start(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_chunk_mask", lambda chunk, groups, dtype: torch.zeros(1, 1))  # no causality
    with pytest.raises(ConfigError, match="differ by"):
        await started(llama)


async def test_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await started(tmp_path)
