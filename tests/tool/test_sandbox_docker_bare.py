"""The least that an image must hold: Python. What runs inside needs nothing but its standard library."""

from __future__ import annotations

import pytest
from docker_harness import python, running_backend

from tool_service.sandbox import SandboxLimits, Turn, TurnStatus
from tool_service.sandbox.base import JSON

pytestmark = pytest.mark.needs("docker")

BARE = "python:3.11-slim-bookworm"
LOADED = """
import sys
of_any = {"__main__", "_distutils_hack", "sitecustomize"}  # and what its site-packages load
loaded = {name.partition(".")[0] for name in sys.modules}
print(loaded - sys.stdlib_module_names - of_any, sys.flags.isolated, sys.flags.no_site)
"""


async def test_every_runtime_works_on_the_standard_library_of_a_bare_image() -> None:
    async with running_backend(image=BARE) as backend:
        sandbox = await backend.create(SandboxLimits())
        assert (await python(sandbox, LOADED)).stdout == b"{'inside'} 1 1\n"
        works: dict[str, dict[str, JSON]] = {
            "bash": {"script": "echo $((6 * 7)) > f; cat f"},
            "sql": {"query": "select 6 * 7 as answer"},
            "tests": {"code": "def f(): return 42", "tests": "assert f() == 42"},
        }
        for runtime, payload in works.items():
            result = await sandbox.run(Turn(runtime, payload))
            assert (result.status, "42" in f"{result.stdout!r}{result.value}") == (TurnStatus.OK, True), result
