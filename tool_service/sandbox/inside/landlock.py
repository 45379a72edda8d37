"""Landlock: what programs may do with files by path, whoever owns them, and whom they can reach outside of files.

In the isolated tier this is a second line behind a root that holds nothing else. In the restricted tier it is what
stands between a program and every file of the machine that its uid could read. It does not cover what changes a file
without opening it (mode, times, owner), nor whether a path exists.
"""

import errno
import os
from typing import NamedTuple

from . import linux

ABI = linux.landlock_abi()
"""Version of Landlock here, 0 without."""
SIGNAL_SCOPE_ABI = 6
"""From here on (Linux 6.12) signals and abstract sockets can be kept in."""
_RENAME_ABI, _TRUNCATE_ABI, _NETWORK_ABI, _DEVICE_ABI, _QUIET_ABI = 2, 3, 4, 5, 7

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_MAKE_DEVICES = 1 << 6 | 1 << 11  # character and block devices
_TRUNCATE, _CONTROL_DEVICE = 1 << 14, 1 << 15
_BIND_TCP, _CONNECT_TCP = 1, 2
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
_LOG_NOTHING = 1
_OWN_PROC = tuple(
    f"/proc/self/{name}"
    for name in ("status", "stat", "statm", "maps", "fd", "fdinfo", "cmdline", "environ", "comm", "limits")
)
"""Of a worker's folder in /proc; not what tells of the machine (mounts, sockets, cgroups)."""


def known(abi: int) -> int:
    """Every right over files that this kernel can withhold."""
    bits = 13 + (abi >= _RENAME_ABI) + (abi >= _TRUNCATE_ABI) + (abi >= _DEVICE_ABI)
    return (1 << bits) - 1


_ALL = known(ABI)
_READ = (_EXECUTE | _READ_FILE | _READ_DIR) & _ALL
_WRITE = _ALL & ~_MAKE_DEVICES & ~_CONTROL_DEVICE
_DEVICE = (_READ_FILE | _WRITE_FILE | _TRUNCATE | _CONTROL_DEVICE) & _ALL
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _CONTROL_DEVICE


class Walls(NamedTuple):
    """What the programs of a sandbox may touch, each path with all that is below it."""

    readable: tuple[str, ...]
    """Files and folders to read and to execute."""
    writable: tuple[str, ...]
    """Folders to do anything in but make devices. The first is the workspace."""
    devices: tuple[str, ...]
    """Devices, or a folder of them, to read, write and control."""
    alone: bool
    """No namespaces surround the sandbox: TCP, and signals and abstract sockets to others, are withheld here."""


class Ruleset:
    """`Walls` as rules, made once by the supervisor; each of its workers goes behind them. What this kernel cannot
    withhold is not withheld; a path that is not there, or cannot be reached, is left out."""

    def __init__(self, walls: Walls) -> None:
        self._alone = walls.alone
        self._fd = -1
        if ABI == 0:
            return
        network = (_BIND_TCP | _CONNECT_TCP) if walls.alone and ABI >= _NETWORK_ABI else 0
        scoped = (_ABSTRACT_SOCKETS | _SIGNALS) if walls.alone and ABI >= SIGNAL_SCOPE_ABI else 0
        self._fd = linux.landlock_ruleset(_ALL, network, scoped)
        for paths, rights in ((walls.readable, _READ), (walls.writable, _WRITE), (walls.devices, _DEVICE)):
            for path in paths:
                self._allow(path, rights)

    def _allow(self, path: str, rights: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            return
        try:
            linux.landlock_allow(self._fd, fd, rights)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            linux.landlock_allow(self._fd, fd, rights & _OF_FILES)  # no folder
        finally:
            os.close(fd)

    def confine(self) -> None:
        """Put this process and all that it will start behind the walls, for good. Needs no_new_privileges. A process
        without namespaces may read of /proc what concerns itself."""
        if self._fd == -1:
            return
        for path in _OWN_PROC if self._alone else ():
            self._allow(path, _READ)
        linux.landlock_restrict(self._fd, _LOG_NOTHING if ABI >= _QUIET_ABI else 0)
