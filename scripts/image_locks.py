"""Writes the locks of images: of a whole environment's lock, what one service needs. Run it with that environment.

PYTHON scripts/image_locks.py LOCK
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata

from check_locks import IMAGES, ROOT, pins
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(requirements: list[str]) -> set[str]:
    """The canonical names of all that they need, as the installed packages say."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            found.add(name)
            for text in _requires(name):
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append(needed)
    return found


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # left out on purpose, see scripts/lock
        return []


def main() -> None:
    """The command."""
    source = sys.argv[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins(ROOT / "locks" / f"{source}.txt")
    for image, extra in IMAGES.get(source, {}).items():
        names = closure(project["dependencies"] + project["optional-dependencies"][extra])
        head = f"# Of locks/{source}.txt, what turnwire[{extra}] needs; by scripts/lock."
        lines = [f"{name}=={pinned[name]}" for name in sorted(names & pinned.keys())]  # the rest is left out there, too
        path = ROOT / "locks" / f"{image}.txt"
        path.write_text("\n".join([head, *lines, ""]))
        sys.stdout.write(f"{len(lines)} {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
