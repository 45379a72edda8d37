"""Whose a sandbox is: an *owner* (an installation of the service) and an *instance* (one process of it).

What carries our owner and an instance that no longer lives is a leftover, and nothing else is: the rule of every sweep.
An instance lives while its process holds an abstract socket, which the kernel frees with the process.
"""

import errno
import hashlib
import os
import secrets
import socket


def default_owner() -> str:
    """The host's name, and what tells its network namespaces, and hosts of equal names, apart: inside one of them
    the locks of all instances can be seen."""
    parts = [_read("/etc/machine-id"), str(os.stat("/proc/self/ns/net").st_ino)]
    return f"{socket.gethostname()}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:10]}"


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


class Instance:
    """This process, as the maker of sandboxes. `owner`: empty for the default."""

    def __init__(self, owner: str = "") -> None:
        self.owner = owner or default_owner()
        self.id = secrets.token_hex(8)
        self._lock: socket.socket | None = None

    def announce(self) -> None:
        """From now on it lives."""
        self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._lock.bind(_address(self.id))

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def lives(instance_id: str) -> bool:
    """Whether the process of that id still runs, here in this network namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(_address(instance_id))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False


def _address(instance_id: str) -> str:
    return f"\0turnwire-instance-{instance_id}"
