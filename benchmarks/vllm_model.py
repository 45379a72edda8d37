"""A policy of the size of SmolLM2-135M for benchmarks of vLLM: random weights, so that nothing has to be downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.services import MODEL


def write_model(folder: Path) -> str:
    """The folder, with a model of 135 M parameters in float32 that no token ends, and the tiny policy's tokenizer."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").unlink()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
