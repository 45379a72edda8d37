"""The docker backend through the whole tool service: turns, first observations, and containers that serve once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from benchmarks.driving import CODE, EXPECTED, Turn, first_observations, rate
from benchmarks.report import Result, Row, cpu_seconds
from benchmarks.services import services
from tool_service.config import PoolConfig, SandboxConfig
from tool_service.sandbox import SandboxLimits
from tool_service.sandbox.docker_config import DockerConfig, endpoint_of
from tool_service.sandbox.docker_container import specification
from tool_service.sandbox.docker_engine import Engine
from tool_service.sandbox.docker_runtime import runc_version
from turnwire.client import ToolClient, text_of

TRAJECTORIES = 64
AT_ONCE = 4
"""Containers that are made at once, by the service and by the loop of `docker run`."""
ROUNDS, ROUND_SECONDS = 5, 3.0
"""Of turns that keep state, and as many of turns that start an interpreter, by turns: both see the same machine."""
READY = 8
WAIT_SECONDS = 120.0
FRESH = f"import subprocess, sys\n_ = subprocess.run([sys.executable, '-I', '-c', {CODE!r}])"
ENGINE = ("dockerd", "containerd", "containerd-shim-runc-v2", "containerd-shim")


async def run(quick: bool) -> Result:
    config = await _accepting()
    rows: list[Row] = []
    async with (
        services(sandbox=_sandboxes(config, TRAJECTORIES, TRAJECTORIES)).only_tools() as started,
        ToolClient(started.targets["tool"]) as client,
    ):
        tool = started.pids["tool"]
        stateful, fresh = await _turns(client, tool, 1 if quick else ROUNDS)
        rows += [
            {"figure": f"stateful turns/s, {TRAJECTORIES} trajectories", "value": stateful["turns/s"], "aim": 700.0},
            {
                "figure": "the same against a fresh interpreter per call",
                "value": stateful["turns/s"] / fresh["turns/s"],
                "aim": 15.0,
            },
            {"figure": "CPU ms per stateful turn, all processes", "value": stateful["CPU ms/turn"], "aim": 3.0},
        ]
    async with (
        services(sandbox=_sandboxes(config, READY, READY + AT_ONCE)).only_tools() as started,
        ToolClient(started.targets["tool"]) as client,
    ):
        rows += await first_observations(client, READY, 4 if quick else 60, aims_ms=(10.0, 40.0))
        served = await _single_use(lambda: _trajectory(client), 2.0 if quick else 30.0)
    bare = await _single_use(lambda: _docker_run(config), 2.0 if quick else 30.0)
    rows += [
        {"figure": "trajectories/s, one discarded container each", "value": served},
        {"figure": f"`docker run` of the same container, {AT_ONCE} at once, per second", "value": bare},
        {"figure": "trajectories against `docker run`", "value": served / bare, "aim": 0.8},
    ]
    notes = [
        "All processes: client, service, dockerd, containerd, its shims, and what runs in the containers.",
        "The fresh interpreter is started by a turn in the same containers: it pays for no `docker exec`.",
        f"The warm pool has {READY} ready again before each opening.",
    ]
    return Result("Turns and trajectories in containers", rows, notes, quick)


def _sandboxes(config: DockerConfig, ready: int, most: int) -> SandboxConfig:
    return SandboxConfig(
        backend="docker", docker=config, pool=PoolConfig(ready=ready, max=most, wait_seconds=WAIT_SECONDS)
    )


async def _accepting() -> DockerConfig:
    """This machine's runc, whatever its number: what runs here is our own."""
    config = DockerConfig()
    engine = Engine(endpoint_of(config), creations=1, seconds=10)
    await engine.connect()
    version = runc_version(await engine.call(engine.client.version))
    engine.close()
    return DockerConfig(accept_runtime_version=version, parallel_creations=AT_ONCE)


async def _turns(client: ToolClient, tool: int, rounds: int) -> tuple[Row, Row]:
    """With the state kept, and with a fresh interpreter each: the mean of the rounds."""
    sessions = await asyncio.gather(*(client.open(f"docker-{i}", ["python"]) for i in range(TRAJECTORIES)))

    def sending(code: str) -> Turn:
        async def turn(number: int) -> None:
            answer = await sessions[number].act(f"<python>{code}</python>")
            assert text_of(answer.observations[0]) == EXPECTED, answer

        return turn

    seen: dict[str, list[Row]] = {CODE: [], FRESH: []}
    for _ in range(rounds):
        for code, rows in seen.items():
            rows.append(await rate(sending(code), TRAJECTORIES, ROUND_SECONDS, lambda: _cpu(tool)))
    await asyncio.gather(*(session.close() for session in sessions))
    return _mean(seen[CODE]), _mean(seen[FRESH])


def _mean(rows: list[Row]) -> Row:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def _cpu(tool: int) -> dict[int, float]:
    """By process, each with what is below it. Shims are no children of the engine's; containers are their shims'."""
    found = {}
    engine = (process.pid for process in psutil.process_iter(["name"]) if process.info["name"] in ENGINE)
    for pid in (os.getpid(), tool, *engine):
        with contextlib.suppress(psutil.NoSuchProcess):  # somebody else's container has ended
            found[pid] = cpu_seconds(pid)
    return found


async def _single_use(once: Callable[[], Awaitable[Any]], seconds: float) -> float:
    """How often a second, `AT_ONCE` at a time."""
    done = 0
    begin = time.perf_counter()

    async def drive() -> None:
        nonlocal done
        while time.perf_counter() < begin + seconds:
            await once()
            done += 1

    await asyncio.gather(*(drive() for _ in range(AT_ONCE)))
    return done / (time.perf_counter() - begin)


async def _trajectory(client: ToolClient) -> None:
    session = await client.open(f"single-{time.perf_counter_ns()}", ["python"])
    answer = await session.act(f"<python>{CODE}</python>")
    assert text_of(answer.observations[0]) == EXPECTED, answer
    await session.close()


async def _docker_run(config: DockerConfig) -> None:
    """With the walls of a sandbox, as far as they cost time: mounts, limits, uid, read-only root, no network."""
    limits = SandboxLimits()
    host = specification(config, limits, config.uid_base, {})["HostConfig"]
    tmpfs = [word for path, options in host["Tmpfs"].items() for word in ("--tmpfs", f"{path}:{options}")]
    process = await asyncio.create_subprocess_exec(
        *("docker", "run", "--rm", "-i", "--network", "none", "--read-only", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--log-driver", "none", "--user", f"{config.uid_base}"),
        *("--memory", str(host["Memory"]), "--memory-swap", str(host["Memory"]), "--cpus", str(config.cpus)),
        *("--pids-limit", str(host["PidsLimit"]), *tmpfs, config.image, "python3", "-I", "-c", CODE),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert output.decode().strip() == EXPECTED, output
