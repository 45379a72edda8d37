"""Modes and times of files, where a sandbox has the service's own uid (restricted tier, without root).

There every file of the service's user could be changed by whoever knows its path: Landlock does not cover what changes
a file without opening it. So a program does not make these calls itself. They wait (seccomp's user notification) for a
guard, a process between the zygote and the supervisor, out of the program's reach, which makes them on its behalf: on
files below the folders that are the sandbox's, and on no others. Owners cannot be changed at all.
"""

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
from collections.abc import Sequence

from . import linux, seccomp, syscalls

_ASKED = ("chmod", "fchmod", "fchmodat", "fchmodat2", "utimensat")
_REFUSED = (
    *("utime", "utimes", "futimesat"),  # libc makes all of them from utimensat
    *("chown", "fchown", "lchown", "fchownat"),
)
_NAMES = {syscalls.NUMBERS[name].get(linux.MACHINE): name for name in _ASKED}
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_*
_NOTICE = struct.Struct("=QIIiIQ6Q")  # id, pid, flags; number, architecture, instruction, arguments
_ANSWER = struct.Struct("=QqiI")  # id, value, error, flags
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = -100, 0x100, 0x1000
_PATH_BYTES, _PAGE = 4096, 4096
_TIMES_BYTES = 32
_LISTENER_FD = 3


def guard(writable: Sequence[str]) -> None:
    """Fork. Returns in the child, which is to become the supervisor; the caller's process serves as its guard, for
    files below `writable`, and ends with it."""
    ours, theirs = socket.socketpair()
    pid = linux.fork()
    if pid == 0:
        ours.close()
        linux.become_subreaper()
        linux.die_with_parent()
        trap = seccomp.Filter(seccomp.build_trap(linux.MACHINE, _ASKED, _REFUSED))
        listener = trap.install_listening()
        socket.send_fds(theirs, [b"listener"], [listener])
        os.close(listener)
        theirs.close()
        return
    code = 1
    try:
        theirs.close()
        _, fds, _, _ = socket.recv_fds(ours, 16, 1)
        os.dup2(fds[0], _LISTENER_FD)
        linux.close_from(_LISTENER_FD + 1)  # with the service's connection, whose only holder is the supervisor
        os.chdir("/")
        code = _serve(_LISTENER_FD, pid, tuple(os.path.realpath(folder) for folder in writable))
    finally:
        os._exit(code)


def _serve(listener: int, supervisor: int, writable: tuple[str, ...]) -> int:
    """Until the supervisor ends; its exit code."""
    ended = os.pidfd_open(supervisor)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if ended in ready:
            _, status = os.waitpid(supervisor, 0)
            return max(0, os.waitstatus_to_exitcode(status))
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINTR):  # the caller died meanwhile
                raise
            continue
        number, pid, _, call, _, _, *arguments = _NOTICE.unpack(notice)
        try:
            _make(_NAMES[call], pid, arguments, writable)
            result = 0
        except OSError as error:
            result = error.errno or errno.EPERM
        with contextlib.suppress(OSError):  # as above
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(number, 0, -result, 0))


def _make(name: str, pid: int, arguments: list[int], writable: tuple[str, ...]) -> None:
    """One call of process `pid`. What it names may be another file a moment later; what is opened here is not."""
    if name == "chmod":
        arguments = [_AT_FDCWD & 0xFFFFFFFF, *arguments]
    flags = arguments[3] if name in ("fchmodat2", "utimensat") else 0
    if flags & ~(_AT_SYMLINK_NOFOLLOW | _AT_EMPTY_PATH):
        raise OSError(errno.EINVAL, "flags")
    folder = struct.unpack("=i", struct.pack("=I", arguments[0] & 0xFFFFFFFF))[0]
    by_descriptor = name == "fchmod" or (name == "utimensat" and arguments[1] == 0 and folder != _AT_FDCWD)
    fd = _open(pid, folder, None if by_descriptor else _text(pid, arguments[1]), flags)
    try:
        own = f"/proc/self/fd/{fd}"
        place = os.readlink(own)
        if not any(place == folder or place.startswith(folder + "/") for folder in writable):
            raise PermissionError(errno.EPERM, "not the sandbox's")
        if name == "utimensat":
            linux.set_times(own, _read(pid, arguments[2], _TIMES_BYTES) if arguments[2] else None)
        else:
            os.chmod(own, arguments[1 if name == "fchmod" else 2] & 0o7777)
    finally:
        os.close(fd)


def _open(pid: int, folder: int, path: bytes | None, flags: int) -> int:
    """What a process means by a path below one of its descriptors, or by the descriptor alone."""
    base = f"/proc/{pid}/cwd" if folder == _AT_FDCWD else f"/proc/{pid}/fd/{folder}"
    try:
        base_fd = os.open(base, os.O_PATH)
    except FileNotFoundError:
        raise OSError(errno.EBADF, "descriptor") from None
    if path is None or (not path and flags & _AT_EMPTY_PATH):
        return base_fd
    try:
        return os.open(path, os.O_PATH | (os.O_NOFOLLOW if flags & _AT_SYMLINK_NOFOLLOW else 0), dir_fd=base_fd)
    finally:
        os.close(base_fd)


def _read(pid: int, address: int, count: int) -> bytes:
    """All of it, or EFAULT: the address is whatever the program says."""
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        data = os.pread(fd, count, address)
    except (OSError, OverflowError):
        data = b""
    finally:
        os.close(fd)
    if len(data) < count:
        raise OSError(errno.EFAULT, "address")
    return data


def _text(pid: int, address: int) -> bytes:
    """A string that ends with NUL. Read page by page: the one after it may not be there."""
    data = b""
    while b"\0" not in data:
        if len(data) >= _PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, "path")
        data += _read(pid, address + len(data), _PAGE - (address + len(data)) % _PAGE)
    return data.partition(b"\0")[0]
