"""The transformers engine: the conformance suite on three architectures, and what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.config import EngineConfig
from rollout_service.engines.base import Sampling
from rollout_service.engines.transformers_engine import TransformersEngine
from engine_conformance import EngineConformance, collect, ids, job, until_tokens
from tiny_models import make_model
from engine_reference import Reference
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
