"""What must not be found, read, reached or changed: secrets, sockets and files of the service that runs the suite."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import sys
from typing import Any

from tool_service.sandbox.base import TurnResult
from tool_service.sandbox.scratch import Scratch

_VARIABLE = "TURNWIRE_CANARY"
_WATCHED = ("/etc/passwd", "/etc/hostname", "/etc/shadow", "/usr/bin/env", "/bin/sh", os.__file__, sys.executable)
_SETTINGS = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/domainname",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/self/oom_score_adj",
)


class Bait:
    """Laid out before the backend starts, so that whatever it copies of this process has the secret in it."""

    def __init__(self) -> None:
        self.secret = f"canary-secret-{secrets.token_hex(8)}"
        self._scratch = Scratch()  # which a sweep removes, should this process be killed
        folder = self._scratch.make("check", os.geteuid()) + "/work"
        self._file = f"{folder}/secret"
        with open(self._file, "w", encoding="ascii") as file:
            file.write(self.secret)
        os.chmod(self._file, 0o600)
        os.environ[_VARIABLE] = self.secret
        path, abstract = f"{folder}/socket", f"turnwire-check-{secrets.token_hex(8)}"
        self._listeners = [
            _listener(socket.AF_INET, ("127.0.0.1", 0)),
            _listener_in(folder, "socket"),
            _listener(socket.AF_UNIX, f"\0{abstract}"),
        ]
        os.chmod(path, 0o666)  # noqa: S103 - it is there to be tried
        self.names = {
            "FOLDER": folder,
            "FILE": self._file,
            "SOCKET": path,
            "ABSTRACT": abstract,
            "PORT": str(self._listeners[0].getsockname()[1]),
        }
        """What programs say as `@NAME@`."""
        self._before = self._host()

    def is_in(self, result: TurnResult) -> bool:
        """Whether the secret shows in what a turn gave."""
        return self.secret in f"{result.detail}{result.value}" or self.secret.encode() in result.stdout + result.stderr

    def harm(self) -> list[str]:
        """What has been reached or changed since the last time."""
        before, self._before = self._before, self._host()
        changed = [f"{name} of the host was changed" for name in before if self._before[name] != before[name]]
        reached, _, _ = select.select(self._listeners, (), (), 0)
        for listener in reached:
            with contextlib.suppress(OSError):  # it has gone again
                listener.accept()[0].close()
        return changed + [f"a socket of the service was reached: {one.getsockname()!r}" for one in reached]

    def _host(self) -> dict[str, Any]:
        return {path: _state(path) for path in (*_WATCHED, *_SETTINGS, self._file)}

    def close(self) -> None:
        os.environ.pop(_VARIABLE, None)
        for listener in self._listeners:
            listener.close()
        self._scratch.close()


def _listener(family: int, address: Any) -> socket.socket:
    made = socket.socket(family)
    made.bind(address)
    made.listen()
    made.setblocking(False)
    return made


def _listener_in(folder: str, name: str) -> socket.socket:
    """By a short way: the address of a socket cannot be as long as a path can."""
    fd = os.open(folder, os.O_PATH)
    try:
        return _listener(socket.AF_UNIX, f"/proc/self/fd/{fd}/{name}")
    finally:
        os.close(fd)


def _state(path: str) -> Any:
    """Of a setting what it holds; of a file what would tell that it was written, moved or given away."""
    try:
        if path.startswith("/proc/"):
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        info = os.stat(path)
    except OSError as error:
        return error.errno
    return info.st_ino, info.st_size, info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, info.st_ctime_ns
