"""The sequences that the engine knows, one a row of the cache: their tokens, how many are cached, whose they are.

Invariants:

- `cached[row]` positions of a row hold keys and values of `tokens[row]` under the *current* weights. New weights set
  all of it to 0; what is needed again is computed again.
- A row is ACTIVE (a request generates in it), IDLE (kept for the next request of its key) or FREE. IDLE and FREE rows
  may be taken, FREE ones first, then the least recently used; their content serves others as a prefix until then.
- Rows that share a prefix compute it once: the others copy it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollout_service.engines.requests import Request
from rollout_service.engines.slots import SlotCache

FREE, IDLE, ACTIVE = 0, 1, 2

SHARE_AT_LEAST = 8
"""Tokens that a copy must save to be worth it."""

Ints = npt.NDArray[np.int64]


class Rows:
    """Tables by row: tokens int32 [R, L], logprobs float32 [R, L], and one value a row of each sampling parameter."""

    def __init__(self, count: int, length: int, cache: SlotCache) -> None:
        self.cache = cache
        self.tokens = np.zeros((count, length), np.int32)
        self.logprobs = np.zeros((count, length), np.float32)
        self.known = np.zeros(count, np.int64)
        self.cached = np.zeros(count, np.int64)
        self.state = np.zeros(count, np.int8)
        self.used_at = np.zeros(count, np.int64)
        self.order = np.zeros(count, np.int64)
        self.may_share = np.zeros(count, np.bool_)
        self.prompt_length = np.zeros(count, np.int64)
        self.temperature = np.ones(count, np.float32)
        self.top_p = np.ones(count, np.float32)
        self.top_k = np.zeros(count, np.int64)
        self.seed = np.zeros(count, np.uint64)
        self.request: list[Request | None] = [None] * count
        self.key: list[str | None] = [None] * count
        self._by_key: dict[str, int] = {}
        self._clock = 0

    @property
    def active(self) -> int:
        """Sequences that generate."""
        return int((self.state == ACTIVE).sum())

    def requests(self) -> list[Request]:
        """Those of all active rows."""
        return [request for request in self.request if request is not None]

    def request_of(self, row: int) -> Request:
        """The request of an active row."""
        request = self.request[row]
        if request is None:
            raise RuntimeError(f"row {row} is not active")
        return request

    def admit(self, request: Request) -> int:
        """Give a request a row: the one that its key left, or another. There must be one that is not active."""
        job = request.job
        row = self._by_key.get(job.sequence_key, -1) if job.sequence_key is not None else -1
        if row < 0 or self.state[row] == ACTIVE:
            row = self._take()
            same = 0
        else:
            same = int(self._common(job.prompt, row, row + 1)[0])
        size = len(job.prompt)
        self.cached[row] = min(self.cached[row], same, size - 1)
        self.tokens[row, :size] = job.prompt
        self.known[row] = self.prompt_length[row] = size
        self.state[row] = ACTIVE
        self._clock += 1
        self.used_at[row] = self.order[row] = self._clock
        self.may_share[row] = True
        sampling = job.sampling
        self.temperature[row], self.top_p[row], self.top_k[row] = sampling.temperature, sampling.top_p, sampling.top_k
        self.seed[row] = request.seed
        self.request[row] = request
        if job.sequence_key is not None and job.sequence_key not in self._by_key:
            self.key[row] = job.sequence_key
            self._by_key[job.sequence_key] = row
        return row

    def leave(self, row: int) -> None:
        """The row's request is over; its cache stays while its key may come again, and else until it is needed."""
        self.request[row] = None
        self.state[row] = FREE if self.key[row] is None else IDLE
        self._clock += 1
        self.used_at[row] = self._clock

    def release(self, key: str) -> None:
        """No request comes for this key any more."""
        row = self._by_key.get(key)
        if row is not None:
            self._forget_key(row)
            if self.state[row] == IDLE:
                self.state[row] = FREE

    def invalidate(self) -> None:
        """The weights changed: nothing that is cached holds any more."""
        self.cached[:] = 0
        self.may_share[:] = True
        for row in np.flatnonzero(self.state == IDLE):
            self._forget_key(int(row))
        self.state[self.state == IDLE] = FREE

    def _take(self) -> int:
        """The lowest free row, so that active rows lie close together; else the least recently used idle one."""
        free = np.flatnonzero(self.state == FREE)
        if free.size:
            return int(free[0])
        idle = np.flatnonzero(self.state == IDLE)
        row = int(idle[self.used_at[idle].argmin()])
        self._forget_key(row)
        return row

    def _forget_key(self, row: int) -> None:
        key = self.key[row]
        if key is not None:
            del self._by_key[key]
            self.key[row] = None

    def _common(self, prompt: npt.NDArray[np.int32], start: int, stop: int) -> Ints:
        """Length of the prefix that `prompt` shares with each of rows [start, stop)."""
        differs = self.tokens[start:stop, : len(prompt)] != prompt
        first = np.where(differs.any(1), differs.argmax(1), len(prompt))
        return np.minimum(first, self.known[start:stop])

    def share(self, row: int, ahead: list[int]) -> bool:
        """Copy what another row has of this row's prefix. False: wait, a row of `ahead` computes more of it now."""
        wanted = self.tokens[row, : self.known[row]]
        common = np.minimum(self._common(wanted, 0, len(self.known)), self.known[row] - 1)
        common[row] = 0
        have = np.minimum(common, self.cached)
        donor = int(have.argmax())
        best = max(int(have[donor]), int(self.cached[row]))
        if any(common[other] >= best + SHARE_AT_LEAST for other in ahead):
            return False
        self.may_share[row] = False
        if have[donor] >= self.cached[row] + SHARE_AT_LEAST:
            self.cache.copy(donor, row, int(have[donor]))
            self.cached[row] = have[donor]
        return True
