"""The Linux calls that Python 3.11 lacks, through ctypes. Each raises OSError with the call's name."""

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4
MOUNT_ATTR_NOEXEC = 8

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_BENEATH = 0x08

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_CHILD_SUBREAPER = 36
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522

MACHINE = platform.machine()
# (x86_64, aarch64): the two differ below 424 and agree above.
_NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(MACHINE, -1)
_NR_CAPSET = {"x86_64": 126, "aarch64": 91}.get(MACHINE, -1)
_NR_MOUNT_SETATTR = 442
_NR_OPENAT2 = 437
_NR_CLOSE_RANGE = 436
_NR_LANDLOCK_CREATE_RULESET = 444
_NR_LANDLOCK_RESTRICT_SELF = 446
SIGNAL_SCOPE_ABI = 6
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def close_from(fd: int) -> None:
    """Close `fd` and all above."""
    if _libc.syscall(_NR_CLOSE_RANGE, ctypes.c_uint(fd), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(0)) != 0:
        os.closerange(fd, 1 << 16)


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {kind or 'bind'} on {target}")


def umount_lazily(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    _check(_libc.syscall(_NR_PIVOT_ROOT, new_root.encode(), put_old.encode()), "pivot_root")


def mount_setattr(target: str, attributes: int) -> None:
    """Set mount attributes on a whole subtree (Linux 5.12), keeping those that are locked in a user namespace."""
    attr = struct.pack("=QQQQ", attributes, 0, 0, 0)
    result = _libc.syscall(
        _NR_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attr, ctypes.c_size_t(len(attr))
    )
    _check(result, f"mount_setattr on {target}")


def _prctl(what: str, option: int, a: int = 0, b: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(a), ctypes.c_ulong(b), zero, zero), f"prctl({what})")


def die_with_parent() -> None:
    """SIGKILL for this process when its parent dies. Set it last: a change of uid clears it."""
    _prctl("PDEATHSIG", _PR_SET_PDEATHSIG, 9)


def set_dumpable(on: bool) -> None:
    """Off: other processes of the same uid cannot read this one's memory, descriptors or environment in /proc."""
    _prctl("DUMPABLE", _PR_SET_DUMPABLE, int(on))


def no_new_privileges() -> None:
    _prctl("NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def become_subreaper() -> None:
    """Orphans below this process become its children, whatever they do."""
    _prctl("CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def drop_bounding_set() -> None:
    """No later exec can gain a capability. Needs CAP_SETPCAP; stops at the last capability that the kernel knows."""
    for capability in range(64):
        try:
            _prctl("CAPBSET_DROP", _PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return
            raise


def drop_capabilities() -> None:
    """Empty the ambient, permitted, effective and inheritable sets of this thread."""
    _prctl("CAP_AMBIENT", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.syscall(_NR_CAPSET, header, bytes(24)), "capset")


def open_beneath(folder_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """openat2 that cannot leave `folder_fd`, by no symbolic link, `..` or race (Linux 5.6)."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    return _check(_libc.syscall(_NR_OPENAT2, folder_fd, os.fsencode(path), how, ctypes.c_size_t(len(how))), "open")


def loopback_up() -> None:
    """Bring `lo` up in a new network namespace, so that programs can talk to themselves."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 1)  # struct ifreq with IFF_UP
        fcntl.ioctl(sock, 0x8914, request)  # SIOCSIFFLAGS


def landlock_abi() -> int:
    """Version of Landlock here, 0 without. From 6 on (Linux 6.12) it can scope signals."""
    return max(0, int(_libc.syscall(_NR_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))))


def confine_signals() -> None:
    """From here on this process and its children can signal, and reach by abstract sockets, nobody but each other.
    Needs no_new_privileges and SIGNAL_SCOPE_ABI."""
    attr = struct.pack("=QQQ", 0, 0, 0b11)  # scoped: abstract unix sockets, signals
    ruleset = _check(
        _libc.syscall(_NR_LANDLOCK_CREATE_RULESET, attr, ctypes.c_size_t(len(attr)), ctypes.c_uint(0)), "landlock"
    )
    try:
        _check(_libc.syscall(_NR_LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint(0)), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def effective_capabilities() -> int:
    """The effective set as a bit mask."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


CAP_SYS_ADMIN = 1 << 21
