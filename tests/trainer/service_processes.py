"""The services as processes of their own, which are killed with SIGKILL: from outside, or by themselves at a point."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml


def tool_values(port: int = 0) -> dict[str, Any]:
    """Of a tool service's config."""
    return {"server": {"port": port}, "sandbox": {"pool": {"ready": 1}}, "sessions": {"lease_seconds": 1}}


def rollout_values(model: Path, tools: str, port: int = 0) -> dict[str, Any]:
    """Of a rollout service's config."""
    return {"server": {"port": port}, "tool_target": tools, "engine": {"model": str(model), "threads": 1}}


@dataclass(frozen=True)
class Death:
    """Where a service kills itself: before or after call number `call` of `function`, as `module:Class.method`.

    rank: of several the one that does it, and not again when torchrun has started it once more.
    """

    function: str
    call: int = 1
    when: Literal["before", "after"] = "after"
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.when} call {self.call} of {self.function.rpartition(':')[2]}"


class ServiceProcess:
    """A service that serves at `address`. `config`: the file that it reads when it starts."""

    def __init__(self, pid: int, address: str, config: Path) -> None:
        self.address, self.config = address, config
        self._handle = os.pidfd_open(pid)  # a number could be another process's by now

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def ended(self) -> None:
        """Wait until it is dead."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._handle)

    def rank(self, number: int) -> ServiceProcess:
        """One of several, as they are now."""
        return ServiceProcess(int(Path(f"{self.config}.{number}").read_text()), self.address, self.config)

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """SIGKILL, if it lives."""
        try:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        except ProcessLookupError:
            return
        select.select([self._handle], [], [], 30)


class ServiceForker:
    """Starts services in milliseconds; see `forked_services`. Use it with `with`: at its end all of them are killed."""

    def __init__(self, folder: Path) -> None:
        """`folder` gets a config and a log of each service."""
        self.folder = folder
        self._started: list[ServiceProcess] = []
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked_services.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self) -> ServiceForker:
        return self

    def __exit__(self, *_: object) -> None:
        for service in self._started:
            service.kill()
        self._process.kill()
        self._process.communicate()

    def start(
        self, service: str, values: Mapping[str, Any], death: Death | None = None, *, ranks: int = 1
    ) -> ServiceProcess:
        """Start `python -m SERVICE`, by torchrun if it has several ranks, with a config of these values; returns when
        it listens.
        """
        stem = f"{len(self._started):03d}-{service}"
        config, log = self.folder / f"{stem}.yaml", self.folder / f"{stem}.log"
        config.write_text(yaml.safe_dump(dict(values)))
        request = {
            "service": service,
            "config": str(config),
            "log": str(log),
            "ranks": ranks,
            "death": asdict(death) if death else None,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["address"], log.read_text()
        process = ServiceProcess(**answer, config=config)
        self._started.append(process)
        return process
