"""What sandboxes of the restricted tier, which have another uid, can read: a Python, and folders of tests."""

import os
import sys
from pathlib import Path


def readable_interpreter() -> str:
    """One that sandboxes of another uid can read where it lies: the running one's base ("", the default) unless that is
    in a folder closed to others."""
    place = Path(sys.base_prefix).resolve()
    open_to_all = all(part.stat().st_mode & 0o001 for part in (place, *place.parents))
    return "" if open_to_all or os.geteuid() != 0 else "/usr/bin/python3"


def open_to_sandboxes(folder: Path) -> None:
    """Let other uids into a folder of a test: pytest closes it, and those above it that it has made."""
    for part in (folder, *folder.parents):
        if part.stat().st_mode & 0o001:
            return
        part.chmod(0o755)
