"""The Linux calls that Python 3.11 lacks, through ctypes. Each raises OSError with the call's name."""

import _signal  # type: ignore[import-not-found]
import ctypes
import errno
import os
import platform
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
_NR_LANDLOCK_ADD_RULE = 445
_NR_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_AF_INET, _SOCK_DGRAM = 2, 2
_SIOCSIFFLAGS = 0x8914

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.socket.argtypes = [ctypes.c_int] * 3
_libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p]
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)

# What the module `signal` wraps to make enums of all numbers: 50 copied pages in a fresh fork, 0.1 ms of each turn.
set_handler, SIG_DFL, SIG_IGN = _signal.signal, _signal.SIG_DFL, _signal.SIG_IGN
mask_signals = _signal.pthread_sigmask


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def fork() -> int:
    """fork(2) alone. `os.fork` also makes the locks of other threads new in the child and runs the hooks of modules
    there (`threading`, `logging`, `random`), and so writes to 160 pages that are then copied. For a process of one
    thread; the child seeds what must differ, which is `random`."""
    return _check(_libc_with_gil.fork(), "fork")


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


def prctl(what: str, option: int, a: int = 0, b: int = 0) -> None:
    """`what` names it in the error."""
    _check(_libc.prctl(option, a, b, 0, 0), f"prctl {what}")


def die_with_parent() -> None:
    """SIGKILL for this process when its parent dies. Set it last: a change of uid clears it."""
    prctl("PDEATHSIG", _PR_SET_PDEATHSIG, 9)


def set_dumpable(on: bool) -> None:
    """Off: other processes of the same uid cannot read this one's memory, descriptors or environment in /proc."""
    prctl("DUMPABLE", _PR_SET_DUMPABLE, int(on))


def no_new_privileges() -> None:
    prctl("NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def become_subreaper() -> None:
    """Orphans below this process become its children, whatever they do."""
    prctl("CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def drop_bounding_set() -> None:
    """No later exec can gain a capability. Stops at the last capability that the kernel knows, and without CAP_SETPCAP
    at the first: no_new_privileges alone keeps them out then."""
    for capability in range(64):
        try:
            prctl("CAPBSET_DROP", _PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EPERM):
                return
            raise


def drop_capabilities() -> None:
    """Empty the ambient, permitted, effective and inheritable sets of this thread."""
    prctl("CAP_AMBIENT", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.syscall(_NR_CAPSET, header, bytes(24)), "capset")


def open_beneath(folder_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """openat2 that cannot leave `folder_fd`, by no symbolic link, `..` or race (Linux 5.6)."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    return _check(_libc.syscall(_NR_OPENAT2, folder_fd, os.fsencode(path), how, ctypes.c_size_t(len(how))), "open")


def loopback_up() -> None:
    """Bring `lo` up in a new network namespace, so that programs can talk to themselves."""
    fd = _check(_libc.socket(_AF_INET, _SOCK_DGRAM, 0), "socket")
    try:
        request = struct.pack("16sH14x", b"lo", 1)  # struct ifreq with IFF_UP
        _check(_libc.ioctl(fd, _SIOCSIFFLAGS, request), "loopback interface up")
    finally:
        os.close(fd)


def syscall(what: str, number: int, *arguments: int) -> int:
    """Any call of plain numbers. `what` names it in the error."""
    return _check(_libc.syscall(number, *map(ctypes.c_ulong, arguments)), what)


def set_times(path: str, times: bytes | None) -> None:
    """Access and modification time, as two struct timespec, or now."""
    _check(_libc.utimensat(_AT_FDCWD, os.fsencode(path), times, 0), "utimensat")


def landlock_abi() -> int:
    """Version of Landlock here, 0 without."""
    version = _libc.syscall(_NR_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_LANDLOCK_VERSION))
    return max(0, int(version))


def landlock_ruleset(files: int, network: int, scoped: int) -> int:
    """A descriptor of a new set of rules. The arguments say what is withheld where no rule allows it."""
    attr = struct.pack("=QQQ", files, network, scoped)
    size = ctypes.c_size_t(len(attr))
    return _check(_libc.syscall(_NR_LANDLOCK_CREATE_RULESET, attr, size, ctypes.c_uint(0)), "landlock_create_ruleset")


def landlock_allow(ruleset: int, fd: int, rights: int) -> None:
    """Allow `rights` on what `fd` is, and below it."""
    rule = struct.pack("=Qi", rights, fd)
    result = _libc.syscall(_NR_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, rule, ctypes.c_uint(0))
    _check(result, "landlock_add_rule")


def landlock_restrict(ruleset: int, flags: int) -> None:
    """Put this thread and all that it will start under the rules, for good. Needs no_new_privileges."""
    _check(_libc.syscall(_NR_LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint(flags)), "landlock_restrict_self")


def effective_capabilities() -> int:
    """The effective set as a bit mask."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


CAP_SYS_ADMIN = 1 << 21
CAPS_OF_ROOT = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7
"""CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID: without them root can neither give sandboxes uids nor clear up
after them."""
