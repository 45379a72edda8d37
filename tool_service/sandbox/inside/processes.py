"""Which processes belong to a sandbox, what CPU time they use, and how to end them, per tier.

With a PID namespace all that /proc shows is the sandbox's. Without one, a uid of the sandbox's own marks its processes;
without root only descent from the supervisor (a subreaper, which nothing below it can leave) does.
"""

import contextlib
import enum
import os
import resource
import signal
import time
from collections.abc import Callable


class Scope(enum.Enum):
    """What marks the processes of this sandbox."""

    NAMESPACE = "namespace"
    UID = "uid"
    DESCENT = "descent"


_TICKS = os.sysconf("SC_CLK_TCK")
_NAMESPACE, _UID, _DESCENT = Scope  # an attribute of an enum class is slow to look up, and copies pages in a fresh fork


def choose_scope(isolated: bool, root: bool) -> Scope:
    if isolated:
        return _NAMESPACE
    return _UID if root else _DESCENT


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    """Parent of a process, 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _uid(pid: int) -> int:
    """Real uid of a process, -1 when it is gone. Not the owner of /proc/PID, which a process can change (dumpable)."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Uid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return -1


def members(scope: Scope) -> list[int]:
    """Processes of the sandbox whose supervisor calls, without itself."""
    me = os.getpid()
    pids = [pid for pid in _all_pids() if pid != me]
    if scope is _NAMESPACE:
        return pids
    if scope is _UID:
        uid = os.getuid()
        return [pid for pid in pids if _uid(pid) == uid]
    return _descendants(me, pids)


def _descendants(root: int, pids: list[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid in pids:
        children.setdefault(_parent(pid), []).append(pid)
    found: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


def foreign_tasks(scope: Scope) -> int:
    """Threads of this uid that RLIMIT_NPROC counts although they are not the sandbox's: where it shares a uid."""
    if scope is not _DESCENT:
        return 0
    uid = os.getuid()
    mine = set(members(scope))
    count = 0
    for pid in _all_pids():
        if pid not in mine and _uid(pid) == uid:
            try:
                count += len(os.listdir(f"/proc/{pid}/task"))
            except OSError:
                continue
    return count


def strays(supervisors: set[int], uid: int | None) -> list[int]:
    """For the zygote in the restricted tier: processes that outlived their supervisor. By uid, or, without one, the
    zygote's children that are no supervisor, and all below them."""
    me = os.getpid()
    pids = [pid for pid in _all_pids() if pid != me and pid not in supervisors]
    if uid is not None:
        return [pid for pid in pids if _uid(pid) == uid]
    orphans = [pid for pid in pids if _parent(pid) == me]
    return orphans + [below for orphan in orphans for below in _descendants(orphan, pids)]


def _kill_everyone(scope: Scope) -> None:
    """SIGKILL to all that this process may signal, which must be this sandbox and nothing else."""
    walled_in = os.getpid() == 1 if scope is _NAMESPACE else os.getuid() != 0
    if not walled_in:
        raise RuntimeError("refusing kill(-1) outside of a sandbox")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def kill_listed(listed: Callable[[], list[int]]) -> int:
    """Kill processes that are known by listing only; their number. They are stopped first, until a listing shows no new
    one: stopped processes do not fork and still fill the process limit, so that even a fork bomb comes to rest."""
    stopped: set[int] = set()
    while new := set(listed()) - stopped:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(stopped)


def end_all(scope: Scope, seconds: float) -> bool:
    """Kill every process of the sandbox but the caller, its supervisor, and reap them. False when some were still dying
    after `seconds`. SIGKILL to -1 is atomic against fork; see `kill_listed` for where it cannot be used."""
    deadline = time.monotonic() + seconds
    pause = 0.0002
    while True:
        if scope is _DESCENT:
            kill_listed(lambda: members(scope))
        else:
            _kill_everyone(scope)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.01)


def cpu_used(pid: int) -> float:
    """CPU seconds of a process and its threads by its own kernel clock; 0 when it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock id that clock_getcpuclockid(3) would give
    except OSError:
        return 0.0


def cpu_of_ended(pids: list[int]) -> float:
    """CPU seconds of all that have ended below this process and `pids`, which are its own, and were waited for."""
    mine = resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + sum(map(_cpu_of_children, pids))


def _cpu_of_children(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            user, system = file.read().rpartition(b")")[2].split()[13:15]
    except (OSError, ValueError):  # it is gone
        return 0.0
    return (int(user) + int(system)) / _TICKS
