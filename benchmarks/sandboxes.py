"""How soon a sandbox of the process backend is there: through the service's warm pool, and made anew from the warm
interpreter, against the tools that build such walls around a program that does nothing."""

from __future__ import annotations

import asyncio
import shutil
import time

from benchmarks.driving import first_observations
from benchmarks.report import Result, Row, percentile
from benchmarks.services import services
from tool_service.config import PoolConfig, SandboxConfig
from tool_service.sandbox import ProcessBackend, SandboxLimits
from turnwire.client import ToolClient

READY = 8
OTHERS = {
    "unshare": "--user --map-root-user --pid --mount --net --ipc --uts --fork true",
    "bwrap": "--ro-bind / / --proc /proc --dev /dev --unshare-all true",
}
"""Programs with their arguments. Those that are not installed are left out."""


async def run(quick: bool) -> Result:
    pool = SandboxConfig(pool=PoolConfig(ready=READY, max=READY + 4))
    async with services(sandbox=pool).only_tools() as started, ToolClient(started.targets["tool"]) as client:
        rows: list[Row] = await first_observations(client, READY, 4 if quick else 200, aims_ms=(8.0, 25.0))
    made = await _made(10 if quick else 200)
    ours = made.pop("ours")
    rows.append({"figure": "an isolated sandbox from the warm interpreter, p50 ms", "value": ours, "aim": 9.0})
    for name, theirs in made.items():
        rows.append({"figure": f"`{name} ... true`, p50 ms", "value": theirs})
        rows.append({"figure": f"ours against {name}", "value": ours / theirs})
    notes = [
        f"The warm pool has {READY} ready again before each opening.",
        "From the warm interpreter: until the sandbox says that it is ready, with a workspace, limits, a uid, seccomp.",
        "The others run in turn with ours: " + "; ".join(f"{name} {OTHERS[name]}" for name in made),
    ]
    return Result("Sandboxes of the process backend", rows, notes, quick)


async def _made(count: int) -> dict[str, float]:
    """Median milliseconds of ours and of each other."""
    seconds: dict[str, list[float]] = {"ours": [], **{name: [] for name in OTHERS if shutil.which(name)}}
    backend = ProcessBackend()
    await backend.start()
    try:
        for _ in range(count):
            begin = time.perf_counter()
            sandbox = await backend.create(SandboxLimits())
            seconds["ours"].append(time.perf_counter() - begin)
            await sandbox.kill()
            for name in seconds.keys() & OTHERS.keys():
                begin = time.perf_counter()
                process = await asyncio.create_subprocess_exec(name, *OTHERS[name].split())
                code = await process.wait()
                seconds[name].append(time.perf_counter() - begin)
                assert code == 0, f"{name} does not work here"
    finally:
        await backend.close()
    return {name: percentile(values, 0.5) * 1e3 for name, values in seconds.items()}
