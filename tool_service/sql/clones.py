"""Databases that wait for trajectories, so that a first call need not wait until its own is made.

Invariants:

- A clone is a copy of a template behind its walls, into which no trajectory's role has logged in. It is given once.
- Of each template no more wait than are wanted. One that is given is replaced in the background, one at a time.
- A clone that cannot be made takes a later call's head start and nothing else: that call makes its own database, and
  fails in its own words where that fails too. Making is tried again.
- After `close` none waits, and none comes into being.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from turnwire.errors import UnavailableError

logger = logging.getLogger(__name__)

_HEAD_START_SECONDS = 0.3
"""Of the first call that took a copy, before the server is put to work on another."""
_RETRY_SECONDS = 2.0
_LAST_SECONDS = 10.0
"""How long `close` waits for one that is being made: given up, the server would finish it after its removal."""


class Clones:
    """See the module's docstring. `start` first, `close` last."""

    def __init__(
        self,
        wanted: Mapping[str, int],
        make: Callable[[str], Awaitable[str]],
        drop: Callable[[str], object],
    ) -> None:
        """`wanted`: how many of which templates wait. `make` makes a copy of one and says its name, or raises
        UnavailableError; `drop` removes a copy, and never raises."""
        self._wanted = wanted
        self._waiting: dict[str, deque[str]] = {template: deque() for template in wanted}
        self._make = make
        self._drop = drop
        self._taken = asyncio.Event()
        self._closed = asyncio.Event()
        self._filler: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._filler = asyncio.create_task(self._fill())

    async def take(self, template: str) -> str:
        """The name of a copy: the one that has waited longest, or a new one. Raises UnavailableError."""
        waiting = self._waiting.get(template)
        if not waiting:
            return await self._make(template)
        self._taken.set()
        return waiting.popleft()

    async def close(self) -> None:
        self._closed.set()
        self._taken.set()
        if self._filler is not None:
            await asyncio.wait((self._filler,), timeout=_LAST_SECONDS)
            self._filler.cancel()
            await asyncio.gather(self._filler, return_exceptions=True)
        names = [name for waiting in self._waiting.values() for name in waiting]
        self._waiting.clear()
        for name in names:
            self._drop(name)

    async def _fill(self) -> None:
        failing = False
        while not self._closed.is_set():
            self._taken.clear()
            lacking = (template for template, waiting in self._waiting.items() if len(waiting) < self._wanted[template])
            template = next(lacking, None)
            if template is None:
                await self._taken.wait()
                await self._pause(_HEAD_START_SECONDS)
                continue
            try:
                self._waiting[template].append(await self._make(template))
                failing = False
            except UnavailableError as error:
                if not failing:
                    logger.warning("no database can be made ready now: %s", error.message)
                failing = True
                await self._pause(_RETRY_SECONDS)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)
