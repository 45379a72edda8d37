"""The three services as processes of this machine, for `turnwire up`, `train` and `eval`.

Each runs in a session of its own, listens on loopback, and logs to a file. They are started so that each finds the one
it needs, watched while they run, and end with this process: SIGTERM first, so that they drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from turnwire import config as config_files
from turnwire.cli.launch import ServicesConfig
from turnwire.errors import UnavailableError

# Services are started beside gRPC's threads, also again in the middle of a run. Without this its handlers of a fork run
# in the child before it becomes the service, and now and then abort it. Read when gRPC is first used.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

START_SECONDS = 300.0
"""How long a service may take to listen: loading torch and a model on a busy machine takes its time."""
TAIL_LINES = 25
MOST_RESTARTS = 3
"""Of one service: one that dies again and again is broken."""
_PR_SET_PDEATHSIG = 1


class ServiceDiedError(UnavailableError):
    """A service ended by itself. The message ends with what it logged last."""


@dataclass
class _Process:
    name: str
    module: str
    log: Path
    target: str
    process: asyncio.subprocess.Process
    config: Any
    log_start: int
    """Where in the log this process began: a service that was started again goes on in the same file."""

    def tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines)

    def listening(self) -> bool:
        return b"listening on " in self.log.read_bytes()[self.log_start :]


class Services:
    """Tool, rollout and trainer service as subprocesses. Use it with `async with`."""

    def __init__(self, config: ServicesConfig, folder: Path, say: Callable[[str], None]) -> None:
        """Logs and the configs as started go to `folder`. `say` is told what happens, for people."""
        self._config, self._folder, self._say = config, folder, say
        self._processes: dict[str, _Process] = {}

    @property
    def targets(self) -> dict[str, str]:
        """`host:port` by service: tool, rollout, trainer."""
        return {name: item.target for name, item in self._processes.items()}

    @property
    def logs(self) -> dict[str, str]:
        """Log file by service."""
        return {name: str(item.log) for name, item in self._processes.items()}

    @property
    def pids(self) -> dict[str, int]:
        """Process id by service."""
        return {name: item.process.pid for name, item in self._processes.items()}

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        try:
            # The rollout service reads the tools when it starts. It and the trainer load torch side by side.
            tool = await self._start("tool", self._config.tool)
            await self._listening("tool")
            rollout = await self._start("rollout", msgspec.structs.replace(self._config.rollout, tool_target=tool))
            trainer = msgspec.structs.replace(self._config.trainer, rollout_target=rollout, tool_target=tool)
            await self._start("trainer", trainer)
            await asyncio.gather(self._listening("rollout"), self._listening("trainer"))
        except BaseException:
            await self.stop()
            raise
        return self

    @contextlib.asynccontextmanager
    async def only_tools(self) -> AsyncIterator[Self]:
        """The tool service alone."""
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        try:
            await self._start("tool", self._config.tool)
            await self._listening("tool")
            yield self
        finally:
            await self.stop()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self, name: str, config: Any) -> str:
        port = config.server.port or _free_port(config.server.host)
        config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, port=port))
        file, log = self._folder / f"{name}.yaml", self._folder / f"{name}.log"
        file.write_text(config_files.dump(config), encoding="utf-8")
        module = f"{name}_service"
        with log.open("ab") as output:
            log_start = output.tell()
            process = await asyncio.create_subprocess_exec(
                *(getattr(self._config.interpreters, name) or sys.executable, "-m", module, "--config", str(file)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, which then stops them in order
                preexec_fn=_end_with_parent,  # safe: no other thread runs here
            )
        host = "127.0.0.1" if config.server.host == "localhost" else config.server.host
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._processes[name] = _Process(name, module, log, target, process, config, log_start)
        self._say(f"starting the {name} service on {target} (log: {log})")
        return target

    async def _listening(self, name: str) -> None:
        item = self._processes[name]
        exited = asyncio.create_task(item.process.wait())
        try:
            async with asyncio.timeout(START_SECONDS):
                while not item.listening():
                    await asyncio.wait([exited], timeout=0.05)
                    if exited.done() and not item.listening():
                        raise ServiceDiedError(_died(item, "while starting"))
        except TimeoutError as error:
            message = f"the {name} service did not listen within {START_SECONDS:.0f} s. Its log ends:\n{item.tail()}"
            raise UnavailableError(message) from error
        finally:
            exited.cancel()

    async def watch(self, restart: Collection[str] = ()) -> None:
        """Return never; raise ServiceDiedError when one of them ends by itself.

        Those named in `restart` are started again instead, at the same address, a few times each.
        """
        waits = {asyncio.create_task(item.process.wait()): item for item in self._processes.values()}
        restarts: Counter[str] = Counter()
        try:
            while True:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for item in [waits.pop(task) for task in done]:
                    restarts[item.name] += 1
                    if item.name not in restart or restarts[item.name] > MOST_RESTARTS:
                        raise ServiceDiedError(_died(item, ""))
                    self._say(f"{_died(item, '')}\nIt is started again; the run waits for it.")
                    await self._start(item.name, item.config)
                    await self._listening(item.name)
                    again = self._processes[item.name]
                    waits[asyncio.create_task(again.process.wait())] = again
        finally:
            for task in waits:
                task.cancel()

    async def stop(self) -> None:
        """SIGTERM in reverse order, each given its time to drain, then SIGKILL to its process group."""
        for item in reversed(self._processes.values()):
            await self._stop(item)

    async def _stop(self, item: _Process) -> None:
        seconds = getattr(self._config, item.name).server.drain_seconds + 5.0
        if item.process.returncode is not None:
            return
        item.process.terminate()
        try:
            async with asyncio.timeout(seconds):
                await item.process.wait()
        except TimeoutError:
            self._say(f"the {item.name} service did not end within {seconds:.0f} s and is killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(item.process.pid, signal.SIGKILL)
            await item.process.wait()


def _died(item: _Process, when: str) -> str:
    code = item.process.returncode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    when = f" {when}" if when else ""
    return f"the {item.name} service {how}{when}. Its log ({item.log}) ends:\n{item.tail()}"


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_parent() -> None:
    """In the child: SIGTERM when the parent dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
