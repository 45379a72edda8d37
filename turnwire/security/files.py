"""`Watched`: what files say, read again when they change, and kept where the new content cannot be used."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from turnwire.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""Between two looks at the files: what a call costs stays far below what a look does."""


class Watched(Generic[T]):
    """The value that `read` makes of some files. Any thread may ask for it."""

    def __init__(self, paths: Sequence[str | None], read: Callable[[], T]) -> None:
        """Reads at once. Raises the ConfigError of `read`, which says what is wrong with the files."""
        self._paths = [Path(path) for path in paths if path is not None]
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._look()
        self._value = read()
        self._next = time.monotonic() + LOOK_SECONDS

    def get(self) -> T:
        """The value. Where the files have changed to what cannot be used, the one before; the log says why."""
        if time.monotonic() >= self._next:
            with self._lock:
                self._refresh()
        return self._value

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._next:  # another thread was first
            return
        self._next = now + LOOK_SECONDS
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except ConfigError as error:
            logger.warning("changed files are not used, what they said before stays: %s", error)
        else:
            logger.info("read again: %s", names)

    def _look(self) -> list[tuple[int, int, int] | None]:
        """What tells one content from another. Links are followed: Kubernetes changes the link, not the file."""
        return [_mark(path) for path in self._paths]


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
