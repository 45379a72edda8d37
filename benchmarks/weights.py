"""New weights from the trainer to vLLM, by each transport, against a plain copy of the bytes; and what an update costs
requests that stream their tokens meanwhile: the longest wait for one.

The trainer's own publisher sends a policy of 135 M parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.generation import SETTINGS, VLLM
from benchmarks.report import Result, Row
from benchmarks.services import services
from benchmarks.vllm_environment import vllm_python
from benchmarks.vllm_model import write_model
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
        "trainer's weights to vLLM's answer, checksums and all, while nothing generates.",
        f"longest wait: for the next token of {REQUESTS} requests that stream theirs, with an update, after which vLLM "
        "computes what they have anew, and without.",
        "Aims: shm at 0.5 of a plain copy; requests stalled for less than 0.3 s and the time to load.",
    ]
    return Result("Weights from the trainer to vLLM", rows, notes, quick)


async def _measured(client: RolloutClient, publisher: WeightPublisher, rounds: int) -> Row:
    await publisher.start(0)
    figures = [await publisher.push(step) for step in range(1, rounds + 1)]
    waits: list[tuple[float, float]] = []
    for step in range(rounds + 1, 2 * rounds + 1):
        async with _streaming(client) as longest:
            await asyncio.sleep(3)
            without = await longest()
            await publisher.push(step)
            waits.append((await longest(), without))
    middle = {key: float(np.median([figure[key] for figure in figures])) for key in figures[0]}
    return {
        "seconds": middle["time/sync_seconds"],
        "of them to load": middle["sync/pause_seconds"],
        "longest wait": float(np.median([wait for wait, _ in waits])),
        "without": float(np.median([without for _, without in waits])),
        "GB/s": middle["sync/bytes"] / middle["time/sync_seconds"] / 1e9,
    }


@contextlib.asynccontextmanager
async def _streaming(client: RolloutClient) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """Requests that stream tokens; gives what waits for the next token of each, and tells the longest wait for one
    since it was last asked."""
    numbers = itertools.count()
    longest = 0.0
    came = [asyncio.Event() for _ in range(REQUESTS)]

    async def stream(token_came: asyncio.Event) -> None:
        nonlocal longest
        while True:
            prompt = np.random.default_rng(next(numbers)).integers(0, 49152, 32)
            last: float | None = None
            async for _ in client.generate_stream(prompt, 256, sampling=SamplingParams(seed=1)):
                now = time.perf_counter()
                longest = max(longest, now - last if last is not None else 0.0)
                last = now
                token_came.set()

    async def longest_since() -> float:
        nonlocal longest
        for event in came:
            event.clear()
        await asyncio.gather(*(event.wait() for event in came))
        found, longest = longest, 0.0
        return found

    async with asyncio.TaskGroup() as group:  # a request that an update ended ends the benchmark
        tasks = [group.create_task(stream(event)) for event in came]
        await longest_since()
        await longest_since()
        yield longest_since
        for task in tasks:
            task.cancel()


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
