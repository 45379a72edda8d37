"""vLLM as these tests run it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rollout_service.build import build_engine
from rollout_service.config import EngineConfig, VllmConfig
from rollout_service.engines.base import Engine

VLLM: dict[str, Any] = {"eager": True, "kv_cache_gib": 1}


@contextlib.asynccontextmanager
async def vllm_engine(folder: Path) -> AsyncIterator[Engine]:
    """An engine on a model folder, started."""
    engine = build_engine(EngineConfig(kind="vllm", model=str(folder), max_sequences=64, vllm=VllmConfig(**VLLM)))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
