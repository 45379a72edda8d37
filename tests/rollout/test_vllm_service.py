"""The service over gRPC with the engine `vllm`: the cases that hold on every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rollout_harness import Running, rollouts
from service_conformance import ServiceConformance
from tiny_models import TINY, make_model
from vllm_engines import VLLM

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=TINY, head_dim=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(folder: Path) -> AsyncIterator[Running]:
    engine = {"kind": "vllm", "threads": None, "max_sequences": 64, "vllm": VLLM}
    async with rollouts(folder, engine=engine) as service:
        yield service


class TestVllmService(ServiceConformance):
    kind = "vllm"
    scores_while_paused = False
