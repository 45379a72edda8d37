"""Uids for sandboxes: each gets one of its own, so that none can signal, trace or starve another.

A service holds a block of uids that no other service in its network namespace holds; the lock is an abstract socket,
which dies with the service.
"""

import errno
import random
import socket

from tool_service.sandbox.base import SandboxUnavailable

UIDS_PER_SERVICE = 4096
UID_BASE = 1_800_000_000
"""Default start of the range: far from accounts, containers' ranges and systemd's dynamic users."""
UID_BLOCKS = 1024
_TRIES = 64


class Uids:
    """Those of one service. `base`, `blocks`: the range, of blocks of `UIDS_PER_SERVICE`."""

    def __init__(self, base: int = UID_BASE, blocks: int = UID_BLOCKS) -> None:
        self._base = base
        self._blocks = blocks
        self._lock: socket.socket | None = None
        self._free: list[int] = []
        self._of: dict[str, int] = {}

    def claim(self) -> None:
        """Take a block. Idempotent. Raises `SandboxUnavailable` when every block is held."""
        if self._lock is not None:
            return
        for block in random.sample(range(self._blocks), min(self._blocks, _TRIES)):
            base = self._base + block * UIDS_PER_SERVICE
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                lock.bind(f"\0turnwire-uids-{base}")
            except OSError as error:
                lock.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self._lock = lock
            self._free = list(range(base, base + UIDS_PER_SERVICE))
            return
        raise SandboxUnavailable("every block of uids is held by another service: raise uid_blocks")

    def take(self, sandbox_id: str) -> int:
        """The uid of a new sandbox. The one that was given back longest ago comes first."""
        if not self._free:
            raise SandboxUnavailable(f"{UIDS_PER_SERVICE} sandboxes exist already: each needs a uid of its own")
        uid = self._of[sandbox_id] = self._free.pop(0)
        return uid

    def give_back(self, sandbox_id: str) -> None:
        """Nothing of the sandbox is left. Idempotent."""
        uid = self._of.pop(sandbox_id, None)
        if uid is not None:
            self._free.append(uid)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
