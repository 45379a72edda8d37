"""Files of a run that only grow, one JSON object a line, and can be cut back to where a checkpoint saw them; and
files that are replaced whole.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

RUN_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""What a run's id may be: it names the run's folder."""


class AppendFile:
    """A JSON lines file. `position` bytes are kept from an earlier process, what is behind them is cut off."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        sync_folder(path.parent)
        if self._file.tell() < position:
            raise ValueError(f"{path} is shorter ({self._file.tell()} bytes) than its checkpoint says ({position})")
        self._file.truncate(position)
        self._file.seek(position)

    def write(self, value: dict[str, Any]) -> None:
        """Add a line. It is on its way to the disk, not yet on it."""
        self._file.write(json.dumps(value, ensure_ascii=False, allow_nan=True).encode() + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Force it to the disk. Returns its length: the position for a checkpoint."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all. Raises ValueError for NaN and infinity, which JSON does not have."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
