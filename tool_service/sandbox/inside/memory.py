"""What memory the processes of a sandbox use together, by what /proc says of them. Not what their folders hold: see
spaces.py."""

import contextlib
import os
import re

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


def used(pids: list[int], cap: int) -> int:
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
