"""What an engine's answers are compared with: plain forward passes of transformers' model, and its own samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rollout_service.engines.base import Ids, Logprobs, Sampling, VersionSpan
from turnwire.torch_weights import policy_tensors

TOLERANCE = 1e-4
EDGE = 1e-5


class Reference:
    """The model without cache, batch or packing, at any number of weight versions."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.weights = {0: {name: tensor.clone() for name, tensor in policy_tensors(self.model).items()}}

    def perturbed(self, version: int, scale: float = 0.3) -> dict[str, torch.Tensor]:
        """New weights, kept as `version`: the first ones with noise."""
        generator = torch.Generator().manual_seed(version)
        self.weights[version] = {
            name: tensor + scale * tensor.std().nan_to_num(0.1) * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self.weights[0].items()
        }
        return self.weights[version]

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, target in policy_tensors(self.model).items():
                target.copy_(tensors[name])

    @torch.no_grad()
    def logits(self, tokens: Ids, version: int = 0) -> torch.Tensor:
        """float32 [T, V] of one sequence."""
        self._load(self.weights[version])
        return self.model(input_ids=torch.tensor(tokens, dtype=torch.long)[None], use_cache=False).logits[0].float()

    def logprobs(self, tokens: Ids, sampling: Sampling, version: int = 0) -> torch.Tensor:
        """float32 [T, V]: row t is the sampling distribution of token t + 1."""
        scores = self.logits(tokens, version)
        if sampling.temperature != 1.0:
            scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
        if sampling.top_k:
            scores = TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p < 1.0:
            scores = TopPLogitsWarper(sampling.top_p)(None, scores)
        return torch.log_softmax(scores, dim=-1)

    def check(
        self, prompt: Ids, sampled: Ids, logprobs: Logprobs, sampling: Sampling, spans: Sequence[VersionSpan]
    ) -> None:
        """Each sampled token's logprob must be that of a fresh pass under the version that its span names.

        Where rounding decides whether the last token of a nucleus is in it, both are right: a top p that is a hair
        smaller or larger may be what agrees.
        """
        assert len(logprobs) == len(sampled) == (spans[-1].end if spans else 0)
        tokens, gap = np.concatenate([prompt, sampled]), np.full(len(sampled), np.inf)
        for edge in (0.0, -EDGE, EDGE) if sampling.top_p < 1.0 else (0.0,):
            nearby = replace(sampling, top_p=min(1.0, max(1e-9, sampling.top_p + edge)))
            for span in spans:
                rows = self.logprobs(tokens, nearby, span.version)
                for place in range(span.start, span.end):
                    wanted = float(rows[len(prompt) + place - 1, int(sampled[place])])
                    gap[place] = min(gap[place], abs(float(logprobs[place]) - wanted))
        assert gap.max(initial=0.0) <= TOLERANCE, f"off by {gap.max()} at {gap.argmax()}"
