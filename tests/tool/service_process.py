"""The tool service as a process of its own, on either backend, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import docker
import grpc
import grpc.aio
import psutil
import pytest
import yaml
from docker_harness import as_dict, client, containers, docker_config, new_owner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tool_harness import PLUGINS, Trajectory, retry_seconds, texts
from waiting import PATIENCE, PROGRAM, eventually

from turnwire.v1 import tool_pb2, tool_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]

PROCESS = pytest.param("process", marks=pytest.mark.needs("isolated-sandbox"))
DOCKER = pytest.param("docker", marks=pytest.mark.needs("docker"))
on_both_backends = pytest.mark.parametrize("backend", [PROCESS, DOCKER])


def sandbox_section(backend: str, owner: str, **changes: Any) -> dict[str, Any]:
    """Of a service's config. `changes`: to the section's fields, as `pool`; `docker`: to the backend's."""
    section = {"backend": backend, "owner": owner, "pool": {"ready": 1}, **changes}
    if backend == "docker":
        section["docker"] = as_dict(docker_config(**changes.get("docker", {})))
    return section


LOOK_SECONDS = 0.1
"""Between two looks at a service, which has better things to do than to answer them."""

BUSY = "import subprocess, time; open('f', 'w').write('x' * 10**5); subprocess.Popen(['sleep', '600']); time.sleep(600)"
"""A turn that is in mid-turn: a file, a worker and what that has started, so that there is something to be left."""


