"""New weights from the trainer to vLLM, by each transport, while requests generate; against a plain copy of the bytes.

The trainer's own publisher sends a policy of 135 M parameters. Requests stream their tokens all the while: the longest
wait for one is what an update costs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.generation import SETTINGS, VLLM
from benchmarks.report import Result, Row
from benchmarks.services import services
from benchmarks.vllm_model import vllm_python, write_model
from trainer_service.config import SHARED_MEMORY, ModelConfig, WeightsConfig
from trainer_service.policy import Policy
from trainer_service.publisher import WeightPublisher
from turnwire.client import RolloutClient
from turnwire.v1.common_pb2 import SamplingParams

REQUESTS = 16


async def run(quick: bool) -> Result:
    rounds = 1 if quick else 5
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="turnwire-bench-") as name:
        folder = Path(name)
        model = write_model(folder / "model")
        policy = await asyncio.to_thread(Policy, ModelConfig(path=model))
        async with (
            services(
                sandboxes=1, engine=VLLM | {"vllm": SETTINGS}, model=model, interpreters={"rollout": vllm_python()}
            ) as started,
            RolloutClient(started.targets["rollout"]) as client,
        ):
            for transport in ("grpc", "file", "shm"):
                config = msgspec.convert({"transport": transport}, WeightsConfig)
                publisher = WeightPublisher(
                    client, policy, config, folder=folder / transport, compute=asyncio.to_thread, notify=print
                )
                rows.append({"transport": transport} | await _measured(client, publisher, rounds))
                publisher.close()
        rows += _plain_copies(folder / "model" / "model.safetensors", rounds)
    plain = rows[-1]["GB/s"]
    for row in rows:
        row["of a plain copy"] = row["GB/s"] / plain
    notes = [
        "A policy of 135 M parameters in float32 to vLLM, in mode KEEP; the median of the rounds. seconds: from the "
        "trainer's weights to vLLM's answer, checksums and all.",
        f"longest wait: for the next token of {REQUESTS} requests that stream theirs, with an update and without.",
        "Aims: shm at 0.5 of a plain copy; requests stalled for less than 0.3 s and the time to load.",
    ]
    return Result("Weights from the trainer to vLLM", rows, notes, quick)


async def _measured(client: RolloutClient, publisher: WeightPublisher, rounds: int) -> Row:
    await publisher.start(0)
    figures: list[dict[str, float]] = []
    waits: list[tuple[float, float]] = []
    for step in range(1, rounds + 1):
        async with _streaming(client) as longest:
            await asyncio.sleep(3)
            without = longest()
            figures.append(await publisher.push(step))
            await asyncio.sleep(1)
            waits.append((longest(), without))
    middle = {key: float(np.median([figure[key] for figure in figures])) for key in figures[0]}
    return {
        "seconds": middle["time/sync_seconds"],
        "generation stood still": middle["sync/pause_seconds"],
        "longest wait": float(np.median([wait for wait, _ in waits])),
        "without": float(np.median([without for _, without in waits])),
        "GB/s": middle["sync/bytes"] / middle["time/sync_seconds"] / 1e9,
    }


@contextlib.asynccontextmanager
async def _streaming(client: RolloutClient) -> Any:
    """Requests that stream tokens; gives what tells the longest wait for one since it was last asked."""
    longest = 0.0
    numbers = itertools.count()

    async def stream() -> None:
        nonlocal longest
        while True:
            prompt = np.random.default_rng(next(numbers)).integers(0, 49152, 32)
            last: float | None = None
            async for _ in client.generate_stream(prompt, 256, sampling=SamplingParams(seed=1)):
                now = time.perf_counter()
                longest = max(longest, now - last if last is not None else 0.0)
                last = now

    def since() -> float:
        nonlocal longest
        found, longest = longest, 0.0
        return found

    tasks = [asyncio.create_task(stream()) for _ in range(REQUESTS)]
    try:
        await asyncio.sleep(2)
        since()
        yield since
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _plain_copies(source: Path, rounds: int) -> list[Row]:
    """A copy of the same bytes from one file of shared memory to another."""
    with tempfile.TemporaryDirectory(prefix="turnwire-bench-", dir=SHARED_MEMORY) as name:
        one, other = Path(name) / "one", Path(name) / "other"
        shutil.copyfile(source, one)
        seconds = []
        for _ in range(rounds):
            begin = time.perf_counter()
            shutil.copyfile(one, other)
            seconds.append(time.perf_counter() - begin)
            other.unlink()
        middle = float(np.median(seconds))
        return [{"transport": "a plain copy", "seconds": middle, "GB/s": one.stat().st_size / middle / 1e9}]
