"""A pool of sandboxes that are ready before they are asked for. Each serves one taker, and is then ended; or, where the
pool recycles, is emptied and, once it is verified that nothing is left in it, serves another.

Invariants: at most `max_total` sandboxes exist (ready, in use, being made, being ended); at most `max_waiting` takers
wait, each at most `wait_seconds`; past either the taker gets `PoolExhausted` with a delay. What was taken is handed out
again only after `Sandbox.reset` has vouched for it. What waited is handed out only if it still answers. The pool comes
back to `size` ready by itself, and finds out by itself when sandboxes can be made again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec

from tool_service.sandbox.base import PoolExhausted, Sandbox, SandboxBackend, SandboxError, SandboxLimits

log = logging.getLogger(__name__)

_BACKOFF_SECONDS = (0.1, 5.0)
"""After a failed creation: first and longest pause."""
_REFILL_SECONDS = 0.1
_SURPLUS_SECONDS = 30.0
"""How long a sandbox beyond the pool's size may go without being needed."""


class PoolStats(msgspec.Struct, frozen=True):
    """A look at the pool, for GetStatus."""

    ready: int
    in_use: int
    creating: int
    waiting: int
    failures: int
    """Creations that failed since the start."""
    last_error: str
    """Why the last creation failed; empty once one has succeeded again."""


