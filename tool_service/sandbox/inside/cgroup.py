"""What the sandbox's own cgroup counts, where it has one and can see it: a container.

A small file each, instead of a walk through /proc, and nothing that ends between two looks is missed. `memory_bytes`
counts more than a program's limit does (the supervisor, cached files, kernel memory): it can say that all is well, and
not that it is not.
"""

import contextlib
import time

_FOLDER = "/sys/fs/cgroup"


class Cgroup:
    """Version 2 of the interface, or 1. Make it with `find`."""

    def __init__(self, unified: bool) -> None:
        self._unified = self.counts_sockets = unified
        self._memory = f"{_FOLDER}/memory.current" if unified else f"{_FOLDER}/memory/memory.usage_in_bytes"
        self._events = f"{_FOLDER}/memory.events" if unified else f"{_FOLDER}/memory/memory.oom_control"
        self._cpu = f"{_FOLDER}/cpu.stat" if unified else f"{_FOLDER}/cpuacct/cpuacct.usage"
        self._kills_seen = self._oom_kills()

    def memory_bytes(self) -> int:
        return int(_read(self._memory))

    def cpu_seconds(self) -> float:
        """Of the programs: all that was ever used, without what this process did."""
        text = _read(self._cpu)
        total = _field(text, b"usage_usec") / 1e6 if self._unified else int(text) / 1e9
        return total - time.process_time()

    def has_killed(self) -> bool:
        """Whether the limit on memory has cost a process its life since the last time this was asked."""
        before, self._kills_seen = self._kills_seen, self._oom_kills()
        return self._kills_seen > before

    def _oom_kills(self) -> int:
        return _field(_read(self._events), b"oom_kill")


def find() -> Cgroup | None:
    for unified in (True, False):
        with contextlib.suppress(OSError):
            found = Cgroup(unified)
            found.memory_bytes()
            found.cpu_seconds()
            return found
    return None


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _field(text: bytes, name: bytes) -> int:
    """Of a file of lines `name value`; 0 where it has none of that name."""
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0
