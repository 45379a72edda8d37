"""vLLM's processes die, and updates fail half-way: what is in flight fails, and vLLM serves again with its weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from engine_conformance import collect, ids, job, until_tokens, update
from engine_reference import Reference
from staged import staged
from tiny_models import make_model
from vllm_engines import vllm_engine
from waiting import PROGRAM, eventually

from rollout_service.engines.base import Engine, Sampling, UpdateMode
from turnwire.errors import InfraError, UnavailableError

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama", head_dim=32)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[Engine]:
    """One for all, which are in this order."""
    async with vllm_engine(folder) as engine:
        yield engine


def engine_processes() -> list[psutil.Process]:
    """vLLM's that run: they bear its name."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("VLLM") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_vllm() -> None:
    killed = engine_processes()
    assert killed
    for process in killed:
        process.kill()


async def assert_weights(engine: Engine, reference: Reference, version: int) -> None:
    """What it generates is of this version, and has its logprobs."""
    prompt = ids(20, version)
    answer = await collect(engine, job("after", prompt, 12, Sampling(seed=version)))
    assert [span.version for span in answer.spans] == [version]
    reference.check(prompt, answer.token_ids, answer.logprobs, Sampling(), answer.spans)
    assert (await engine.weight_info()).version == version


async def test_an_engine_that_is_killed_fails_its_requests_and_serves_again_with_its_weights(
    engine: Engine, reference: Reference
) -> None:
    await update(engine, reference.perturbed(5), 5, UpdateMode.KEEP)
    running = [asyncio.create_task(collect(engine, job(str(n), ids(9 + n), 200, Sampling(seed=n)))) for n in range(8)]
    await until_tokens(engine, 40)
    kill_vllm()
    for request in running:
        with pytest.raises(InfraError, match="died"):
            await request
    assert engine.info().trouble
    await assert_weights(engine, reference, 5)  # it waited
    assert not engine.info().trouble
    assert engine.info().failures == 1


async def test_a_paused_engine_that_is_killed_is_paused_again(engine: Engine, reference: Reference) -> None:
    """And that it is dead is seen though nobody asks it for anything."""
    await engine.pause()
    kill_vllm()
    await eventually(lambda: bool(engine.info().trouble), PROGRAM)
    waiting = asyncio.create_task(assert_weights(engine, reference, 5))
    await eventually(lambda: not engine.info().trouble, PROGRAM)
    assert engine.info().paused
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await engine.resume()
    await waiting


async def test_an_update_that_fails_half_way_leaves_the_old_weights(
    engine: Engine, reference: Reference, tmp_path: Path
) -> None:
    running = asyncio.create_task(collect(engine, job("a", ids(9), 200)))
    await until_tokens(engine, 5)
    with contextlib.closing(staged(reference.perturbed(8))) as weights:
        whole = weights.path.read_bytes()
        half = tmp_path / "half"
        half.write_bytes(whole[: len(whole) // 2])
        descriptor = os.open(half, os.O_RDONLY)
        os.dup2(descriptor, int(weights.path.name))
        os.close(descriptor)
        with pytest.raises(InfraError, match="version 8 could not be put in place, vLLM is started again with 5"):
            await engine.apply_weights(weights, 8, UpdateMode.KEEP)
    with pytest.raises(InfraError):
        await running
    await update(engine, reference.perturbed(8), 8, UpdateMode.KEEP)  # waits for it
    await assert_weights(engine, reference, 8)


async def test_one_that_is_killed_under_an_update_can_be_closed_while_it_is_being_started(
    engine: Engine, reference: Reference
) -> None:
    running = asyncio.create_task(collect(engine, job("a", ids(9), 240)))
    await until_tokens(engine, 5)
    updating = asyncio.create_task(update(engine, reference.perturbed(9), 9, UpdateMode.WAIT))
    await asyncio.sleep(0)
    kill_vllm()
    for failing in (updating, running):
        with pytest.raises(InfraError):
            await failing
    assert (await engine.weight_info()).version == 8
    waiting = asyncio.create_task(collect(engine, job("b", ids(9), 5)))
    await asyncio.sleep(0.5)
    await engine.close()
    with pytest.raises(UnavailableError):
        await waiting
    await eventually(lambda: not engine_processes(), PROGRAM)
