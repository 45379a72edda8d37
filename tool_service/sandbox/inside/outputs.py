"""What a turn left in the folder `outputs` of the workspace: files that are new or changed since the turn began.

A hint for the service and no more: it comes from the process in which untrusted code runs. The service fetches what it
wants through the supervisor, by safe paths and under limits of its own.
"""

import builtins
import os
import stat

from . import runtimes

__builtins__ = vars(builtins).copy()  # type: ignore[assignment] # as in worker_python.py

FOLDER = "outputs"
_MOST_SEEN = 1000
"""Entries looked at; what is beyond is not reported."""
_MOST_TOLD = 64
_DEEPEST = 8
_LONGEST_PATH = 1024
_OTHER_VALUE_BYTES, _BYTES_AN_ENTRY, _BYTES_A_CHARACTER = 200, 30, 12
"""Of a turn's value as JSON, which has a limit: what else is in it, and the most that a file's size and path take."""


class Outputs:
    """Keeps the functions that it needs, since the program may patch anything."""

    def __init__(self, context: runtimes.Context) -> None:
        self._folder = f"{context.workspace}/{FOLDER}"
        self._most_bytes = context.value_bytes - _OTHER_VALUE_BYTES
        self._before: dict[str, tuple[int, int, int]] = {}
        self._scan, self._stat, self._is_file, self._is_folder = os.scandir, os.lstat, stat.S_ISREG, stat.S_ISDIR
        self._is_there, self._at_all = os.access, os.F_OK

    def begin(self) -> None:
        """A turn begins."""
        self._before = self._look()

    def changed(self) -> list[list[str | int]]:
        """`[path below the workspace, bytes]` of each such file, in order of path."""
        now = self._look()
        if not now:
            return []
        told = sorted(path for path, mark in now.items() if self._before.get(path) != mark)
        files: list[list[str | int]] = []
        room = self._most_bytes
        for path in told[:_MOST_TOLD]:
            room -= len(path) * _BYTES_A_CHARACTER + _BYTES_AN_ENTRY
            if room < 0:
                break
            files.append([path, now[path][0]])
        return files

    def _look(self) -> dict[str, tuple[int, int, int]]:
        """Regular files with size, time of change and inode. Links are not followed."""
        found: dict[str, tuple[int, int, int]] = {}
        if not self._is_there(self._folder, self._at_all):  # as mostly: to ask costs less than the error
            return found
        try:
            if not self._is_folder(self._stat(self._folder).st_mode):
                return found
        except OSError:
            return found
        folders = [(self._folder, FOLDER, 0)]
        seen = 0
        while folders:
            place, name, depth = folders.pop()
            try:
                with self._scan(place) as entries:
                    for entry in entries:
                        seen += 1
                        if seen > _MOST_SEEN:
                            return found
                        path = f"{name}/{entry.name}"
                        if len(path) > _LONGEST_PATH or not path.isprintable():  # as names that are not UTF-8
                            continue
                        info = entry.stat(follow_symlinks=False)
                        if self._is_file(info.st_mode):
                            found[path] = (info.st_size, info.st_mtime_ns, info.st_ino)
                        elif entry.is_dir(follow_symlinks=False) and depth < _DEEPEST:
                            folders.append((entry.path, path, depth + 1))
            except OSError:  # gone meanwhile, or closed to its owner
                continue
        return found
