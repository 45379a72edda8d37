"""One output pipe of the workers: keeps its first bytes, counts the rest."""

import fcntl
import os
import termios

_CHUNK = 65536
_NOTHING = bytes(4)
"""What FIONREAD says of an empty pipe."""
IDLE_KEEP = 64 * 1024
"""Bytes kept of what is printed between turns, for the turn after."""


class Outlet:
    """Memory is bounded by the cap whatever is written."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self._kept = bytearray()
        self._cap = IDLE_KEEP
        self.total = 0
        """Bytes seen since the last `take`."""

    def begin(self, cap: int) -> None:
        """A turn starts: keep up to `cap` bytes, counting what came in since the turn before."""
        # Programs share the pipe's flags, with each other and with those before them: one that made its stdout
        # non-blocking, as asyncio does, would let later ones lose what they print.
        fcntl.fcntl(self.write_fd, fcntl.F_SETFL, 0)
        self._cap = cap
        del self._kept[cap:]

    def drain(self, most: int) -> None:
        """Read what is there, at most about `most` bytes so that one flood cannot hold up the caller. A short read does
        not say that it was the last: programs can make each write a packet of its own (O_DIRECT)."""
        count = 0
        while count < most and self._holds_any():
            try:
                data = os.read(self.read_fd, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                break
            count += len(data)
            self.total += len(data)
            room = self._cap - len(self._kept)
            if room > 0:
                self._kept += data[:room]

    def _holds_any(self) -> bool:
        """To ask costs a tenth of the error that reading from an empty pipe is."""
        return fcntl.ioctl(self.read_fd, termios.FIONREAD, _NOTHING) != _NOTHING

    def take(self) -> tuple[bytes, int]:
        """The kept bytes and the total of the turn that ends; starts anew."""
        kept, total = bytes(self._kept), self.total
        self._kept.clear()
        self._cap = IDLE_KEEP
        self.total = 0
        return kept, total
