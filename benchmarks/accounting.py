"""Processor time of a process and all that it starts, as the kernel counts it for a control group.

No sum over processes has it all: when a sandbox's PID namespace ends, nobody waits for the processes in it, and what
they used is in no parent's count.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def processor_group() -> Iterator[Callable[[], float] | None]:
    """Put this process, and what it starts, into a group of its own. Gives what tells the seconds that the group has
    used; None where groups cannot be made here (that takes root, and a control group file system that can be written).
    """
    for parent, file, unit in _hierarchies():
        group = parent / f"turnwire-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
            yield _reader(group / file, unit)
        finally:
            (parent / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
            with contextlib.suppress(OSError):  # something that was started here outlives us
                group.rmdir()
        return
    yield None


def _hierarchies() -> Iterator[tuple[Path, str, float]]:
    """This process's group in each hierarchy that counts time, the file that has it, and the file's unit in seconds."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for _, folder, kind, options, *_ in mounts:
            if kind == "cgroup" and "cpuacct" in controllers.split(",") and "cpuacct" in options.split(","):
                yield Path(folder + path), "cpuacct.usage", 1e-9
            elif kind == "cgroup2" and not controllers:
                yield Path(folder + path), "cpu.stat", 1e-6


def _reader(file: Path, unit: float) -> Callable[[], float]:
    """Both files have the total as the last word of their first line."""
    return lambda: int(file.read_text(encoding="ascii").splitlines()[0].split()[-1]) * unit
