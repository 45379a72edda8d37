"""What is trained on: sequences as the engine sampled them, a batch of them as matrices, and its micro-batches.

Invariants: token ids are those of the trajectory, never decoded and tokenized again; the mask is as long as the tokens
and 0 on the prompt and on observations; a sequence keeps its row in a batch, whatever micro-batch computes it.

Shapes: T tokens of a sequence; B sequences; R longest response; b, L, r the same of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwire.errors import InvalidRequestError
from turnwire.tensors import from_tensor
from turnwire.v1 import rollout_pb2


@dataclass(frozen=True)
class TokenSequence:
    """One segment: token_ids int32 [T], mask uint8 [T] (1: sampled by the policy), logprobs float32 [T] (0
    elsewhere).
    """

    token_ids: npt.NDArray[np.int32]
    prompt_length: int
    mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def from_segment(cls, segment: rollout_pb2.Segment) -> TokenSequence:
        """Decode and check what came over the wire. Raises InvalidRequestError if its parts do not fit each other."""
        ids = from_tensor(segment.token_ids, np.int32)
        mask = from_tensor(segment.loss_mask, np.uint8)
        logprobs = from_tensor(segment.logprobs, np.float32)
        if not ids.shape == mask.shape == logprobs.shape or ids.ndim != 1:
            raise InvalidRequestError(f"segment of {ids.shape} tokens, mask {mask.shape}, logprobs {logprobs.shape}")
        if not 0 < segment.prompt_length <= len(ids) or mask[: segment.prompt_length].any() or (mask > 1).any():
            raise InvalidRequestError("a segment's mask must be 0 on its prompt and 0 or 1 elsewhere")
        if not np.isfinite(logprobs).all():
            raise InvalidRequestError("a segment's logprobs must be finite")
        return cls(ids, int(segment.prompt_length), mask, logprobs)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def response_length(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.prompt_length

    @property
    def input_length(self) -> int:
        """Tokens that the model must read to predict every sampled one: all before the last of them."""
        return int(np.flatnonzero(self.mask)[-1])

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return int(self.mask.sum())


class SequenceBatch:
    """Sequences and their responses as matrices of shape (B, R), zero-padded on the right."""

    def __init__(self, sequences: Sequence[TokenSequence]) -> None:
        if not sequences:
            raise ValueError("a batch needs a sequence")
        self.sequences = tuple(sequences)

    @cached_property
    def longest_response(self) -> int:
        """R, at least 1."""
        return max(1, *(sequence.response_length for sequence in self.sequences))

    @cached_property
    def mask_BR(self) -> Tensor:
        """float32, 1 on sampled tokens."""
        return self._matrix([sequence.mask for sequence in self.sequences])

    @cached_property
    def rollout_logprobs_BR(self) -> Tensor:
        """float32, of the distribution that the engine sampled from; 0 where the mask is 0."""
        return self._matrix([sequence.logprobs * sequence.mask for sequence in self.sequences])

    def _matrix(self, rows: list[npt.NDArray[Any]]) -> Tensor:
        matrix = np.zeros((len(rows), self.longest_response), np.float32)
        for number, (row, sequence) in enumerate(zip(rows, self.sequences, strict=True)):
            matrix[number, : sequence.response_length] = row[sequence.prompt_length :]
        return torch.from_numpy(matrix)

    def micro_batches(
        self, rows: Sequence[int], tokens: int, device: torch.device, shares: int = 1
    ) -> list[MicroBatch]:
        """The given rows (those with a sampled token), longest first, at most `tokens` padded tokens in each piece, and
        at most as many rows as each of `shares` ranks has to do.
        """
        lengths = {row: self.sequences[row].input_length for row in rows if self.sequences[row].sampled_tokens}
        order = sorted(lengths, key=lambda row: -lengths[row])
        most = -(-len(order) // shares)
        pieces: list[list[int]] = []
        for row in order:
            if pieces and len(pieces[-1]) < most and lengths[pieces[-1][0]] * (len(pieces[-1]) + 1) <= tokens:
                pieces[-1].append(row)
            else:
                pieces.append([row])
        return [MicroBatch(self, piece, device) for piece in pieces]


class MicroBatch:
    """Some rows of a batch, padded on the right to the longest of them.

    Padding needs no attention mask: under causal attention no real token sees what stands to its right.
    `source` are the flat positions, among the logits that are kept, that predict the sampled tokens; `target` are the
    flat positions of those tokens in a matrix of shape (b, r); `labels` the tokens themselves.
    """

    def __init__(self, batch: SequenceBatch, rows: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.rows = torch.tensor(list(rows))
        sequences = [batch.sequences[row] for row in rows]
        longest = max(sequence.input_length for sequence in sequences)
        self.tokens = longest * len(sequences)
        self.width = max(sequence.response_length for sequence in sequences)
        first = min(sequence.prompt_length for sequence in sequences) - 1
        self.kept_logits = longest - first
        ids = np.zeros((len(sequences), longest), np.int64)
        source, target, labels = [], [], []
        for number, sequence in enumerate(sequences):
            ids[number, : sequence.input_length] = sequence.token_ids[: sequence.input_length]
            positions = np.flatnonzero(sequence.mask)
            source.append(number * self.kept_logits + positions - 1 - first)
            target.append(number * self.width + positions - sequence.prompt_length)
            labels.append(sequence.token_ids[positions].astype(np.int64))
        self.input_ids = torch.from_numpy(ids).to(device)
        self.source = torch.from_numpy(np.concatenate(source)).to(device)
        self.target = torch.from_numpy(np.concatenate(target)).to(device)
        self.labels = torch.from_numpy(np.concatenate(labels)).to(device)

    def slice(self, matrix_BR: Tensor) -> Tensor:
        """This micro-batch's part of a batch matrix: (b, r), on its device."""
        return matrix_BR[self.rows, : self.width].to(self.device)

    def scatter(self, values: Tensor) -> Tensor:
        """Values of the sampled tokens as a matrix of shape (b, r), 0 elsewhere; differentiable."""
        flat = torch.zeros(len(self.rows) * self.width, dtype=values.dtype, device=values.device)
        return flat.index_put((self.target,), values).view(len(self.rows), self.width)

    def gather_into(self, matrix_BR: Tensor, values: Tensor) -> None:
        """Write a (b, r) result to its rows of a batch matrix on the CPU."""
        matrix_BR[self.rows, : self.width] = values.to("cpu", matrix_BR.dtype)
