"""The workers of a sandbox, which all die together, so that no process of a killed turn can be left behind: those that
live between two such ends are a generation."""

import contextlib
import os
import signal
from typing import Any

from . import events, landlock, linux, processes, runtimes, worker
from .outlet import Outlet

_REAP_SECONDS = 1.0
_DRAIN_BYTES = 4 << 20
"""Most bytes read from one pipe at a time, so that a flood cannot keep the supervisor from its clocks."""
_SPARE = ""
"""Under this name a worker waits that has no runtime yet."""


class Worker:
    """A worker process, and the supervisor's ends of its pipes."""

    def __init__(self, pid: int, command_fd: int, answer_fd: int) -> None:
        self.pid = pid
        self.command_fd = command_fd
        self.answer_fd = answer_fd
        self.wait_status: int | None = None
        """Set once it has ended by itself and is reaped."""
        self.stopped = False
        """By SIGSTOP or its like, since its last turn began."""
        self._cpu = 0.0

    def cpu_used(self) -> float:
        """Seconds so far; of one that is gone, what was last seen."""
        self._cpu = processes.cpu_used(self.pid) or self._cpu
        return self._cpu


class Workers:
    """The present generation, one worker a runtime, and the output that all have in common."""

    def __init__(
        self,
        limits: dict[str, Any],
        walls: landlock.Walls,
        scope: processes.Scope,
        watched: events.Events,
    ) -> None:
        self._limits = limits
        self._walls = landlock.Ruleset(walls)
        self._scope = scope
        self._events = watched
        self._context = runtimes.Context(walls.writable[0], limits["value_bytes"])
        self._by_runtime: dict[str, Worker] = {}
        self._used: set[str] = set()
        """Runtimes that this generation has been asked for."""
        self._processors = os.sched_getaffinity(0)  # which a program may narrow, for this process as for itself
        self._lost: set[str] = set()
        """Runtimes that an earlier one was asked for, and this one not yet."""
        self.stdout, self.stderr = Outlet(), Outlet()
        for outlet in (self.stdout, self.stderr):
            watched.listen(outlet.read_fd, output=True)
        self.stuck = False
        """Something of the last generation does not die."""

    @property
    def used(self) -> bool:
        """Whether anything untrusted may be running."""
        return bool(self._used)

    @property
    def at_rest(self) -> int:
        """How many processes a generation like this one has if its programs have left none behind."""
        return sum(runtimes.PROCESSES[runtime] for runtime in self._used)

    def has_lost(self, runtime: str) -> bool:
        """Whether the runtime's memory went with an earlier generation, since its last turn."""
        return runtime in self._lost

    def of(self, runtime: str) -> Worker:
        """The runtime's worker, started if need be. Raises OSError."""
        one = self._by_runtime.get(runtime)
        if one is None:
            one = self._by_runtime.pop(_SPARE, None) or self._fork()
            self._by_runtime[runtime] = one
            os.write(one.command_fd, worker.greeting(runtime))
        if one.stopped and one.wait_status is None:  # by what an earlier turn left: this one is not to wait for ever
            os.kill(one.pid, signal.SIGCONT)
        one.stopped = False
        self._used.add(runtime)
        self._lost.discard(runtime)
        return one

    def keep_spare(self) -> None:
        """Have a worker ready before it is known which runtime comes first. Only while nothing untrusted runs, and not
        where its limits follow from what else runs when it is forked."""
        if not self._by_runtime and self._scope is not processes.Scope.DESCENT:
            with contextlib.suppress(OSError):  # the first turn tries again, and tells
                self._by_runtime[_SPARE] = self._fork()

    def _fork(self) -> Worker:
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        pid = linux.fork()
        if pid == 0:
            worker.start(
                self._context,
                {**self._limits, "processes": self._limits["processes"] + processes.foreign_tasks(self._scope)},
                self._walls,
                (command_read, answer_write, self.stdout.write_fd, self.stderr.write_fd),
            )
        os.close(command_read)
        os.close(answer_write)
        for fd in (command_write, answer_read):
            os.set_blocking(fd, False)
        self._events.listen(answer_read)
        return Worker(pid, command_write, answer_read)

    def reap(self) -> None:
        """Take in what children left that have ended, and which workers have stopped."""
        mine = {one.pid: one for one in self._by_runtime.values()}
        with contextlib.suppress(ChildProcessError):
            while (changed := os.waitpid(-1, os.WNOHANG | os.WUNTRACED))[0]:
                pid, status = changed
                if pid in mine and os.WIFSTOPPED(status):
                    mine[pid].stopped = True
                elif pid in mine:
                    mine[pid].wait_status = status

    def spoke(self, ready: set[int], but: Worker | None = None) -> bool:
        """Whether one has something to say that was not asked, or has ended."""
        return any(
            one.answer_fd in ready or one.wait_status is not None for one in self._by_runtime.values() if one is not but
        )

    def drain(self, ready: set[int] | None = None) -> None:
        """Take in output, of those pipes that are ready or of both."""
        for outlet in (self.stdout, self.stderr):
            if ready is None or outlet.read_fd in ready:
                outlet.drain(_DRAIN_BYTES)

    @property
    def printed(self) -> int:
        """Bytes of output since the last turn's end."""
        return self.stdout.total + self.stderr.total

    def end(self) -> None:
        """Kill every process but this one; the next turn of each runtime starts afresh."""
        for one in self._by_runtime.values():
            one.cpu_used()  # for the last time
        self.stuck = not processes.end_all(self._scope, _REAP_SECONDS)
        for one in self._by_runtime.values():
            self._events.ignore(one.answer_fd)
            os.close(one.command_fd)
            os.close(one.answer_fd)
        self._by_runtime.clear()
        self._lost |= self._used
        self._used.clear()
        self.drain()

    def free_processors(self) -> None:
        """This process shall have those again that programs took from it."""
        os.sched_setaffinity(0, self._processors)