class WarmPool:
    """Sandboxes of one backend under one set of limits."""

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        size: int,
        limits: SandboxLimits,
        max_total: int,
        max_waiting: int = 1024,
        wait_seconds: float = 30.0,
        parallel_creations: int = 4,
        recycle: bool = False,
    ) -> None:
        """`size`: kept ready. `max_total`: exist at once, at least `size`. `parallel_creations`: made at once.
        `recycle`: whether what is given back may serve again."""
        if not 0 <= size <= max_total or max_total < 1 or parallel_creations < 1:
            raise ValueError(f"a pool needs 0 <= size <= max_total and max_total >= 1, not {size=} and {max_total=}")
        self._backend = backend
        self._size = size
        self._limits = limits
        self._max_total = max_total
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self._parallel = parallel_creations
        self._recycle = recycle
        self._ready: deque[Sandbox] = deque()
        self._fewest_ready = 0
        """Since the surplus was last looked at."""
        self._trimming: asyncio.TimerHandle | None = None
        self._in_use: dict[str, Sandbox] = {}
        self._waiters: deque[asyncio.Future[Sandbox]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._creating = 0
        self._ending = 0
        self._failures = 0
        self._last_error = ""
        self._pause = 0.0
        self._closed = False

    async def start(self) -> None:
        """Make the first `size`. Raises what the backend raises."""
        for sandbox in await asyncio.gather(*(self._backend.create(self._limits) for _ in range(self._size))):
            self._ready.append(sandbox)

    def stats(self) -> PoolStats:
        ready = sum(sandbox.alive for sandbox in self._ready)
        return PoolStats(ready, len(self._in_use), self._creating, len(self._waiters), self._failures, self._last_error)

    def renew(self) -> None:
        """Replace what died while it was ready; and where the last creation failed and nobody waits for another, try
        one all the same. To be called now and then, so that `stats` tell how things are."""
        for sandbox in [sandbox for sandbox in self._ready if not sandbox.alive]:
            self._ready.remove(sandbox)
            self._end(sandbox)
        self._refill()
        if self._last_error and not (self._closed or self._creating or self._ready) and self._total < self._max_total:
            self._begin_creation()

    @property
    def _total(self) -> int:
        return len(self._ready) + len(self._in_use) + self._creating + self._ending

    async def take(self) -> Sandbox:
        """A fresh sandbox that is the caller's until `discard`. Raises `PoolExhausted`."""
        while self._ready and not self._waiters:
            sandbox = self._ready.popleft()
            self._fewest_ready = min(self._fewest_ready, len(self._ready))
            self._in_use[sandbox.id] = sandbox
            self._refill_soon()
            try:
                if sandbox.alive and await sandbox.ping():
                    return sandbox
            except asyncio.CancelledError:
                self._spawn(self.discard(sandbox))
                raise
            self._spawn(self.discard(sandbox))
        if self._closed:
            raise PoolExhausted("the pool is closed", self._wait_seconds)
        if len(self._waiters) >= self._max_waiting:
            raise PoolExhausted(f"{len(self._waiters)} are waiting for a sandbox already", self._delay())
        waiter: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._refill()
        try:
            async with asyncio.timeout(self._wait_seconds):  # wait_for may swallow a cancellation
                return await asyncio.shield(waiter)
        except TimeoutError as error:
            self._forget_waiter(waiter)
            reason = f" (the last creation failed: {self._last_error})" if self._last_error else ""
            raise PoolExhausted(f"no sandbox within {self._wait_seconds:g} s{reason}", self._delay()) from error
        except asyncio.CancelledError:
            self._forget_waiter(waiter)
            raise

    def _forget_waiter(self, waiter: asyncio.Future[Sandbox]) -> None:
        """Of one that gave up. A sandbox that it was given at that very moment is thrown away."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self._spawn(self.discard(waiter.result()))

    def _delay(self) -> float:
        """Seconds after which trying again makes sense: longer, the longer the queue is."""
        return min(1.0 + 0.05 * len(self._waiters), 10.0)

    async def discard(self, sandbox: Sandbox) -> None:
        """Give back a taken sandbox: it is ended, and another made in its place, or it is recycled. Idempotent. Safe to
        cancel: it goes on all the same."""
        if self._in_use.pop(sandbox.id, None) is not None:
            await asyncio.shield(self._end(sandbox, self._recycle))

    def _end(self, sandbox: Sandbox, recycle: bool = False) -> asyncio.Task[None]:
        self._ending += 1  # from now on, not from the task's first step: it still counts against max_total
        return self._spawn(self._release(sandbox, recycle))

    async def _release(self, sandbox: Sandbox, recycle: bool) -> None:
        try:
            if not (recycle and await self._is_as_new(sandbox)):
                await sandbox.kill()
            else:
                self._hand_out(sandbox)
        except SandboxError as error:
            log.error("a sandbox did not end: %s", error)  # noqa: TRY400 - the message says it all
        finally:
            self._ending -= 1
            self._refill()

    async def _is_as_new(self, sandbox: Sandbox) -> bool:
        why_not = await sandbox.reset() if sandbox.alive else "it is dead"
        if why_not:
            log.info("sandbox %s is not used again: %s", sandbox.id, why_not)
        return not why_not and not self._closed

    def _trim(self) -> None:
        """End what recycling has gathered beyond `size` and nobody has needed since the last time."""
        for _ in range(min(self._fewest_ready, len(self._ready)) - self._size):
            self._end(self._ready.popleft())
        self._fewest_ready = len(self._ready)
        surplus = len(self._ready) > self._size
        self._trimming = asyncio.get_running_loop().call_later(_SURPLUS_SECONDS, self._trim) if surplus else None

    def _refill_soon(self) -> None:
        """After a take. The taker's first turn comes first: making another costs ten times as much CPU."""
        if self._ready:
            asyncio.get_running_loop().call_later(_REFILL_SECONDS, self._refill)
        else:
            self._refill()

    def _refill(self) -> None:
        """Start as many creations as are wanted and allowed."""
        while not self._closed:
            wanted = self._size + len(self._waiters) - len(self._ready) - self._creating
            if wanted <= 0 or self._total >= self._max_total or self._creating >= self._parallel:
                return
            self._begin_creation()

    def _begin_creation(self) -> None:
        self._creating += 1
        self._spawn(self._create())

    async def _create(self) -> None:
        try:
            if self._pause:
                await asyncio.sleep(self._pause)
            sandbox = await self._backend.create(self._limits)
        except Exception as error:  # whatever it was: nobody else would hear of it, and the next creation may succeed
            self._failures += 1
            self._last_error = str(error) or type(error).__name__
            self._pause = min(max(self._pause * 2, _BACKOFF_SECONDS[0]), _BACKOFF_SECONDS[1])
            bug = None if isinstance(error, SandboxError) else error  # of which the message does not say it all
            log.error(  # noqa: TRY400
                "no sandbox could be made, next try in %g s: %s", self._pause, self._last_error, exc_info=bug
            )
        else:
            self._pause, self._last_error = 0.0, ""
            self._hand_out(sandbox)
        finally:
            self._creating -= 1
            self._refill()

    def _hand_out(self, sandbox: Sandbox) -> None:
        """To one who waits, or else among the ready: there may be more of these then than `size`, for a while."""
        if self._closed:
            self._end(sandbox)
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._in_use[sandbox.id] = sandbox
                waiter.set_result(sandbox)
                return
        self._ready.append(sandbox)
        if len(self._ready) > self._size and self._trimming is None:
            self._fewest_ready = len(self._ready)
            self._trimming = asyncio.get_running_loop().call_later(_SURPLUS_SECONDS, self._trim)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End every sandbox, in parallel, and turn waiters away. Idempotent."""
        self._closed = True
        if self._trimming is not None:
            self._trimming.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(PoolExhausted("the pool is closed", self._wait_seconds))
        self._waiters.clear()
        everything = [*self._ready, *self._in_use.values()]
        self._ready.clear()
        self._in_use.clear()
        for sandbox in everything:
            self._end(sandbox)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
