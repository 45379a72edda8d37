"""Which processes belong to a sandbox, what they use, and how to end them, per tier.

With a PID namespace all that /proc shows is the sandbox's. Without one, a uid of the sandbox's own marks its processes;
without root only descent from the supervisor (a subreaper, which nothing below it can leave) does.
"""

import contextlib
import enum
import os
import re
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


_SIZES = (
    *(b"PPid:", b"Threads:", b"RssAnon:", b"RssShmem:", b"VmPTE:"),
    *(b"VmSize:", b"VmData:", b"VmStk:", b"VmExe:", b"VmLib:"),
)
_SHARES = (b"Pss_Anon:",)
_SHARED_MEMORY = re.compile(
    rb"^(\w+)-(\w+) \S+ (\w+) (\S+ \d+) +(?:/dev/zero \(deleted\)|\[anon_shmem:.*\])$", re.MULTILINE
)
"""A line of /proc/PID/maps: memory that is shared and has no file. Programs may name it; its number is the same in all
that share it."""
_A_LITTLE = 1 << 10
"""KiB by which memory may grow between two readings of its size."""
_MOST_MAPS_BYTES = 1 << 20
"""Read of one process's list, which a program can make long: looking it over must not keep us from our clocks."""


def _fields(path: str, names: tuple[bytes, ...]) -> dict[bytes, int]:
    """Of lines `Name:  123 kB` of a /proc file; empty for what is gone, or hidden by the program itself."""
    try:
        with open(path, "rb") as file:
            return {words[0]: int(words[1]) for words in (line.split() for line in file if line.startswith(names))}
    except OSError:
        return {}


def _sizes(pid: int) -> tuple[str, dict[bytes, int]]:
    """KiB of a process's memory by kind, and the folder that tells: of another of its threads where the first has
    ended."""
    folder = f"/proc/{pid}"
    sizes = _fields(f"{folder}/status", _SIZES)
    if b"VmSize:" in sizes or sizes.get(b"Threads:", 0) < 2:
        return folder, sizes
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            folder = f"/proc/{pid}/task/{task}"
            sizes = _fields(f"{folder}/status", _SIZES)
            if b"VmSize:" in sizes:
                break
    return folder, sizes


def _waiting(pid: int) -> int:
    """Threads of a process that wait for something that cannot be interrupted."""
    count = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
                count += file.read().rpartition(b")")[2].startswith(b" D")
    return count


def _sizes_of_owners(pids: list[int]) -> dict[str, dict[bytes, int]]:
    """`_sizes` of all but those that run in the memory of their parent, of which one thread waits for each until it has
    a program of its own (vfork). Parents come first: what a child still borrows, it did when the parent was asked."""
    found: dict[str, dict[bytes, int]] = {}
    lenders: dict[int, dict[bytes, int]] = {}
    loans: dict[int, int] = {}
    for pid in sorted(pids):
        loans[pid] = _waiting(pid)
        folder, sizes = _sizes(pid)
        lenders[pid] = sizes
        parent = sizes.get(b"PPid:", 0)
        if loans.get(parent, 0) > 0 and _is_same(sizes, lenders[parent]):
            loans[parent] -= 1
        else:
            found[folder] = sizes
    return found


def _is_same(sizes: dict[bytes, int], others: dict[bytes, int]) -> bool:
    """Of the same memory, a moment later."""
    grown = sizes.get(b"RssAnon:", 0) - others.get(b"RssAnon:", 0)
    return sizes.get(b"VmSize:") == others.get(b"VmSize:") and grown < _A_LITTLE


def _reserved(sizes: dict[bytes, int]) -> int:
    """KiB of address space that is neither text nor data of the process's own: what it shares is a part of it."""
    others = sum(sizes.get(name, 0) for name in (b"VmData:", b"VmStk:", b"VmExe:", b"VmLib:"))
    return max(0, sizes.get(b"VmSize:", 0) - others)


def memory_used(pids: list[int], cap: int) -> int:
    """Bytes of anonymous and shared memory of these processes, and of their page tables: what is cheap to know, where
    that is within `cap` already, else a closer figure.

    Resident sizes count a page that is shared by fork, or memory that is borrowed, once per process; the closer figure
    counts shares, and no pages of files. Shared memory without a file lives on when nobody has its pages mapped any
    more: it counts in full, touched or not."""
    looked_at = dict(map(_sizes, pids))
    resident = _sum(looked_at, b"VmPTE:", b"RssAnon:")
    shared = _sum(looked_at, b"RssShmem:")
    most = cap >> 10
    if resident + max(shared, sum(map(_reserved, looked_at.values()))) > most:
        looked_at = _sizes_of_owners(pids)
        resident = _sum(looked_at, b"VmPTE:", b"RssAnon:")
        shared = _shared_memory(looked_at)
        if resident + shared > most:
            shares = {folder: _fields(f"{folder}/smaps_rollup", _SHARES) for folder in looked_at}
            hidden = {folder: _fields(f"{folder}/status", _SIZES) for folder in looked_at if not shares[folder]}
            resident = _sum(looked_at, b"VmPTE:") + _sum(shares, *_SHARES) + _sum(hidden, b"RssAnon:")
    return (resident + shared) << 10


def _sum(looked_at: dict[str, dict[bytes, int]], *names: bytes) -> int:
    return sum(sizes.get(name, 0) for sizes in looked_at.values() for name in names)


def _shared_memory(looked_at: dict[str, dict[bytes, int]]) -> int:
    """KiB of shared memory without a file, each piece counted once, up to the farthest byte that somebody has mapped.
    Who hides what is mapped, or has too much to look over, is taken to share all that it has reserved."""
    ends: dict[bytes, int] = {}
    unknown = 0
    for folder, sizes in looked_at.items():
        text = b""
        try:
            with open(f"{folder}/maps", "rb") as file:
                text = file.read(_MOST_MAPS_BYTES)
        except PermissionError:
            unknown += _reserved(sizes)
        except OSError:  # it is gone
            continue
        if len(text) == _MOST_MAPS_BYTES:
            unknown += _reserved(sizes)
            continue
        for begin, end, offset, number in _SHARED_MEMORY.findall(text):
            ends[number] = max(ends.get(number, 0), int(offset, 16) + int(end, 16) - int(begin, 16))
    return unknown + (sum(ends.values()) >> 10)


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
