"""The model of the transformers engine: loading it, one forward pass over a packed batch, its weights."""

# ruff: noqa: N803 - names carry their shapes, as tokens_BT

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from rollout_service.config import EngineConfig
from rollout_service.engines.base import Ids, Logprobs
from rollout_service.engines.slots import ATTENTION, Chunk, SlotCache, StepLayout
from turnwire.errors import ConfigError, Problem, TurnwireError, UnsupportedError
from turnwire.torch_weights import policy_tensors

logger = logging.getLogger(__name__)

DEFAULT_LONGEST = 4096
"""max_model_tokens where the config names none and the model allows more."""

SELF_CHECK_TOKENS = 12
SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
SCORE_TOKENS_A_PASS = 2048

Ints = Any


class Runner:
    """A causal language model whose attention is ours. Raises ConfigError if the model cannot be used here."""

    def __init__(self, config: EngineConfig) -> None:
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        transformers.utils.logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(config.model, dtype=self.dtype, attn_implementation=ATTENTION)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError([Problem("engine.model", f"{config.model} cannot be loaded: {error}")]) from error
        self.model = model.eval().requires_grad_(False)
        shape = model.config.get_text_config()
        self.vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        heads = shape.num_attention_heads
        kv_heads = getattr(shape, "num_key_value_heads", None) or heads
        self.groups = heads // kv_heads
        allowed = int(shape.max_position_embeddings)
        self.longest = config.max_model_tokens or min(allowed, DEFAULT_LONGEST)
        if self.longest > allowed:
            raise ConfigError([Problem("engine.max_model_tokens", f"is above what the model allows ({allowed})")])
        window = getattr(shape, "sliding_window", None) if getattr(shape, "use_sliding_window", True) else None
        if window is not None and window < self.longest:
            raise ConfigError(
                [Problem("engine.max_model_tokens", f"the model attends to {window} tokens only; set it to {window}")]
            )
        head_size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        self._check_memory(config, 2 * shape.num_hidden_layers * kv_heads * head_size * self.dtype.itemsize)
        self.cache = SlotCache(
            shape.num_hidden_layers, config.cached_sequences, kv_heads, self.longest, head_size, self.dtype
        )
        self.weights = policy_tensors(self.model)
        eos = self.model.generation_config.eos_token_id
        eos = shape.eos_token_id if eos is None else eos
        self.end_ids = frozenset([] if eos is None else eos if isinstance(eos, list) else [eos])
        self._self_check()

    def _check_memory(self, config: EngineConfig, token_bytes: int) -> None:
        need = token_bytes * self.longest * config.cached_sequences
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if need > have:
            fits = have // 2 // token_bytes // self.longest
            raise ConfigError(
                [
                    Problem(
                        "engine.cached_sequences",
                        f"a cache of {config.cached_sequences} sequences of {self.longest} tokens takes "
                        f"{need / 2**30:.1f} GiB, more than this machine has; use at most {fits}, "
                        "or a smaller engine.max_model_tokens",
                    )
                ]
            )

    @torch.inference_mode()
    def _self_check(self) -> None:
        """The packed, cached forward pass must give what the model gives by itself."""
        count = min(SELF_CHECK_TOKENS, self.longest)
        ids = np.arange(count, dtype=np.int32) * 7919 % self.vocabulary
        self.model.set_attn_implementation("eager")
        plain = self.model(input_ids=torch.from_numpy(ids)[None].long(), use_cache=False).logits[0].float()
        self.model.set_attn_implementation(ATTENTION)
        row = np.zeros(1, np.int64)
        first = count // 2
        parts = []
        try:
            chunk = [Chunk(row=0, first=0, start=0, count=first)]
            layout = StepLayout(self.cache, row[:0], row[:0], chunk, self.groups, self.dtype)
            parts.append(self.forward(ids[:first], np.arange(first), np.arange(first), layout))
            for place in range(first, count):
                layout = StepLayout(self.cache, row, row + place + 1, [], self.groups, self.dtype)
                parts.append(self.forward(ids[place : place + 1], row + place, row, layout))
        except (UnsupportedError, TypeError, ValueError) as error:
            raise ConfigError(
                [Problem("engine.model", f"this engine cannot run {type(self.model).__name__}: {error}")]
            ) from error
        gap = float((torch.cat(parts) - plain).abs().max())
        if not gap <= SELF_CHECK_TOLERANCE[self.dtype]:
            raise ConfigError(
                [
                    Problem(
                        "engine.model",
                        f"logits of {type(self.model).__name__} from the cache differ by {gap:.2g} from those of a "
                        "plain forward pass; this engine supports decoders with full causal attention",
                    )
                ]
            )

    def forward(self, ids_T: Ids, positions_T: Ints, wanted: Ints, layout: StepLayout) -> torch.Tensor:
        """float32 logits [len(wanted), V] at the packed positions `wanted`."""
        logits: torch.Tensor = self.model(
            input_ids=torch.from_numpy(ids_T)[None].long(),
            position_ids=torch.from_numpy(positions_T)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(wanted),
            slots=layout,
        ).logits
        return logits[0].float()

    def score(self, sequences: Sequence[Ids]) -> list[Logprobs]:
        """float32 [T - 1] a sequence: logprobs at temperature 1, without the cache."""
        results: list[Logprobs] = []
        batch: list[Ids] = []
        for sequence in sequences:
            if batch and sum(map(len, batch)) + len(sequence) > SCORE_TOKENS_A_PASS:
                results.extend(self._score(batch))
                batch = []
            batch.append(sequence)
        return results + (self._score(batch) if batch else [])

    def _score(self, batch: list[Ids]) -> list[Logprobs]:
        sizes = [len(sequence) for sequence in batch]
        firsts = np.cumsum([0, *sizes[:-1]])
        chunks = [Chunk(-1, int(first), 0, size) for first, size in zip(firsts, sizes, strict=True)]
        none = np.zeros(0, np.int64)
        layout = StepLayout(None, none, none, chunks, self.groups, self.dtype)
        positions = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
        ids = np.concatenate(batch)
        logprobs = torch.log_softmax(self.forward(ids, positions, np.arange(len(ids)), layout), dim=-1)
        following = torch.from_numpy(np.roll(ids, -1)).long()
        chosen = logprobs.gather(1, following[:, None]).squeeze(1).numpy()
        return [chosen[first : first + size - 1].copy() for first, size in zip(firsts, sizes, strict=True)]

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the weights. The tensors have been checked: nothing here can fail half-way."""
        try:
            for name, target in self.weights.items():
                target.copy_(tensors[name])
        except (KeyError, RuntimeError) as error:
            raise TurnwireError(f"weights reached the engine unchecked: {error}") from error
