"""Which Python sandboxes of the restricted tier can run."""

import os
import sys
from pathlib import Path


def readable_interpreter() -> str:
    """One that sandboxes of another uid can read where it lies: the running one's base ("", the default) unless that is
    in a folder closed to others."""
    place = Path(sys.base_prefix).resolve()
    open_to_all = all(part.stat().st_mode & 0o001 for part in (place, *place.parents))
    return "" if open_to_all or os.geteuid() != 0 else "/usr/bin/python3"
