"""The folders that programs can write to: what they hold, and how they are emptied for the next user."""

import contextlib
import os
from collections.abc import Sequence

_MESSAGE_QUEUES = "/dev/mqueue"
"""In a container a folder in which `open` makes one, if nothing else forbids it."""
_CONNECTIONS = tuple(f"/proc/self/net/{name}" for name in ("tcp", "tcp6", "udp", "udp6", "unix"))
_LARGEST_PRIVATE = 1 << 36
"""Bytes of a file system past which it cannot be one of the sandbox's own."""
_MOST_PRIVATE_INODES = 1 << 24


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
        return "connections" if any(map(_has_entries, _CONNECTIONS)) else ""


def _has_entries(table: str) -> bool:
    """Of a table of /proc, below its headline. What a program closed stays in it for a minute."""
    with contextlib.suppress(FileNotFoundError), open(table, encoding="ascii") as file:
        return len(file.readlines()) > 1
    return False


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
