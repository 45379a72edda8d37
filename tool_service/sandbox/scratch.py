"""Workspaces on the host's file system, for the restricted tier, which has no mounts of its own.

One folder a service, locked while the service lives, one folder a sandbox in it. `sweep` removes the folders of
services that are dead: those whose lock can be taken.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator

from tool_service.sandbox.base import SandboxUnavailable

_PREFIX = "turnwire-sandboxes-"


class Scratch:
    """Made at the first use, so that the isolated tier never touches the disk."""

    def __init__(self) -> None:
        self._root = ""
        self._lock_fd = -1

    def make(self, sandbox_id: str, uid: int) -> str:
        """A new folder, with `work` and `tmp` in it for `uid` alone. Raises `SandboxUnavailable`."""
        try:
            return self._make(sandbox_id, uid)
        except OSError as error:
            raise SandboxUnavailable(
                f"no workspace can be made ({error}): give the service a temporary folder that it can write to (TMPDIR)"
            ) from error

    def _make(self, sandbox_id: str, uid: int) -> str:
        while not self._root:
            self._lock(tempfile.mkdtemp(prefix=_PREFIX))
        folder = f"{self._root}/{sandbox_id}"
        os.mkdir(folder)
        os.chmod(folder, 0o711)  # noqa: S103 - as the root; and ours, so that no program takes its own supervisor's way
        for path in (f"{folder}/work", f"{folder}/tmp"):  # noqa: S108 - ours
            os.mkdir(path, 0o700)
            os.chown(path, uid, -1)
        return folder

    def _lock(self, root: str) -> None:
        """Take a new folder for ours. Another service's sweep may come before the lock, and remove it."""
        try:
            fd = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        fcntl.flock(fd, fcntl.LOCK_EX)
        if not os.path.isdir(root):
            os.close(fd)
            return
        os.chmod(root, 0o711)  # noqa: S103 - sandboxes of other uids pass through, and cannot list
        self._root, self._lock_fd = root, fd

    def retire(self, sandbox_id: str) -> str:
        """Take a dead sandbox's folder out of everybody's reach, at once; its new path, empty if there is none.
        Removing what is in it can take long: `remove`, in another thread."""
        old, new = f"{self._root}/{sandbox_id}", f"{self._root}/.retired-{sandbox_id}"
        if not self._root or not os.path.isdir(old):
            return ""
        os.rename(old, new)
        os.chmod(new, 0o700)
        return new

    def remove(self, retired: str) -> None:
        _remove_tree(retired)

    def leftovers(self) -> list[str]:
        """Folders of sandboxes that dead services of this user left."""
        with contextlib.closing(self._dead()) as dead:
            return [f"{path}/{name}" for path in dead for name in sorted(os.listdir(path))]

    def sweep(self) -> int:
        """Remove what dead services of this user left; the number of sandboxes' folders removed."""
        count = 0
        with contextlib.closing(self._dead()) as dead:
            for path in dead:
                count += len(os.listdir(path))
                _remove_tree(path)
        return count

    def _dead(self) -> Generator[str, None, None]:
        """Folders of dead services of this user, each locked until the next is asked for."""
        try:
            parent = tempfile.gettempdir()
        except FileNotFoundError:
            return  # a file system that is read-only everywhere: nobody left anything
        for name in sorted(os.listdir(parent)):
            path = f"{parent}/{name}"
            if not name.startswith(_PREFIX) or path == self._root:
                continue
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue  # another user's, or no folder
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_uid == os.geteuid() and os.path.isdir(path):  # nobody removes it from now on
                    yield path
            except BlockingIOError:
                continue  # its service lives
            finally:
                os.close(fd)

    def close(self) -> None:
        if self._root:
            _remove_tree(self._root)
            os.close(self._lock_fd)
            self._root, self._lock_fd = "", -1


def _remove_tree(path: str) -> None:
    """Remove a folder that untrusted code filled: of any depth, with any modes, never through a link. Its processes are
    dead. Deep folders are moved up to the top first, so that depth costs neither stack nor path length."""
    pending = [path]
    while pending:
        folder = pending.pop()
        try:
            os.chmod(folder, 0o700)
            with os.scandir(folder) as entries:
                folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        for entry in folders:
            flat = f"{path}/.flat-{entry.inode()}"
            os.chmod(entry.path, 0o700)  # a folder can be moved only if it can be written
            os.rename(entry.path, flat)
            pending.append(flat)
    shutil.rmtree(path, ignore_errors=True)
