"""Ways in which a service can lose the means to make sandboxes, and get them back; each a real one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
from engine_harness import OwnEngine
from interpreters import readable_interpreter
from service_process import ServiceProcess

from tool_service.sandbox.docker_config import DEFAULT_IMAGE


class Outage:
    """`backend`, `sandbox` (changes to that section) and `under`: for a service that can have it. `reason`: a part of
    what clients are told."""

    backend = "docker"
    reason = ""
    under: tuple[str, ...] = ()
    takes_sandboxes_along = False
    ready = 0
    """Sandboxes that are kept ready: those that serve on would keep the outage from being seen."""

    def __init__(self, engine: OwnEngine | None = None) -> None:
        self.engine = engine

    @property
    def sandbox(self) -> dict[str, Any]:
        host = {} if self.engine is None else {"host": self.engine.host, "control_seconds": 10}
        return {"docker": host} if self.backend == "docker" else {}

    @contextlib.asynccontextmanager
    async def lasting(self, service: ServiceProcess) -> AsyncIterator[None]:
        """What happens inside happens during the outage."""
        await asyncio.to_thread(self.begin, service)
        try:
            yield
        finally:
            await asyncio.to_thread(self.end, service)

    def begin(self, service: ServiceProcess) -> None:
        raise NotImplementedError

    def end(self, service: ServiceProcess) -> None:
        raise NotImplementedError

    def docker(self, *words: str) -> None:
        assert self.engine is not None
        assert self.engine.docker(*words).returncode == 0


class EngineStopped(Outage):
    how = signal.SIGTERM
    reason = "cannot be reached"
    takes_sandboxes_along = True
    ready = 1

    def begin(self, service: ServiceProcess) -> None:
        assert self.engine is not None
        self.engine.stop(self.how)

    def end(self, service: ServiceProcess) -> None:
        assert self.engine is not None
        self.engine.start()


class EngineKilled(EngineStopped):
    how = signal.SIGKILL


class ImageRemoved(Outage):
    reason = f"No such image: {DEFAULT_IMAGE}"

    def begin(self, service: ServiceProcess) -> None:
        self.docker("tag", DEFAULT_IMAGE, "kept:1")
        self.docker("rmi", DEFAULT_IMAGE)

    def end(self, service: ServiceProcess) -> None:
        self.docker("tag", "kept:1", DEFAULT_IMAGE)
        self.docker("rmi", "kept:1")


class EngineDiskFull(Outage):
    reason = "no space left on device"

    def begin(self, service: ServiceProcess) -> None:
        assert self.engine is not None
        fill(self.engine.data)

    def end(self, service: ServiceProcess) -> None:
        assert self.engine is not None
        empty(self.engine.data)


class ScratchFull(Outage):
    """In the restricted tier: the isolated one has no files on the host."""

    backend = "process"
    reason = "No space left on device"
    under = (
        *("unshare", "--mount", "sh", "-c"),
        "mount -t tmpfs -o size=8m,nr_inodes=500 tmpfs /var/tmp && export TMPDIR=/var/tmp && "
        'exec setpriv --bounding-set=-sys_admin "$@"',
        "sh",
    )

    @property
    def sandbox(self) -> dict[str, Any]:
        return {"minimum_tier": "restricted", "process": {"interpreter": readable_interpreter()}}

    def begin(self, service: ServiceProcess) -> None:
        fill(f"/proc/{service.process.pid}/root/var/tmp")

    def end(self, service: ServiceProcess) -> None:
        empty(f"/proc/{service.process.pid}/root/var/tmp")


class NoDescriptors(Outage):
    backend = "process"
    reason = "Too many open files"

    def begin(self, service: ServiceProcess) -> None:
        self.before = psutil.Process(service.process.pid).rlimit(resource.RLIMIT_NOFILE)
        psutil.Process(service.process.pid).rlimit(resource.RLIMIT_NOFILE, (3, self.before[1]))

    def end(self, service: ServiceProcess) -> None:
        psutil.Process(service.process.pid).rlimit(resource.RLIMIT_NOFILE, self.before)


def fill(folder: str) -> None:
    """All bytes of its file system, and its inodes if they are few."""
    os.mkdir(f"{folder}/full")
    for size in (1 << 20, 4096):
        with contextlib.suppress(OSError):
            for number in itertools.count():
                with open(f"{folder}/full/{size}-{number}", "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
    with contextlib.suppress(OSError):
        for number in range(1000):
            open(f"{folder}/full/empty-{number}", "wb").close()


def empty(folder: str) -> None:
    for name in os.listdir(f"{folder}/full"):
        os.unlink(f"{folder}/full/{name}")
    os.rmdir(f"{folder}/full")
