"""The vLLM engine: the conformance suite on one running engine, brought back to its first weights after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from engine_conformance import EngineConformance, update
from engine_reference import Reference
from tiny_models import make_model
from vllm_engines import vllm_engine

from rollout_service.engines.base import Engine, UpdateMode

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=["llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param, head_dim=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(folder: Path) -> AsyncIterator[Engine]:
    async with vllm_engine(folder) as engine:
        yield engine


class TestVllmEngine(EngineConformance):
    block_tokens = 32

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, running: Engine, reference: Reference) -> AsyncIterator[Engine]:
        yield running
        if running.info().paused:
            await running.resume()
        if (await running.weight_info()).version:
            await update(running, reference.weights[0], 0, UpdateMode.KEEP)
