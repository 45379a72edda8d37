"""Weights as an engine gets them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollout_service.staging import IncomingWeights, StagedWeights
from turnwire.torch_weights import specs_of, weight_tensors
from turnwire.weights import chunks


def staged(tensors: Mapping[str, torch.Tensor]) -> StagedWeights:
    """As they come in through a stream."""
    incoming = IncomingWeights(specs_of(tensors))
    for chunk in chunks([data for _, _, _, data in weight_tensors(tensors)]):
        incoming.add(chunk)
    return incoming.finish()