class ServiceProcess:
    """A service that serves. `backend`, `owner`: of its sandboxes. `folder`: its temporary folder, log and config."""

    def __init__(
        self, process: asyncio.subprocess.Process, address: str, backend: str, owner: str, folder: Path
    ) -> None:
        self.process = process
        self.address = address
        self.backend = backend
        self.owner = owner
        self.folder = folder
        self.channel = grpc.aio.insecure_channel(address)
        self.stub: Any = tool_pb2_grpc.ToolServiceStub(self.channel)

    async def status(self) -> tool_pb2.GetStatusResponse:
        return await self.stub.GetStatus(tool_pb2.GetStatusRequest(), timeout=PATIENCE)

    async def pool(self) -> tool_pb2.SandboxPoolStatus:
        (pool,) = (await self.status()).pools
        return pool

    async def health(self) -> str:
        """As "SERVING"."""
        request = health_pb2.HealthCheckRequest(service="turnwire.v1.ToolService")
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=PATIENCE)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def becomes(self, health: str) -> None:
        async def is_so() -> bool:
            return await self.health() == health

        await eventually(is_so, pause=LOOK_SECONDS)

    async def busy_with(self, turns: int) -> None:
        """Wait until so many turns run, each in its sandbox."""

        async def is_so() -> bool:
            status = await self.status()
            return status.turns_running == turns and status.pools[0].in_use == turns and not status.pools[0].waiting

        await eventually(is_so, 180, LOOK_SECONDS)

    async def quiet(self, ready: int | None = None) -> None:
        """Wait until no session, turn or sandbox is in use, and, if given, `ready` sandboxes wait, as at the start."""

        async def is_so() -> bool:
            status = await self.status()
            (pool,) = status.pools
            used = status.sessions_open + status.sessions_leased + status.turns_running + pool.in_use + pool.waiting
            return used == 0 and ready in (None, pool.ready)

        await eventually(is_so, pause=LOOK_SECONDS)

    def footprint(self) -> dict[str, int]:
        """What the service and its processes hold now. Containers have no part in it: see `Traces`."""
        tree = [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]
        seen = tree if os.geteuid() == 0 else tree[:1]  # root alone may look into sandboxes
        ours = os.readlink("/proc/self/ns/mnt")  # in which others of this machine come and go
        jailed = [pid for pid in seen if os.readlink(f"/proc/{pid}/ns/mnt") != ours]
        return {
            "processes": len(tree),
            "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in seen),
            "mounts": sum(len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()) for pid in jailed),
            "network namespaces": len({os.readlink(f"/proc/{pid}/ns/net") for pid in seen}),
            "files": sum(len(names) + len(folders) for _, folders, names in os.walk(self.folder / "tmp")),
        }

    def memory(self) -> int:
        """Bytes that the service itself has in memory."""
        return psutil.Process(self.process.pid).memory_info().rss

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and wait; the exit status."""
        self.signal(number)
        return await asyncio.wait_for(self.process.wait(), PATIENCE)


class Traces:
    """All that a service's sandboxes have on this machine in which `sleep SECONDS` runs, as it was when this was made:
    to be asked later what is still there. (A namespace lives by processes, mounts and descriptors alone.)"""

    def __init__(self, service: ServiceProcess, seconds: str) -> None:
        known = containers(service.owner) if service.backend == "docker" else []
        found = [client().api.inspect_container(container) for container in known]
        roots = [service.process.pid, *(one["State"]["Pid"] for one in found)]
        below = [child for root in roots for child in psutil.Process(root).children(recursive=True)]
        sleepers = [process for process in below if process.cmdline() == ["sleep", seconds]]
        workers = [process.parent() for process in sleepers]
        supervisors = [worker.parent() for worker in workers if worker is not None]
        self.sandboxes = len(sleepers)
        self.supervisors = [supervisor for supervisor in supervisors if supervisor is not None]
        self._processes = [*sleepers, *(worker for worker in workers if worker is not None), *self.supervisors]
        inside = {process.pid for process in self._processes}
        found = [one for one in found if one["State"]["Pid"] in inside]
        self.containers = [one["Id"] for one in found]
        self._roots = [one["GraphDriver"]["Data"]["MergedDir"] for one in found]

    def left(self) -> dict[str, list[Any]]:
        """What is there still, by kind; empty when all is gone."""
        mounted = Path("/proc/self/mountinfo").read_text()
        groups = Path("/sys/fs/cgroup")
        kinds = {
            "processes": [process for process in self._processes if process.is_running()],
            "mounts": [root for root in self._roots if root in mounted or os.path.exists(root)],
            "control groups": [path for name in self.containers for path in groups.glob(f"*/docker/{name}")],
        }
        return {kind: things for kind, things in kinds.items() if things}


@contextlib.asynccontextmanager
async def serving(
    folder: Path, backend: str, *, owner: str = "", under: tuple[str, ...] = (), sandbox: Any = None, **sections: Any
) -> AsyncIterator[ServiceProcess]:
    """Start the service as users start it, with files in `folder`. `sandbox`: changes to that section of its config;
    `under`: a command that runs it. At the end, unless it has ended, it is ended, and nothing of it is left."""
    owner = owner or new_owner()
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    values = {
        "plugins": {"directories": [str(PLUGINS)]},
        "sandbox": sandbox_section(backend, owner, **(sandbox or {})),
        "sessions": {"lease_seconds": 0.3},
        **sections,
    }
    (folder / "tool.yaml").write_text(yaml.safe_dump(values))
    with (folder / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(*under, sys.executable, "-m", "tool_service", "--config", str(folder / "tool.yaml")),
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(folder / "tmp")},
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), PROGRAM)).decode()
    service = ServiceProcess(process, line.removeprefix("listening on ").strip(), backend, owner, folder)
    try:
        assert line, service.log()
        yield service
    finally:
        await service.channel.close()
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            await service.end(signal.SIGTERM)
    if backend == "docker":
        await eventually(lambda: containers(owner) == [], pause=LOOK_SECONDS)


@contextlib.asynccontextmanager
async def clients(service: ServiceProcess) -> AsyncIterator[asyncio.subprocess.Process]:
    """Where clients come from that can be killed."""
    maker = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).with_name("clients_to_kill.py")), service.address, BUSY),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    yield maker
    maker.kill()
    await maker.wait()


async def in_all(service: ServiceProcess, sandboxes: int) -> Traces:
    """Wait until the program runs in so many sandboxes; what they have on this machine."""
    while True:
        with contextlib.suppress(psutil.NoSuchProcess, docker.errors.NotFound):  # one ended while we looked
            traces = await asyncio.to_thread(Traces, service, "600")
            if traces.sandboxes == sandboxes:
                return traces
        await asyncio.sleep(LOOK_SECONDS)


async def gone(traces: Traces) -> None:
    with contextlib.suppress(AssertionError):
        await eventually(lambda: not traces.left(), pause=LOOK_SECONDS)
    assert traces.left() == {}


async def start_in_mid_turn(
    service: ServiceProcess, maker: asyncio.subprocess.Process, count: int, each: int
) -> list[int]:
    """Start `count` clients with `each` trajectories; their process ids, once all are in mid-turn."""
    assert maker.stdin is not None
    assert maker.stdout is not None
    pids = []
    for number in range(count):
        maker.stdin.write(f"{number} {each}\n".encode())
        pids.append(int(await maker.stdout.readline()))
    await service.busy_with(count * each)
    return pids


async def begun(service: ServiceProcess, name: str, code: str, turn: int = 0) -> tuple[Trajectory, str]:
    """A trajectory, opened or taken up again, and the answer to its next turn. Refused for want of a sandbox it comes
    back after the delay that it is told, as a client does."""
    while True:
        trajectory = Trajectory(service, name)
        await trajectory.open("python", turns_done=turn)
        try:
            (text,) = texts(await trajectory.act(turn, f"<python>{code}</python>"))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(retry_seconds(error))
        else:
            return trajectory, text


async def answer(service: ServiceProcess, code: str) -> str:
    """Another trajectory's to its only turn."""
    trajectory, text = await begun(service, "another", code)
    await trajectory.close()
    return text
