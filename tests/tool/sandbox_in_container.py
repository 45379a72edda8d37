"""Runs the hostile suite on the process backend where it stands, without pytest, and prints what it saw as JSON.

test_sandbox_container.py starts it inside a default container, with the repository and an environment's packages on
PYTHONPATH: `python3 sandbox_in_container.py 1 8`, once one by one, then 8 at a time.
"""

import asyncio
import sys

import msgspec

from tool_service.sandbox import ProcessBackend, ProcessConfig, SandboxUnavailable
from tool_service.sandbox.hostile import CASES, examine


async def refusal() -> str:
    """What the backend says here to a configuration that asks for nothing."""
    backend = ProcessBackend()
    try:
        await backend.start()
    except SandboxUnavailable as error:
        return str(error)
    finally:
        await backend.close()
    return ""


async def observe(passes: list[int]) -> bytes:
    refused = await refusal()
    config = ProcessConfig(minimum_tier="restricted")
    report = await examine(lambda: ProcessBackend(config), CASES, passes, latest=60.0)  # other tests run beside it
    return msgspec.json.encode({"refusal": refused, "report": report})


if __name__ == "__main__":
    sys.stdout.buffer.write(asyncio.run(observe([int(word) for word in sys.argv[1:]])))
