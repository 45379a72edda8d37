"""Which tokens the next step computes: one each for sequences that decode, and chunks of those with more to catch up.

A sequence has `known` tokens, of which `cached` are computed; the step that computes the last one samples the next. New
prompts, observations and what a weight update made void are all the same to it: known tokens that are not cached yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from rollout_service.engines.base import GenerateStop, Ids
from rollout_service.engines.requests import Request
from rollout_service.engines.rows import ACTIVE, Ints, Rows
from rollout_service.engines.sampling import uniforms
from rollout_service.engines.slots import Chunk


@dataclass(frozen=True)
class Step:
    """Packed ids and positions [T]; the rows that sample, and the packed positions of their logits."""

    ids: Ids
    positions: Ints
    decode_rows: Ints
    chunks: list[Chunk]
    sample_rows: Ints
    wanted: Ints

    @property
    def prefilled(self) -> int:
        """Tokens computed that were not just sampled."""
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Admits requests to rows, plans steps, and takes in what they sampled."""

    def __init__(self, rows: Rows, max_sequences: int, prefill_tokens: int) -> None:
        self.rows = rows
        self.waiting: deque[Request] = deque()
        self.version = 0
        self._max_sequences = max_sequences
        self._prefill_tokens = prefill_tokens

    def admit(self) -> None:
        """Move waiting requests into rows, in order, as far as there is room."""
        free = self._max_sequences - self.rows.active if self.waiting else 0
        while self.waiting and free > 0:
            request = self.waiting.popleft()
            if not request.done:
                request.mark(0, self.version)
                self.rows.admit(request)
                free -= 1

    def plan(self) -> Step | None:
        """The next step; None when nothing generates."""
        rows = self.rows
        active = np.flatnonzero(rows.state == ACTIVE)
        if not active.size:
            return None
        missing = rows.known[active] - rows.cached[active]
        decode = active[missing == 1]
        chunks = self._chunks(active[missing > 1], len(decode))
        places = rows.cached[decode]
        ids, positions = [rows.tokens[decode, places]], [places]
        sample_rows, wanted = [decode], [np.arange(len(decode))]
        for chunk in chunks:
            end = chunk.start + chunk.count
            ids.append(rows.tokens[chunk.row, chunk.start : end])
            positions.append(np.arange(chunk.start, end))
            if end == rows.known[chunk.row]:
                sample_rows.append(np.array([chunk.row]))
                wanted.append(np.array([chunk.first + chunk.count - 1]))
        return Step(
            np.concatenate(ids),
            np.concatenate(positions),
            decode,
            chunks,
            np.concatenate(sample_rows),
            np.concatenate(wanted),
        )

    def _chunks(self, behind: Ints, first: int) -> list[Chunk]:
        rows, chunks, budget = self.rows, list[Chunk](), self._prefill_tokens
        ahead: list[int] = []
        for row in behind[rows.order[behind].argsort()].tolist():
            if budget <= 0:
                break
            if rows.may_share[row] and not rows.share(row, ahead):
                continue
            start = int(rows.cached[row])
            count = min(int(rows.known[row]) - start, budget)
            chunks.append(Chunk(row, first, start, count))
            ahead.append(row)
            first += count
            budget -= count
        return chunks

    def draw(self, step: Step) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """One uniform for each row that samples."""
        rows = self.rows
        return uniforms(
            rows.seed[step.sample_rows], rows.known[step.sample_rows] - rows.prompt_length[step.sample_rows]
        )

    def advance(self, step: Step, tokens: Ints, logprobs: np.ndarray[tuple[int], np.dtype[np.float32]]) -> list[int]:
        """Take in a step's tokens. Returns the rows whose request is over; `request.stop` says why."""
        rows = self.rows
        rows.cached[step.decode_rows] += 1
        for chunk in step.chunks:
            rows.cached[chunk.row] = chunk.start + chunk.count
        places = rows.known[step.sample_rows]
        rows.tokens[step.sample_rows, places] = tokens
        rows.logprobs[step.sample_rows, places] = logprobs
        rows.known[step.sample_rows] = places + 1
        return [
            row
            for row, token, known in zip(step.sample_rows.tolist(), tokens.tolist(), (places + 1).tolist(), strict=True)
            if self._over(row, token, known)
        ]

    def _over(self, row: int, token: int, known: int) -> bool:
        request = self.rows.request_of(row)
        if token in request.stop_ids:
            request.stop = GenerateStop.END_OF_TURN
        elif (
            request.matcher is not None
            and request.matcher.completes[token]
            and request.matcher.matches(self.generated(row)[0])
        ):
            request.stop = GenerateStop.STRING
        elif known >= request.limit:
            request.stop = GenerateStop.LENGTH
        return request.stop is not None

    def generated(self, row: int) -> tuple[Ids, np.ndarray[tuple[int], np.dtype[np.float32]]]:
        """Views of the tokens generated in a row so far, and their logprobs."""
        part = slice(int(self.rows.prompt_length[row]), int(self.rows.known[row]))
        return self.rows.tokens[row, part], self.rows.logprobs[row, part]

    def new_weights(self, version: int) -> None:
        """From now on tokens are sampled under `version`."""
        self.version = version
        self.rows.invalidate()
        for row, request in enumerate(self.rows.request):
            if request is not None:
                request.mark(int(self.rows.known[row] - self.rows.prompt_length[row]), version)
