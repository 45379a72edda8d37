"""What the tool service needs installed: a tree without a Rust extension, so that it builds wherever C does."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def tree() -> list[str]:
    """Distributions that `turnwire[tool]` brings here, itself not among them."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    waiting = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["tool"])]
    found: dict[str, None] = {}
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in found:
            continue
        found[name] = None
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return sorted(found)


def rust_in(distribution: str) -> list[str]:
    """Shared objects of a distribution that rustc made: it leaves the paths of its own sources in them."""
    files = metadata.files(distribution) or []
    objects = [Path(str(file.locate())) for file in files if file.suffix == ".so" or ".so." in file.name]
    return [path.name for path in objects if b"/rustc/" in path.read_bytes()]


@pytest.mark.parametrize("distribution", tree())
def test_nothing_below_the_tool_service_is_rust(distribution: str) -> None:
    assert rust_in(distribution) == []


def test_rust_is_recognised_where_it_is() -> None:
    assert rust_in("tokenizers")
    assert {"grpcio", "msgspec", "docker", "requests"} <= set(tree())
