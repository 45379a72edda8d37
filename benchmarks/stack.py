"""The stack of docker-compose.yml: from `docker compose up` to the first trained step, and the sizes of its images.

It runs beside whatever else is on the engine, under a name and a port of its own, and is taken away at the end.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import docker

from benchmarks.report import Result, Row
from tool_service.sandbox import SandboxUnavailable
from tool_service.sandbox.docker_runtime import runc_version

ROOT = Path(__file__).parents[1]
SERVICES = ("tool", "rollout", "trainer")
IMAGES = (*(f"turnwire/{name}:dev" for name in SERVICES), "turnwire/sandbox-python:1")
_MB = 1e6


async def run(quick: bool) -> Result:
    rows = await asyncio.to_thread(_run)
    note = "from images that are built, volumes that are empty, and no service running; sizes as the engine gives them"
    return Result("The stack of docker-compose.yml", rows, [note], quick)


def _run() -> list[Row]:
    try:
        engine = docker.from_env()
        rows = [{"figure": f"MB, {name}", "value": engine.images.get(name).attrs["Size"] / _MB} for name in IMAGES]
        shared = _shared(engine, "turnwire/rollout:dev", "turnwire/trainer:dev")
    except docker.errors.DockerException as error:
        raise SandboxUnavailable(f"{error}: `make services images` builds the images") from error
    rows.append({"figure": "MB of layers that rollout and trainer share, base and all", "value": shared})
    with tempfile.TemporaryDirectory() as folder:
        rows += _start(Path(folder), runc_version(engine.version()))
    return rows


def _shared(engine: docker.DockerClient, one: str, other: str) -> float:
    """Of layers from the first on; the engine's history has them in the other order."""
    layers = [engine.images.get(name).attrs["RootFS"]["Layers"] for name in (one, other)]
    count = next((index for index, pair in enumerate(zip(*layers, strict=False)) if pair[0] != pair[1]), 0)
    sizes = [step["Size"] for step in reversed(engine.images.get(one).history()) if step["Size"]]
    return float(sum(sizes[:count])) / _MB


def _start(folder: Path, runc: str) -> list[Row]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    certificates = folder / "secrets"
    environment = os.environ | {
        "COMPOSE_PROJECT_NAME": f"turnwire-bench-{secrets.token_hex(4)}",
        "DOCKER_GID": str(Path("/var/run/docker.sock").stat().st_gid),
        "TURNWIRE_SECRETS": str(certificates),
        "TURNWIRE_ACCEPT_RUNC": runc,
        "TRAINER_PORT": str(port),
        "TURNWIRE_CA": str(certificates / "ca.crt"),
        "TURNWIRE_CERTIFICATE": str(certificates / "client.crt"),
        "TURNWIRE_KEY": str(certificates / "client.key"),
        "TURNWIRE_TOKEN_FILE": str(certificates / "admin.token"),
    }
    compose = ["docker", "compose", "-f", "docker-compose.yml"]

    def quietly(*command: str) -> None:
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)

    quietly("deploy/compose/prepare")
    began = time.monotonic()
    try:
        quietly(*compose, "up", "--wait", *SERVICES)
        healthy = time.monotonic() - began
        train = [sys.executable, "-m", "turnwire.cli", "train", "configs/demo.yaml", "--target", f"localhost:{port}"]
        short = ["training.steps=1", "evaluation.before=false", "evaluation.after=false"]
        with subprocess.Popen(
            [*train, *short], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as training:
            assert training.stdout is not None
            said = []
            for line in training.stdout:
                said.append(line)
                if line.startswith("step 1/"):
                    trained = time.monotonic() - began
        if training.returncode:
            raise RuntimeError("".join(said))
    finally:
        quietly(*compose, "down", "--volumes")
    return [
        {"figure": "seconds from up until all three services are healthy", "value": healthy},
        {"figure": "seconds from up until the first trained step", "value": trained},
    ]
