"""What vLLM is started with, from a config: tests of settings alone, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_service.config import EngineConfig, VllmConfig
from turnwire.errors import ConfigError

pytestmark = pytest.mark.needs("vllm")


def arguments(**settings: Any) -> dict[str, Any]:
    from rollout_service.engines.vllm_api import arguments  # noqa: PLC0415 - another environment's

    return arguments(EngineConfig(kind="vllm", model="a-model", vllm=VllmConfig(**settings)))


@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        ({}, 4),
        ({"kv_cache_gib": 1.5}, 1.5),
        ({"options": {"kv_cache_memory_bytes": 3 * 2**30}}, 3),
        ({"options": {"gpu_memory_utilization": 0.3}}, None),
    ],
    ids=["nothing", "an amount", "vLLM's own argument", "a share"],
)
def test_on_a_cpu_the_cache_leaves_memory_to_others(settings: dict[str, Any], gib: float | None) -> None:
    """vLLM's own default is nine tenths of the machine's."""
    found = arguments(**settings)
    assert found.get("kv_cache_memory_bytes") == (None if gib is None else gib * 2**30)
    assert found.get("gpu_memory_utilization") == settings.get("options", {}).get("gpu_memory_utilization")


def test_an_option_that_a_setting_of_ours_stands_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"options: max_model_len, model: set by Turnwire's own settings"):
        arguments(options={"model": "another", "max_model_len": 5, "seed": 3})
