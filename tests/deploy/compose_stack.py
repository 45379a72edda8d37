"""The stack of docker-compose.yml on this machine's engine, under a name and a port of its own, and a run in it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml
from docker.models.containers import Container
from testcontainers.compose import DockerCompose

from tool_service.sandbox.docker_container import OWNER
from tool_service.sandbox.docker_runtime import runc_version
from turnwire.client import ConnectionSecurity
from turnwire.client.trainer import TrainerClient
from turnwire.v1 import trainer_pb2 as pb

ROOT = Path(__file__).parents[2]
IMAGES = ("turnwire/tool:dev", "turnwire/rollout:dev", "turnwire/trainer:dev")
SERVICES = ("tool", "rollout", "trainer")

KILL = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    words = open(f"/proc/{pid}/cmdline").read().split("\\0")
    if words[1:3] == ["-m", "NAME_service"]:
        os.kill(int(pid), signal.SIGKILL)
"""
"""Run in a service's container: kill -9 for the service. `docker kill` would tell the engine not to start it again."""

PATIENCE = 600
"""Seconds, that keep a test of broken code from hanging and decide nothing: a run may have to load torch again, on a
machine that has other work."""


def lack() -> str:
    """Why the stack cannot run here; empty if it can."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        return "there is no `docker compose` (version 2 or later)"
    try:
        client = docker.from_env()
        for image in (*IMAGES, "turnwire/sandbox-python:1"):
            client.images.get(image)
    except docker.errors.DockerException as error:
        return f"{error} (`make services images` builds the images)"
    return ""


def prometheus() -> dict[str, Any]:
    """What differs from docker-compose.yml: the programs are this machine's (Debian's), in an image that it has."""
    found = {name: shutil.which(name) for name in ("prometheus", "promtool")}
    volumes = [f"{path}:/usr/bin/{name}:ro" for name, path in found.items() if path]
    return {"image": IMAGES[0], "user": "0", "entrypoint": ["/usr/bin/prometheus"], "volumes": volumes}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Stack:
    """A stack that is up. `secrets`: the folder of its certificates and tokens."""

    def __init__(self, folder: Path) -> None:
        self.project = f"turnwire-test-{secrets.token_hex(4)}"
        self.secrets = folder / "secrets"
        self.port, self.prometheus_port = free_port(), free_port()
        self.override = folder / "override.yml"
        self.override.write_text(yaml.safe_dump({"services": {"prometheus": prometheus()}}))
        self.engine = docker.from_env()
        socket_path = Path(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://"))
        self.settings = {
            "COMPOSE_PROJECT_NAME": self.project,
            "DOCKER_GID": str(socket_path.stat().st_gid),
            "DOCKER_SOCKET": str(socket_path),
            "TURNWIRE_SECRETS": str(self.secrets),
            "TURNWIRE_VERSION": "dev",
            "TURNWIRE_ACCEPT_RUNC": runc_version(self.engine.version()),  # it is the tests' own code that runs
            "TRAINER_PORT": str(self.port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
        }

    def compose(self, *arguments: str) -> None:
        """`docker compose`, while the stack is up."""
        files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(self.override))
        done = subprocess.run(["docker", "compose", *files, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    @contextlib.contextmanager
    def up(self, *services: str) -> Iterator[None]:
        """Until the end of the block. What went wrong is told with the services' logs."""
        prepare = subprocess.run(
            [ROOT / "deploy/compose/prepare"],
            env=os.environ | self.settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert prepare.returncode == 0, prepare.stderr
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.settings.items():
                patch.setenv(name, value)
            compose = DockerCompose(ROOT, "docker-compose.yml", services=list(services), wait=True)
            try:
                compose.start()
                yield
            except BaseException:  # whatever it was, what the services said helps to find it
                sys.stderr.write(self.logs())
                raise
            finally:
                DockerCompose(ROOT, "docker-compose.yml").stop()

    def container(self, service: str) -> Container:
        """Of a service."""
        labels = [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]
        (found,) = self.engine.containers.list(all=True, filters={"label": labels})
        return found

    def containers(self) -> list[str]:
        """Names of all that belong to the stack: services, and sandboxes."""
        labels = (f"com.docker.compose.project={self.project}", f"{OWNER}=compose-{self.project}")
        return [one.name for label in labels for one in self.engine.containers.list(all=True, filters={"label": label})]

    def sandboxes(self) -> list[Container]:
        """The tool service's."""
        found: list[Container] = self.engine.containers.list(filters={"label": f"{OWNER}=compose-{self.project}"})
        return found

    def kill(self, service: str) -> None:
        """kill -9 for the service's process; its container ends with it."""
        before = self.container(service).attrs["RestartCount"]
        self.container(service).exec_run(["python", "-c", KILL.replace("NAME", service)])
        eventually(lambda: self.container(service).attrs["RestartCount"] > before)

    def replace(self, service: str) -> None:
        """As a new version of it is rolled out: it drains and ends, and another container takes its place."""
        self.compose("up", "--detach", "--no-deps", "--force-recreate", service)

    @property
    def network(self) -> Any:
        """That the services share."""
        return self.engine.networks.get(f"{self.project}_default")

    def healthy(self, service: str) -> None:
        """Wait until it is."""
        eventually(lambda: self.container(service).attrs["State"].get("Health", {}).get("Status") == "healthy")

    def logs(self) -> str:
        """The last words of each service."""
        told = []
        for service in SERVICES:
            with contextlib.suppress(ValueError, docker.errors.DockerException):  # it was not even made
                text = self.container(service).logs(tail=30).decode(errors="replace")
                told.append(f"--- {service}\n{text}")
        return "\n".join(told)

    def security(self, token: str | None = "admin") -> ConnectionSecurity:
        """Of a client on this machine."""
        return ConnectionSecurity(
            ca=str(self.secrets / "ca.crt"),
            certificate=str(self.secrets / "client.crt"),
            key=str(self.secrets / "client.key"),
            token_file=None if token is None else str(self.secrets / f"{token}.token"),
        )

    def turnwire(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """The command on this machine, with the settings that reach the stack."""
        security = self.security()
        environment = {
            "TURNWIRE_CA": security.ca,
            "TURNWIRE_CERTIFICATE": security.certificate,
            "TURNWIRE_KEY": security.key,
            "TURNWIRE_TOKEN_FILE": security.token_file,
        }
        return subprocess.run(
            [sys.executable, "-m", "turnwire.cli", *map(str, arguments)],
            env=os.environ | {name: value for name, value in environment.items() if value},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def file(self, run_id: str, name: str) -> bytes:
        """Out of a run's folder."""
        chunks, _ = self.container("trainer").get_archive(f"/var/lib/turnwire/runs/{run_id}/{name}")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            content = archive.extractfile(archive.getmembers()[0])
            assert content is not None
            return content.read()

    def summary(self, run_id: str) -> dict[str, Any]:
        """What became of a run."""
        found: dict[str, Any] = json.loads(self.file(run_id, "summary.json"))
        return found


class WatchedRun:
    """A run in the stack that is watched, and what its watchers have been told so far."""

    def __init__(self, client: TrainerClient, run_id: str) -> None:
        self.client, self.run_id = client, run_id
        self.events: list[pb.WatchRunResponse] = []
        self._news = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    @property
    def step(self) -> int:
        """The last one that was told of."""
        steps = [event.step.step for event in self.events if event.WhichOneof("event") == "step"]
        return steps[-1] if steps else 0

    @property
    def infra_failures(self) -> float:
        """Trajectories that infrastructure failed and that were tried again, since the trainer has started."""
        steps = [event.step for event in self.events if event.WhichOneof("event") == "step"]
        return steps[-1].metrics["rollouts/infra_failures"]

    def notices(self, first: int = 0) -> str:
        """What people were told, from event number `first` on."""
        return "\n".join(event.notice.text for event in self.events[first:] if event.WhichOneof("event") == "notice")

    async def stop_watching(self) -> None:
        """The run itself goes on."""
        self._watching.cancel()
        await asyncio.wait([self._watching])

    async def watch_again(self) -> None:
        """Once watchers were told that the run has stopped, because the trainer drains."""
        await self._watching
        self._watching = asyncio.create_task(self._watch(self.events[-1].sequence + 1))

    async def _watch(self, first: int = 0) -> None:
        try:
            async for event in self.client.watch_run(self.run_id, first, patience=PATIENCE):
                self.events.append(event)
                self._news.set()
        finally:
            self._news.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that an event tells."""
        async with asyncio.timeout(PATIENCE):
            while not happened():
                assert not self._watching.done(), f"the run has ended: {self.events[-1]}\n{self.notices()}"
                self._news.clear()
                await self._news.wait()

    async def finished(self) -> None:
        """Wait for the run's last step, and then for its end."""
        await self._watching
        assert pb.RunState.Name(self.events[-1].state.state) == "RUN_STATE_FINISHED", self.events[-1]

    async def stop(self) -> int:
        """End it after its current step; returns that step's number."""
        await self.client.stop_run(self.run_id, PATIENCE)
        await self._watching
        return self.step

    async def goes_on(self, steps: int = 2) -> None:
        """Wait for so many more steps than there are."""
        now = len(self.events)
        await self.until(lambda: sum(event.WhichOneof("event") == "step" for event in self.events[now:]) >= steps)


@contextlib.asynccontextmanager
async def run_in(stack: Stack, run_id: str, config: dict[str, Any] | None = None) -> AsyncIterator[WatchedRun]:
    """A run that is started, if there is a config of it, and watched until the end of the block."""
    async with TrainerClient(f"localhost:{stack.port}", stack.security()) as client:
        await client.wait_until_ready(PATIENCE)
        if config is not None:
            await client.start_run(run_id, yaml.safe_dump(config))
        run = WatchedRun(client, run_id)
        try:
            yield run
        finally:
            await run.stop_watching()


def demo(steps: int, prompts: int) -> dict[str, Any]:
    """configs/demo.yaml's run, short."""
    run: dict[str, Any] = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())["run"]
    run["training"] |= {"steps": steps, "prompts_per_step": prompts}
    run["evaluation"] = {"before": False, "after": False}
    run["checkpoint"] = {"every": 2}
    return run


def eventually(true: Callable[[], bool]) -> None:
    """Wait for what is seen from outside alone."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.2)


def compose_commands() -> list[list[str]]:
    """The versions of Compose that this machine has."""
    commands = [["docker", "compose"], *([["docker-compose"]] if shutil.which("docker-compose") else [])]
    return [
        command
        for command in commands
        if not subprocess.run([*command, "version"], capture_output=True, check=False).returncode
    ]
