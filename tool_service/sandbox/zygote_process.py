"""The service's end of the zygote: starts it, sends it work, hears when sandboxes are gone."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from tool_service.sandbox.base import SandboxUnavailable
from tool_service.sandbox.inside.zygote import MESSAGE_BYTES

log = logging.getLogger(__name__)

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from inside.zygote import main; main(int(sys.argv[2]))"
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_START_SECONDS = 20.0


class _Event(msgspec.Struct):
    event: str
    id: str = ""
    reason: str = ""


class ZygoteProcess:
    """One zygote. `on_gone(id)` is called when nothing of a sandbox is left; `on_death()` when the zygote dies
    by itself, with all its sandboxes."""

    def __init__(self, on_gone: Callable[[str], None], on_death: Callable[[], None]) -> None:
        self._on_gone = on_gone
        self._on_death = on_death
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.alive = False

    async def start(self, interpreter: str, mode: str, extra_paths: tuple[str, ...]) -> None:
        """Start it in `mode` (`isolated` or `restricted`). Raises `SandboxUnavailable` with the reason."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            self._socket = ours
            command = [interpreter, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT, _FOLDER, str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(  # noqa: ASYNC220 - returns once it is started
                    command,
                    env={"LANG": "C.UTF-8"},
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                await self.close()
                raise SandboxUnavailable(f"the interpreter cannot be started: {error}") from error
        try:
            ours.send(msgspec.json.encode({"mode": mode, "extra_paths": extra_paths}))
            data = await asyncio.wait_for(loop.sock_recv(ours, MESSAGE_BYTES), _START_SECONDS)
        except (OSError, TimeoutError):
            data = b""
        no_answer = f"{interpreter} gave no answer: it must be Python 3.11 or later (sandbox.process.interpreter)"
        event = msgspec.json.decode(data, type=_Event) if data else _Event("failed", reason=no_answer)
        if event.event != "started":
            await self.close()
            raise SandboxUnavailable(event.reason)
        self.alive = True
        loop.add_reader(ours.fileno(), self._readable)

    def _readable(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._detach()
            self._on_death()
            return
        event = msgspec.json.decode(data, type=_Event)
        if event.event == "failed":
            log.error("the sandbox zygote failed: %s", event.reason)
            return
        self._on_gone(event.id)

    def _detach(self) -> None:
        self.alive = False
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def create(self, sandbox_id: str, uid: int, workspace: str, limits: object, stream: socket.socket) -> None:
        """Ask for a sandbox at the other end of `stream`'s pair. Raises `OSError` when the zygote cannot be told."""
        message = {"op": "create", "id": sandbox_id, "uid": uid, "workspace": workspace, "limits": limits}
        if self._socket is None:
            raise BrokenPipeError("the zygote is gone")
        socket.send_fds(self._socket, [msgspec.json.encode(message)], [stream.fileno()])

    def kill(self, sandbox_id: str) -> None:
        """SIGKILL to a sandbox's first process, hence to all of it. `on_gone` follows."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the caller closes the stream too, at whose end a sandbox ends itself
                self._socket.send(msgspec.json.encode({"op": "kill", "id": sandbox_id}))

    async def close(self) -> None:
        """End it and with it every sandbox. Returns when the process is reaped."""
        self._detach()
        process, self._process = self._process, None
        if process is None:
            return
        for _ in range(200):
            if process.poll() is not None:
                return
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)


def default_interpreter() -> str:
    """The real interpreter behind a virtual environment: the zygote needs no installed package."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(base)
