"""Waiting for what other parts do, on a machine that may be crowded.

A wait ends with what it waits for. PATIENCE only keeps a test of broken code from hanging: it is far above what
anything takes, so that it decides nothing. What a test expects to be cut short would go on for ENDLESS, which is far
above PATIENCE: that the wait has ended is the proof, and no clock is looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

PATIENCE = 60.0
"""Seconds."""
PROGRAM = 150.0
"""Seconds for a program to start, or to do little: first it reads much code."""
ENDLESS = 600
"""Seconds, as a number that programs in any language can read."""


async def eventually(condition: Callable[[], Any], seconds: float = PATIENCE, pause: float = 0.01) -> None:
    """Wait until a condition (a function, or one that makes a coroutine) holds. `pause`: between two looks."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(pause)


async def no_more(before: Mapping[str, int], look: Callable[[], Any]) -> dict[str, int]:
    """Wait until a look (a function, or one that makes a coroutine) finds no more of anything than before; what it
    finds then."""
    deadline = time.monotonic() + PATIENCE
    while True:
        after: dict[str, int] = look()
        if asyncio.iscoroutine(after):
            after = await after
        more = {name: (before[name], after[name]) for name in after if after[name] > before[name]}
        if not more:
            return after
        assert time.monotonic() < deadline, f"left behind (before, after): {more}"
        await asyncio.sleep(0.02)
