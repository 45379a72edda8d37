"""Containers in which the tests of deploy/k8s run this clone."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
import pytest
from k8s_manifests import ROOT

from tool_service.sandbox.docker_config import DEFAULT_IMAGE

PACKAGES = Path(grpc.__file__).parents[1]
CONTAINERS = [
    pytest.mark.needs("docker"),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11), reason="the packages here are for another Python than the image's"
    ),
]
"""What a test needs that uses them."""


def container_of(options: list[str], *words: str) -> list[str]:
    """`docker run` of this clone and its packages in the image of the sandboxes, which has nothing but Python."""
    return [
        *("docker", "run", "--rm", *options, "--entrypoint=python3", "--env=PYTHONPATH=/app:/packages"),
        *(f"--volume={ROOT}:/app:ro", f"--volume={PACKAGES}:/packages:ro", DEFAULT_IMAGE, *words),
    ]
