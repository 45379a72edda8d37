"""Programs of agents that are still running, for tests of what must end with them."""

from __future__ import annotations

import contextlib

import psutil


def sleepers(seconds: str) -> list[int]:
    """Processes below this one that are `sleep SECONDS`, those in sandboxes, too."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline() == ["sleep", seconds]:
                found.append(process.pid)
    return found
