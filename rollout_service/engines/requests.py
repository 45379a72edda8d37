"""A request inside the transformers engine: from `generate` to its last delta. Made on the loop, used by the engine's
thread, and read again on the loop through `queue` alone."""

from __future__ import annotations

import asyncio
import secrets

import numpy as np

from rollout_service.engines.base import GenerateDelta, GenerateJob, GenerateStop, Ids, Logprobs, VersionSpan
from rollout_service.engines.stops import StopMatcher
from turnwire.errors import TurnwireError


class Request:
    """`limit`: tokens, with the prompt, at which it must stop. `marks`: from which generated token on which version."""

    def __init__(self, job: GenerateJob, limit: int, stop_ids: frozenset[int]) -> None:
        self.job = job
        self.limit = limit
        self.stop_ids = stop_ids
        seed = job.sampling.seed
        self.seed = np.uint64(secrets.randbits(64) if seed is None else seed)
        self.matcher: StopMatcher | None = None
        self.marks: list[tuple[int, int]] = []
        self.sent = 0
        self.stop: GenerateStop | None = None
        self.done = False
        self.queue: asyncio.Queue[GenerateDelta | TurnwireError] = asyncio.Queue()

    def mark(self, generated: int, version: int) -> None:
        """Tokens from `generated` on are sampled under `version`."""
        if self.marks and self.marks[-1][0] == generated:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((generated, version))

    def delta(self, generated: Ids, logprobs: Logprobs, stop: GenerateStop | None) -> GenerateDelta:
        """What is new since the last delta, of all that was generated so far."""
        start, end = self.sent, len(generated)
        self.sent = end
        ends = [position for position, _ in self.marks[1:]] + [end]
        spans = tuple(
            VersionSpan(max(begin, start), min(until, end), version)
            for (begin, version), until in zip(self.marks, ends, strict=True)
            if max(begin, start) < min(until, end)
        )
        return GenerateDelta(generated[start:end].copy(), logprobs[start:end].copy(), spans, stop)
