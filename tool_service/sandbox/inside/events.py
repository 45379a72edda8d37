"""What a supervisor waits for: its connection, the pipes of workers, the end of a child."""

import contextlib
import os
import select
import signal

from . import linux


class Events:
    """One for each process: it owns the signals."""

    def __init__(self) -> None:
        self.child_fd, wake_write = os.pipe()
        """Ready when a child has ended. `wait` empties it."""
        os.set_blocking(self.child_fd, False)
        os.set_blocking(wake_write, False)
        linux.set_handler(signal.SIGCHLD, lambda number, frame: None)
        # The one signal with a handler of Python's: programs could send it.
        linux.set_handler(signal.SIGINT, linux.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._everything, self._all_but_output = select.poll(), select.poll()
        self.listen(self.child_fd)

    def listen(self, fd: int, output: bool = False) -> None:
        """`output`: of programs, which can be left for later."""
        self._everything.register(fd, select.POLLIN)
        if not output:
            self._all_but_output.register(fd, select.POLLIN)

    def ignore(self, fd: int) -> None:
        """Idempotent. Not for output."""
        with contextlib.suppress(KeyError):
            self._everything.unregister(fd)
            self._all_but_output.unregister(fd)

    def wait(self, seconds: float | None, but_output: bool = False) -> set[int]:
        """Descriptors with something to read, or at their end."""
        poll = self._all_but_output if but_output else self._everything
        ready = {fd for fd, _ in poll.poll(None if seconds is None else max(0, seconds) * 1000)}
        if self.child_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.child_fd, 4096)
        return ready
