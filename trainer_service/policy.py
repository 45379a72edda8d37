"""The policy: a transformers causal language model, its logprobs under the sampling temperature, and its weights to
send.

Only positions that predict a sampled token reach the softmax, so a prompt or an observation token cannot have a
gradient. Weights are kept in float32. On a GPU the forward pass computes in bfloat16 through autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from trainer_service.batch import MicroBatch
from trainer_service.config import ModelConfig
from trainer_service.ranks import ALONE, Ranks, together
from trainer_service.sharding import shard, whole, whole_model
from turnwire.errors import ConfigError, Problem
from turnwire.torch_weights import policy_tensors


@dataclass(frozen=True)
class TokenValues:
    """Of the sampled tokens of a micro-batch, in matrices of shape (b, r) that are 0 elsewhere.

    logprobs: under the sampling temperature; has the gradient. entropy: of the distribution it was drawn from.
    sum_pi_squared: sum over the vocabulary of squared probabilities, where asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor | None = None


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU, if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


class Policy:
    """A causal language model, on one device or sharded over the devices of all ranks."""

    def __init__(self, config: ModelConfig, path: Path | None = None, ranks: Ranks = ALONE) -> None:
        """Load from `path`, or from where the config says; rank 0 does. Raises ConfigError where there is no model."""
        self.ranks = ranks
        self.device = choose_device(config.device)
        computes = {"auto": torch.bfloat16 if self.device.type == "cuda" else torch.float32}
        self.dtype = computes.get(config.dtype) or getattr(torch, config.dtype)
        self.model: Any = self._load(config, str(path or config.path))
        self.model.config.use_cache = False
        # Dropout would make the logprobs of the update differ from those of sampling: the model stays in eval mode,
        # except where gradient checkpointing, which transformers ties to training mode, asks for it.
        self.model.train(config.gradient_checkpointing)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()

    def _load(self, config: ModelConfig, source: str) -> Any:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": config.attention}

        def load() -> Any:
            try:
                return AutoModelForCausalLM.from_pretrained(source, **options)
            except (OSError, ValueError, ImportError) as error:
                raise ConfigError([Problem("model.path", f"cannot load {source!r}: {error}")], "run") from error

        if self.ranks.size == 1:
            return load().to(self.device)
        loaded: list[Any] = []

        def load_first() -> Any:
            loaded.append(load())
            return loaded[0].config

        described = self.ranks.from_first(load_first)
        with torch.device("meta"):
            model = loaded[0] if loaded else AutoModelForCausalLM.from_config(described, **options)
        shard(model, self.ranks, self.device)
        return model

    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def parameter_count(self) -> int:
        """Numbers in the model, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def values(
        self, micro: MicroBatch, temperature: float, *, entropy_gradient: bool = False, squared: bool = False
    ) -> TokenValues:
        """Forward pass over a micro-batch."""
        with self._computing():
            logits = self.model(input_ids=micro.input_ids, logits_to_keep=micro.kept_logits, use_cache=False).logits
        chosen = logits.flatten(0, 1)[micro.source].float() / temperature
        logprobs = -functional.cross_entropy(chosen, micro.labels, reduction="none")
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            all_logprobs = torch.log_softmax(chosen if entropy_gradient else chosen.detach(), dim=-1)
            probabilities = all_logprobs.exp()
            entropy = -(probabilities * all_logprobs).sum(-1)
            squares = probabilities.square().sum(-1) if squared else None
        return TokenValues(
            micro.scatter(logprobs), micro.scatter(entropy), None if squares is None else micro.scatter(squares)
        )

    @together("policy.score")
    @torch.no_grad()
    def score(self, sequences: Sequence[npt.NDArray[np.integer[Any]]]) -> list[npt.NDArray[np.float32]]:
        """Logprobs at temperature 1 of each token given those before it: float32 [T - 1] a sequence, as the engine's
        Score.
        """
        result = []
        for sequence in sequences:
            ids = torch.as_tensor(np.asarray(sequence, np.int64), device=self.device)[None]
            with self._computing():
                logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            result.append((-functional.cross_entropy(logits, ids[0, 1:], reduction="none")).cpu().numpy())
        return result

    @together("policy.export")
    def export(self) -> dict[str, Tensor]:
        """The weights on the CPU, tied ones once, in the type the model computes in. They may share memory with the
        model: copy what must outlive the next update. Other ranks than 0 get their names alone."""
        tensors = policy_tensors(self.model)
        return {
            name: whole(tensor.to(self.dtype if tensor.is_floating_point() else tensor.dtype)).to("cpu").contiguous()
            for name, tensor in tensors.items()
        }

    def save(self, folder: Path) -> None:
        """Write a transformers checkpoint, in float32."""
        self.model.save_pretrained(folder, state_dict=self.state())

    @together("policy.state")
    def state(self) -> dict[str, Tensor]:
        """The model's state, in float32; other ranks than 0 get its names alone."""
        return whole_model(self.model)
