"""Tokens per second of the rollout service on vLLM against vLLM's own `LLM.generate`, and against the `transformers`
engine; and how many prompt tokens are computed for a trajectory of several turns with a prefix cache and without.

All sides generate from the same prompts with the same seeds; the service through `Generate`, a message a token.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Result, Row
from benchmarks.services import services
from benchmarks.vllm_environment import vllm_python
from benchmarks.vllm_model import write_model
from turnwire.client import RolloutClient
from turnwire.v1.common_pb2 import SamplingParams

CONCURRENT = (64, 16, 1)
PROMPT_TOKENS = 64
TURNS, ACTION_TOKENS, OBSERVATION_TOKENS = 8, 16, 40

VLLM: dict[str, Any] = {"kind": "vllm", "max_model_tokens": 1024, "max_sequences": 64}
TRANSFORMERS: dict[str, Any] = {"max_model_tokens": 1024, "max_sequences": 64, "cached_sequences": 64}
SETTINGS: dict[str, Any] = {"eager": True, "kv_cache_gib": 2}


async def run(quick: bool) -> Result:
    tokens = 8 if quick else 64
    with tempfile.TemporaryDirectory(prefix="turnwire-bench-") as folder:
        model = write_model(Path(folder))
        offline = await _offline(model, tokens)
        rows: list[Row] = []
        async with _service(model, VLLM | {"vllm": SETTINGS}) as client:
            speeds = {count: await _speed(client, count, tokens) for count in CONCURRENT}
            cached = await _turns(client, 2 if quick else 16)
        async with _service(model, VLLM | {"vllm": SETTINGS | {"options": {"enable_prefix_caching": False}}}) as client:
            uncached = await _turns(client, 2)
        async with _service(model, TRANSFORMERS) as client:
            plain = {count: await _speed(client, count, tokens) for count in CONCURRENT}
    for count in CONCURRENT:
        rows += [
            {"side": "rollout service, vllm", "concurrent": count, "tokens/s": speeds[count]},
            {"side": "rollout service, transformers", "concurrent": count, "tokens/s": plain[count]},
            {"side": "vllm / transformers", "concurrent": count, "ratio": speeds[count] / plain[count]},
        ]
    rows += [
        {"side": "LLM.generate, offline", "concurrent": CONCURRENT[0], "tokens/s": offline},
        {"side": "service / offline", "concurrent": CONCURRENT[0], "ratio": speeds[CONCURRENT[0]] / offline},
    ]
    once = PROMPT_TOKENS + (TURNS - 1) * OBSERVATION_TOKENS
    for side, computed in (("vllm, prefix cache", cached), ("vllm, no prefix cache", uncached)):
        rows.append({"side": side, "prefill tokens/trajectory": computed, "each token once": once})
    notes = [
        f"A policy of 135 M random weights, float32. Prompts of {PROMPT_TOKENS} tokens, {tokens} sampled for each.",
        f"Turns: {TURNS}, each of {ACTION_TOKENS} sampled tokens, and {OBSERVATION_TOKENS} observed ones between them.",
        "Aims: the service at 0.95 of LLM.generate; each token computed once.",
    ]
    return Result("Generation: vLLM behind the service, alone, and the transformers engine", rows, notes, quick)


@asynccontextmanager
async def _service(model: str, engine: dict[str, Any]) -> AsyncIterator[RolloutClient]:
    interpreter = vllm_python() if engine.get("kind") == "vllm" else ""
    async with (
        services(sandboxes=1, engine=engine, model=model, interpreters={"rollout": interpreter}) as started,
        RolloutClient(started.targets["rollout"]) as client,
    ):
        await _speed(client, 2, 4)  # warm up
        yield client


def _prompts(count: int) -> list[list[int]]:
    """None begins as another does."""
    return [np.random.default_rng(number).integers(0, 49152, PROMPT_TOKENS).tolist() for number in range(count)]


async def _offline(model: str, tokens: int) -> float:
    """Tokens/s of `LLM.generate`, in a process of its own."""
    asked: dict[str, Any] = {
        "engine": VLLM | {"model": model, "vllm": SETTINGS},
        "prompts": _prompts(CONCURRENT[0]),
        "max_tokens": tokens,
        "output": f"{model}/offline.json",
    }
    process = await asyncio.create_subprocess_exec(
        *(vllm_python(), "-m", "benchmarks.offline_vllm"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    await process.communicate(json.dumps(asked).encode())
    if process.returncode:
        raise RuntimeError(f"benchmarks.offline_vllm ended with status {process.returncode}")
    generated, seconds = json.loads(await asyncio.to_thread(Path(asked["output"]).read_text))
    return float(generated / seconds)


async def _speed(client: RolloutClient, count: int, tokens: int) -> float:
    """Tokens/s with so many requests at once."""

    async def one(seed: int, prompt: list[int]) -> int:
        answer = await client.generate(prompt, tokens, sampling=SamplingParams(seed=seed))
        return len(answer.token_ids)

    begin = time.perf_counter()
    generated = await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(_prompts(count))))
    return sum(generated) / (time.perf_counter() - begin)


async def _turns(client: RolloutClient, trajectories: int) -> float:
    """Prompt tokens computed for a trajectory of several turns."""

    async def one(number: int) -> None:
        rng = np.random.default_rng(1000 + number)
        ids = rng.integers(0, 49152, PROMPT_TOKENS).tolist()
        for turn in range(TURNS):
            answer = await client.generate(ids, ACTION_TOKENS, sampling=SamplingParams(seed=turn))
            ids += [*answer.token_ids.tolist(), *rng.integers(0, 49152, OBSERVATION_TOKENS).tolist()]

    before = (await client.get_server_info()).tokens_prefilled_total
    await asyncio.gather(*map(one, range(trajectories)))
    return ((await client.get_server_info()).tokens_prefilled_total - before) / trajectories
