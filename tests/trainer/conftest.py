"""What the trainer's tests share: a random policy so small that a step takes milliseconds, and configs that use it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from service_processes import ServiceForker

TINY_POLICY = Path(__file__).parents[2] / "examples" / "tiny_policy" / "model"

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 60 thousand parameters with the shipped policy's tokenizer and chat template."""
    import torch  # noqa: PLC0415 - some of these tests need no torch
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=112,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_POLICY / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceForker]:
    """Starts services as processes."""
    from service_processes import ServiceForker  # noqa: PLC0415 - found by the path that is set above

    with ServiceForker(tmp_path_factory.mktemp("services")) as forker:
        yield forker


@pytest.fixture(scope="module")
def rollout(forker: ServiceForker, model_path: Path) -> str:
    """The address of a rollout service with tools, for all runs in turn."""
    from service_processes import rollout_values, tool_values  # noqa: PLC0415 - as above

    tools = forker.start("tool_service", tool_values())
    return forker.start("rollout_service", rollout_values(model_path, tools.address)).address
