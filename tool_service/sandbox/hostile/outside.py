"""What is left of sandboxes, looked at from outside of them: in /proc, in folders, and in the engine's lists."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from typing import ClassVar

from tool_service.sandbox.base import MIB, SandboxBackend

_SCRATCH = "turnwire-sandboxes-"
_MOUNTS = re.compile(r" - tmpfs (?:turnwire|workspace) ")
"""Of sandboxes, by their source: they belong into namespaces of their own."""


class Outside:
    """Of a backend whose sandboxes are processes of this machine."""

    slack: ClassVar[dict[str, int]] = {"MiB of memory": 64, "threads": 12}
    """By how much each may differ: interpreters keep some of what they have freed, and threads for later."""

    async def start(self) -> None:
        """Raises `SandboxUnavailable` where there is nothing to look at."""

    async def look(self) -> dict[str, int]:
        """How much there is of everything that a sandbox could leave."""
        processes = list(_descendants(os.getpid()))
        return {
            "processes": len(processes),
            "mounts": sum(_MOUNTS.search(line) is not None for line in _lines("/proc/self/mountinfo")),
            "folders": sum(len(_names(path)) + 1 for path in _scratch_folders()),
            "descriptors": len(_names("/proc/self/fd")),
            "threads": threading.active_count(),
            "MiB of memory": sum(map(_memory, (os.getpid(), *processes))) // MIB,
        }

    def more(self, before: dict[str, int], after: dict[str, int]) -> list[str]:
        """What there is more of than there was, in words."""
        return [
            f"left behind: {after[name] - count} {name}"
            for name, count in before.items()
            if after[name] > count + self.slack.get(name, 0)
        ]

    def processes_of(self, uid: int) -> list[int]:
        """Every process of this machine that has that user, whoever its parent is; none for users that are not a
        sandbox's own."""
        if uid in (0, os.geteuid()):
            return []
        line = f"Uid:\t{uid}\t"
        return [
            int(name)
            for name in _names("/proc")
            if name.isdigit() and any(has.startswith(line) for has in _lines(f"/proc/{name}/status"))
        ]

    def close(self) -> None:
        """Let go of what was looked at."""


def outside_of(backend: SandboxBackend) -> Outside:
    """For a started backend."""
    if backend.name == "docker":
        from tool_service.sandbox.hostile.outside_docker import OutsideOfEngine  # noqa: PLC0415 - its SDK is heavy

        return OutsideOfEngine(backend)
    return Outside()


def _descendants(pid: int) -> Iterator[int]:
    """Of all threads of a process."""
    for task in _names(f"/proc/{pid}/task"):
        for line in _lines(f"/proc/{pid}/task/{task}/children"):
            for child in map(int, line.split()):
                yield child
                yield from _descendants(child)


def _memory(pid: int) -> int:
    """Bytes that are a process's own."""
    fields = [line.split() for line in _lines(f"/proc/{pid}/statm")]
    return (int(fields[0][1]) - int(fields[0][2])) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def _scratch_folders() -> set[str]:
    """Those that this process holds."""
    held: set[str] = set()
    for name in _names("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since
            held.add(os.readlink(f"/proc/self/fd/{name}"))
    return {path for path in held if path.startswith(f"{tempfile.gettempdir()}/{_SCRATCH}")}


def _names(folder: str) -> list[str]:
    """Empty for a folder that is gone, or another user's."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _lines(path: str) -> list[str]:
    """Empty for a file that is gone, or another user's."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readlines()
    except OSError:
        return []
