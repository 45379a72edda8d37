"""The system call filter: a deny-list with argument checks, for x86-64 and aarch64, as classic BPF.

What is denied is what could change the walls (mounts, namespaces, modules, keys), look into other processes, reach the
kernel by a rarely tested path (bpf, perf, io_uring, userfaultfd), hold memory that no limit counts (memfd, SysV shared
memory), or open a network family that a network namespace does not cover. Denied calls give EPERM, so that programs get
an error they can show; calls that libc can do without, and calls newer than the table, give ENOSYS.
"""

import ctypes
import errno
import struct

from . import linux

_DENIED: dict[str, tuple[int | None, int | None]] = {
    # name: (x86-64, aarch64); None where the architecture has no such call
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "personality": (135, 92),
    "unshare": (272, 97),
    "setns": (308, 268),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "nfsservctl": (180, 42),
}
_CLONE3 = 435
_FIRST_UNKNOWN = 463
"""Calls from here on (Linux 6.13 and later) are not in the table above and do not exist for programs inside."""
_CALLS = {  # arch: (AUDIT_ARCH, index into the pairs above, clone, socket, socketpair, ioctl)
    "x86_64": (0xC000003E, 0, 56, 41, 53, 16),
    "aarch64": (0xC00000B7, 1, 220, 198, 199, 29),
}
_X32_BIT = 0x40000000
_CLONE_DENIED = 0x7E020000 | 0x8000
"""Every CLONE_NEW* that clone takes, and CLONE_PARENT."""
_TTY_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


def _op(code: int, k: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, true, false, k)


def _for_call(number: int, body: list[bytes]) -> list[bytes]:
    """`body` runs when the accumulator holds `number`; it must return. Otherwise it is skipped."""
    return [_op(_JEQ, number, 0, len(body)), *body]


def _argument(index: int) -> bytes:
    return _op(_LD, _OFFSET_ARGS + 8 * index)  # the low half: both architectures are little-endian


def build(network: bool) -> bytes:
    """The filter's program. `network`: sockets of the families unix, inet and inet6 may be made (the network namespace
    holds them in); without it no socket at all, only socketpair."""
    if linux.MACHINE not in _CALLS:
        raise OSError(errno.ENOSYS, f"no system call filter for the architecture {linux.MACHINE}")
    audit_arch, column, clone, socket, socketpair, ioctl = _CALLS[linux.MACHINE]
    deny = _op(_RET, _ERRNO | errno.EPERM)
    absent = _op(_RET, _ERRNO | errno.ENOSYS)
    no_family = _op(_RET, _ERRNO | errno.EAFNOSUPPORT)
    allow = _op(_RET, _ALLOW)
    families = (_AF_UNIX, _AF_INET, _AF_INET6) if network else ()
    program = [
        _op(_LD, _OFFSET_ARCH),
        _op(_JEQ, audit_arch, 1, 0),
        _op(_RET, _KILL),
        _op(_LD, _OFFSET_NR),
    ]
    if linux.MACHINE == "x86_64":
        program += [_op(_JGE, _X32_BIT, 0, 1), deny]
    program += [_op(_JGE, _FIRST_UNKNOWN, 0, 1), absent]
    program += _for_call(clone, [_argument(0), _op(_JSET, _CLONE_DENIED, 0, 1), deny, allow])
    program += _for_call(_CLONE3, [absent])
    family_checks = [op for family in families for op in (_op(_JEQ, family, 0, 1), allow)]
    program += _for_call(socket, [_argument(0), *family_checks, no_family])
    program += _for_call(socketpair, [_argument(0), _op(_JEQ, _AF_UNIX, 0, 1), allow, no_family])
    injections = [op for request in _TTY_INJECTION for op in (_op(_JEQ, request, 0, 1), deny)]
    program += _for_call(ioctl, [_argument(1), *injections, allow])
    for pair in _DENIED.values():
        number = pair[column]
        if number is not None:
            program += _for_call(number, [deny])
    program.append(allow)
    return b"".join(program)


def install(program: bytes) -> None:
    """Put this process and all that it will start under the filter, for good. Needs no_new_privileges."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), fprog, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), "seccomp filter refused by the kernel")
