"""Timers of a process that may itself be stopped: by SIGSTOP, a paused container, a machine that starves it.

All of the service's deadlines are on `time.monotonic`, which jumps of the wall clock do not touch and which stands
still while the host is suspended. Where this process alone stands still, its timers are all due at the moment it goes
on, while the answers and messages that came meanwhile are still unread. So a timer that finds itself late gives what
it guards one chance more: nobody is called too late because we were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

LATE_SECONDS = 0.5
"""How late a timer is called when this process must have stood still."""
CHANCE_SECONDS = 1.0
"""What is then given to read what has come meanwhile."""


class PatientTimer:
    """Calls `callback` at `when` (of the running loop's clock), unless it is cancelled. `chance`: seconds that it gives
    when it is late; the outer of two timers that guard the same gives more, so that the inner one comes first still."""

    __slots__ = ("_callback", "_chance", "_handle", "_when")

    def __init__(self, when: float, callback: Callable[[], object], chance: float = CHANCE_SECONDS) -> None:
        self._when = when
        self._callback = callback
        self._chance = chance
        self._handle = asyncio.get_running_loop().call_at(when, self._due)

    def _due(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._when < LATE_SECONDS:
            self._callback()
        else:
            self._handle = loop.call_later(self._chance, self._callback)

    def cancel(self) -> None:
        self._handle.cancel()


class PatientTimeout:
    """`asyncio.timeout_at` on a `PatientTimer`."""

    def __init__(self, when: float, chance: float = CHANCE_SECONDS) -> None:
        self._when = when
        self._chance = chance
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._timer = PatientTimer(self._when, lambda: self._scope.reschedule(0.0), self._chance)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._scope.__aexit__(kind, error, traceback)

    def expired(self) -> bool:
        """Whether it was this timeout that ended what it guards."""
        return self._scope.expired()
