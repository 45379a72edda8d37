"""Sampling for a whole batch at once, with parameters of its own for each row. Pure functions.

One uniform a token, from a counter-based generator (SplitMix64 over seed and position), turned into a token by the
inverse of the cumulative distribution in token order. So a request's randomness depends on its seed and position alone.
"""

# ruff: noqa: N803, N806 - names carry their shapes, as tokens_BT

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniforms(seeds_B: npt.NDArray[np.uint64], positions_B: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64 [B] in [0, 1): the `position`-th number of each seed's stream."""
    with np.errstate(over="ignore"):
        states = _mix(seeds_B) + (positions_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def process(
    logits_BV: torch.Tensor,
    temperature_B: npt.NDArray[np.float32],
    top_k_B: npt.NDArray[np.int64],
    top_p_B: npt.NDArray[np.float32],
) -> torch.Tensor:
    """float32 logits [B, V] to those of the sampling distribution: temperature, then top k, then top p.

    Rows with temperature 0 are left at temperature 1: the caller takes their maximum. What is cut is -inf. Ties at the
    k-th place all stay.
    """
    if (temperature_B != 1.0).any():
        scale_B = np.where(temperature_B == 0.0, np.float32(1.0), temperature_B)
        logits_BV = logits_BV / torch.from_numpy(scale_B)[:, None]
    vocabulary = logits_BV.shape[1]
    cut_k = np.flatnonzero((top_k_B > 0) & (top_k_B < vocabulary) & (temperature_B > 0.0))
    cut_p = np.flatnonzero((top_p_B < 1.0) & (temperature_B > 0.0))
    if not cut_k.size and not cut_p.size:
        return logits_BV
    logits_BV = logits_BV.clone()
    if cut_k.size:
        rows = torch.from_numpy(cut_k)
        part = logits_BV[rows]
        k = torch.from_numpy(top_k_B[cut_k])
        highest = torch.topk(part, int(k.max()), dim=-1).values
        logits_BV[rows] = part.masked_fill(part < highest.gather(1, k[:, None] - 1), -torch.inf)
    if cut_p.size:
        rows = torch.from_numpy(cut_p)
        part = logits_BV[rows]
        ordered, order = torch.sort(part, dim=-1, descending=True, stable=True)
        probabilities = torch.softmax(ordered, dim=-1)
        before = probabilities.cumsum(-1) - probabilities  # mass of the tokens that come first
        beyond = before >= torch.from_numpy(top_p_B[cut_p])[:, None]
        beyond[:, 0] = False
        logits_BV[rows] = part.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -torch.inf)
    return logits_BV


def sample(
    logits_BV: torch.Tensor,
    temperature_B: npt.NDArray[np.float32],
    top_k_B: npt.NDArray[np.int64],
    top_p_B: npt.NDArray[np.float32],
    uniform_B: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Tokens int64 [B] and their logprobs float32 [B] under the sampling distribution (0 where greedy)."""
    logprobs_BV = torch.log_softmax(process(logits_BV, temperature_B, top_k_B, top_p_B), dim=-1)
    cumulative_BV = torch.cumsum(logprobs_BV.exp(), dim=-1, dtype=torch.float64)
    total_B = cumulative_BV[:, -1]
    target_B = torch.minimum(torch.from_numpy(uniform_B) * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    tokens_B = torch.searchsorted(cumulative_BV, target_B[:, None], right=True).squeeze(1)
    greedy = temperature_B == 0.0
    if greedy.any():
        rows = torch.from_numpy(np.flatnonzero(greedy))
        tokens_B[rows] = logits_BV[rows].argmax(-1)
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1).numpy()
    if greedy.any():
        chosen_B[greedy] = 0.0
    return tokens_B.numpy(), chosen_B
