"""The system call filter: the table of syscalls.py as classic BPF, for x86-64 and aarch64.

The program finds a call by binary search over its number, so that installing it is cheap: for every number the kernel
runs the program once, to remember which calls are always allowed, and for those it never runs it again.
"""

import ctypes
import errno
import struct
from collections.abc import Iterable

from . import linux, syscalls

_NR_SECCOMP = syscalls.NUMBERS["seccomp"].get(linux.MACHINE, -1)
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LD, _AND, _JA, _JEQ, _JGE, _RET = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_NOTIFY = 0x7FC00000
_FARTHEST_BRANCH = 255
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_SET_FILTER, _NEW_LISTENER = 1, 8


def _op(code: int, k: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, true, false, k)


def _leaf(verdict: syscalls.Verdict) -> list[bytes]:
    """What decides on one call; it always returns."""
    if isinstance(verdict, int):
        return [_op(_RET, _ERRNO | verdict)]
    body = []
    for check in verdict:
        body.append(_op(_LD, _OFFSET_ARGS + 8 * check.argument))  # the low half: both architectures are little-endian
        if check.mask != syscalls.WHOLE:
            body.append(_op(_AND, check.mask))
        values = len(check.values)
        body += [_op(_JEQ, value, values - place) for place, value in enumerate(check.values)]
        if check.refused:
            body.append(_op(_JA, 1))
        body.append(_op(_RET, _ERRNO | check.error))
    return [*body, _op(_RET, _ALLOW)]


def _search(runs: list[tuple[int, syscalls.Verdict]]) -> list[bytes]:
    """Binary search for the accumulator in `runs`: (first number, verdict), ascending, each up to the next one's."""
    if len(runs) == 1:
        return _leaf(runs[0][1])
    middle = len(runs) // 2
    below, above = _search(runs[:middle]), _search(runs[middle:])
    if len(below) <= _FARTHEST_BRANCH:
        return [_op(_JGE, runs[middle][0], len(below), 0), *below, *above]
    return [_op(_JGE, runs[middle][0], 0, 1), _op(_JA, len(below)), *below, *above]


def _runs(machine: str, isolated: bool) -> list[tuple[int, syscalls.Verdict]]:
    by_number = {
        syscalls.NUMBERS[name][machine]: verdict
        for name, verdict in syscalls.verdicts(isolated).items()
        if machine in syscalls.NUMBERS[name]
    }
    runs: list[tuple[int, syscalls.Verdict]] = []
    for number in range(max(by_number) + 2):
        verdict = by_number.get(number, errno.ENOSYS)
        if not runs or runs[-1][1] != verdict:
            runs.append((number, verdict))
    return [*runs, (syscalls.X32_BIT, errno.EPERM)]


def build(machine: str, isolated: bool) -> bytes:
    """The filter's program. `isolated`: see `syscalls.verdicts`. Calls by way of another architecture (32-bit code)
    kill the process: their numbers mean something else."""
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no system call filter for the architecture {machine}")
    program = [
        _op(_LD, _OFFSET_ARCH),
        _op(_JEQ, _AUDIT_ARCH[machine], 1, 0),
        _op(_RET, _KILL),
        _op(_LD, _OFFSET_NR),
        *_search(_runs(machine, isolated)),
    ]
    return b"".join(program)


def build_trap(machine: str, asked: Iterable[str], refused: Iterable[str]) -> bytes:
    """A program to put before another: calls of `asked` wait for the listener's answer, those of `refused` fail with
    EPERM, all others pass on."""
    program = [_op(_LD, _OFFSET_NR)]
    for names, action in ((asked, _NOTIFY), (refused, _ERRNO | errno.EPERM)):
        for name in names:
            if machine in syscalls.NUMBERS[name]:
                program += [_op(_JEQ, syscalls.NUMBERS[name][machine], 0, 1), _op(_RET, action)]
    return b"".join([*program, _op(_RET, _ALLOW)])


class Filter:
    """A program, made once, installed by each process that it shall hold."""

    def __init__(self, program: bytes) -> None:
        self._instructions = ctypes.create_string_buffer(program, len(program))
        fprog = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(self._instructions))
        self._fprog = ctypes.create_string_buffer(fprog, len(fprog))
        self._address = ctypes.addressof(self._fprog)

    def install(self) -> None:
        """Put this process and all that it will start under the filter, for good. Needs no_new_privileges."""
        linux.prctl("seccomp filter", _PR_SET_SECCOMP, _MODE_FILTER, self._address)

    def install_listening(self) -> int:
        """The same; the descriptor from which calls that wait are read and answered."""
        return linux.syscall("seccomp listener", _NR_SECCOMP, _SET_FILTER, _NEW_LISTENER, self._address)
