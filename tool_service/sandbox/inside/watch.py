"""The watch over what all processes of a sandbox use together: memory at any time, CPU time in a turn or between two.

It costs nothing until the first look, which most turns do not live to see.
"""

import math
from typing import Any

from . import cgroup, memory, network, processes, spaces
from .outcome import Outcome

_SECONDS = (0.05, 0.2)
"""Between two looks in a turn: where nothing else stands in memory's way, and where a cgroup's own limit does."""
OOM_KILL = Outcome("MEMORY", "the kernel killed a process of the sandbox for its memory")


class Watch:
    """`limits` are the fields of SandboxLimits."""

    def __init__(self, scope: processes.Scope, limits: dict[str, Any], folders: spaces.Spaces) -> None:
        self._scope = scope
        self._most_bytes: int = limits["memory_bytes"]
        self._folders = folders
        self._alone = scope is processes.Scope.NAMESPACE
        """Whether its cgroup, network and file systems are this sandbox's own, and not all others' too."""
        self._cgroup = cgroup.find() if self._alone else None
        self.seconds = _SECONDS[self._cgroup is not None]
        """To leave between two looks while a turn runs."""
        self._cpu_seen: dict[int, float] = {}
        """Seconds of the processes that there were at the last look."""
        self._cpu_missing = 0.0
        """Seconds, when last seen, of those that there are no more."""
        self._cpu_total = 0.0
        """Seconds used, ever."""
        self._cpu_seconds, self._cpu_end = math.inf, math.inf

    def begin(self, cpu_seconds: float) -> None:
        """From the next look on so much CPU time may be used: a turn begins, or the time between two."""
        self._cpu_seconds, self._cpu_end = cpu_seconds, math.nan

    def memory_killed(self) -> bool:
        """Whether the kernel has killed a process for its memory since the last time this was asked."""
        return self._cgroup is not None and self._cgroup.has_killed()

    def trouble(self) -> Outcome | None:
        """Look: what there is too much of."""
        if self.memory_killed():
            return OOM_KILL
        used = self._look()
        if used > self._most_bytes:
            return Outcome("MEMORY", f"the processes used {used >> 20} MiB of {self._most_bytes >> 20} MiB")
        if math.isnan(self._cpu_end):
            self._cpu_end = self._cpu_total + self._cpu_seconds
        if self._cpu_total > self._cpu_end:
            return Outcome("TIMEOUT", f"killed after {self._cpu_seconds:g} s of CPU time")
        return None

    def _look(self) -> int:
        """Bring the CPU time up to now; the bytes of memory, folders and sockets that are used, or, where it is within
        the limit already, a figure that includes more."""
        if self._cgroup is not None:
            self._cpu_total = self._cgroup.cpu_seconds()
            total = self._cgroup.memory_bytes() + self._in_sockets()
            if total <= self._most_bytes:
                return total
        pids = processes.members(self._scope)
        if self._cgroup is None:
            self._count_cpu(pids)
        elsewhere = self._folders.bytes_used() + self._in_sockets() if self._alone else 0
        return memory.used(pids, self._most_bytes - elsewhere) + elsewhere

    def _in_sockets(self) -> int:
        """Bytes of which nobody else keeps count."""
        counted = self._cgroup is not None and self._cgroup.counts_sockets
        return 0 if counted else network.most_bytes_held()

    def _count_cpu(self, pids: list[int]) -> None:
        """What ends between two looks is known from its parent, who has waited for it; where the parent did not, what
        was seen is. Parents are asked first: who ends meanwhile is missing for a look, and never counts twice."""
        ended = processes.cpu_of_ended(pids)
        seen = {pid: processes.cpu_used(pid) for pid in pids}
        # A smaller figure is that of another process with the same number.
        self._cpu_missing += sum(before for pid, before in self._cpu_seen.items() if seen.get(pid, 0.0) < before)
        self._cpu_seen = seen
        self._cpu_total = sum(seen.values()) + max(ended, self._cpu_missing)
