"""The folders that programs can write to: what they hold, and how they are emptied for the next user."""

import ctypes
import os
import struct
from collections.abc import Sequence

_MESSAGE_QUEUES = "/dev/mqueue"
_LARGEST_PRIVATE = 1 << 36
"""Bytes of a file system past which it cannot be one of the sandbox's own."""
_MOST_PRIVATE_INODES = 1 << 24
_SHM_INFO, _SEM_INFO, _MSG_INFO = 14, 19, 12


class Spaces:
    """`paths`: mount points that no program can move, or in the restricted tier the one workspace."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._file_systems = tuple({os.stat(path).st_dev: path for path in paths}.values())

    def bytes_used(self) -> int:
        """Of all file systems of the sandbox's own, each counted once."""
        total = 0
        for path in self._file_systems:
            info = os.statvfs(path)
            if info.f_files <= _MOST_PRIVATE_INODES and info.f_blocks * info.f_frsize <= _LARGEST_PRIVATE:
                total += (info.f_blocks - info.f_bfree) * info.f_frsize
        return total

    def wipe(self) -> None:
        """Empty them. No process of a program's may be left. Raises OSError where something resists."""
        for path in self._paths:
            _empty(path)

    def leftovers(self) -> str:
        """What a program left that a wipe does not reach; empty if nothing."""
        for path in self._paths:
            if os.listdir(path) or os.listxattr(path):
                return f"{path} is not empty"
        if os.path.isdir(_MESSAGE_QUEUES) and os.listdir(_MESSAGE_QUEUES):
            return "POSIX message queues"
        return "System V IPC objects" if _system_v_objects() else ""


def _empty(top: str) -> None:
    """Remove all that is in a folder, of any depth, with any modes, never through a link. Deep folders are moved up to
    the top first, so that depth costs neither stack nor path length."""
    pending = [top]
    while pending:
        folder = pending.pop()
        os.chmod(folder, 0o700)
        with os.scandir(folder) as listing:
            entries = list(listing)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)  # a folder can be moved only if it can be written
                flat = f"{top}/.flat-{entry.inode()}"
                os.rename(entry.path, flat)
                pending.append(flat)
            else:
                os.unlink(entry.path)
        if folder != top:
            os.rmdir(folder)
    for name in os.listxattr(top):
        os.removexattr(top, name)


def _system_v_objects() -> int:
    """How many there are in this IPC namespace; counted by the calls that ipcs(1) falls back to, since a /proc of a
    sandbox may not list them."""
    libc = ctypes.CDLL(None)
    info = ctypes.create_string_buffer(256)
    libc.shmctl(0, _SHM_INFO, info)
    count: int = struct.unpack_from("=i", info)[0]  # shm_info.used_ids
    libc.semctl(0, 0, _SEM_INFO, info)
    count += struct.unpack_from("=8i", info)[7]  # seminfo.semusz
    libc.msgctl(0, _MSG_INFO, info)
    return count + int(struct.unpack_from("=i", info)[0])  # msginfo.msgpool
