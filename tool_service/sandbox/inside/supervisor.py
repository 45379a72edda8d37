"""The supervisor: first process of a sandbox, only holder of the service's socket, only source of a status.

Single-threaded and driven by poll. Requests (frames, see frames.py) come one at a time:

    {"op": "turn", "runtime", "payload", "timeout", "cpu_seconds", "output_bytes"}
                                                                     ->  {"status", ...}, blob = stdout + stderr
    {"op": "put", "path"} + blob                                     ->  {"error"?}
    {"op": "get", "path", "max_bytes"}                               ->  {"error"?}, blob = the file
    {"op": "reset"}                                                  ->  {"error"?}: as new, or why it cannot be
    {"op": "ping"}                                                   ->  {}

It exits when the socket closes, and with it, as first process of the PID namespace, everything in the sandbox.

What a worker says can at worst cost its own session: an answer is a length, the number of the present turn, one of a
few words and a bounded body. All else, and anything out of turn, ends all processes of the sandbox as SESSION_LOST.
All workers die together (a *generation*), so that no process of a killed turn can be left behind.
"""

import codecs
import contextlib
import errno
import importlib
import json
import math
import os
import select
import signal
import time
from typing import Any, NamedTuple

from . import (
    cgroup,
    files,
    frames,
    landlock,
    linux,
    processes,
    runtimes,
    spaces,
    worker,
    worker_bash,
    worker_python,
    worker_sql,
    worker_tests,
)
from .outlet import Outlet

_RUNTIMES: dict[str, runtimes.Runtime] = {
    "bash": worker_bash,
    "python": worker_python,
    "sql": worker_sql,
    "tests": worker_tests,
}
_COMMON_MODULES = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
    *("functools", "hashlib", "heapq", "io", "itertools", "math", "operator", "random", "re", "statistics", "string"),
    *("subprocess", "textwrap", "threading", "typing", "unicodedata"),
)
_DRAIN_BYTES = 4 << 20
"""Most bytes read from one pipe before the loop looks at the clock again."""
_WATCH_SECONDS = 0.05
"""Between two looks at memory and CPU while a turn runs."""
_IDLE_WATCH_SECONDS = (1.0, 16.0)
"""The same between turns: first, and at most after looks at which nothing had moved."""
_REAP_SECONDS = 1.0
_OOM_KILL = "the kernel killed a process of the sandbox for its memory"
_STATUS_OF_TAG = {
    runtimes.OK: "OK",
    runtimes.ERROR: "TOOL_ERROR",
    runtimes.MEMORY: "MEMORY",
    runtimes.TIMEOUT: "TIMEOUT",
    runtimes.EXHAUSTED: "MEMORY",
    runtimes.SIGNALED: "SIGNALED",
    runtimes.LOST: "SESSION_LOST",
}


def report_failure(fd: int, reason: str) -> None:
    """Tell the service that no sandbox came of this socket."""
    with contextlib.suppress(OSError):  # the service may have given up already
        os.write(fd, frames.encode({"failed": reason}))


def warm_up() -> None:
    """Do what every sandbox needs and none changes, once, before any fork: each page that a fork need not write to is a
    page that is not copied. Imports what turns commonly need."""
    for name in _COMMON_MODULES:
        importlib.import_module(name)
    for encoding in ("ascii", "latin-1", "utf-8-sig", "idna"):
        codecs.lookup(encoding)
    worker.own_streams()


def set_environment(workspace: str, temporary: str) -> None:
    """All that programs see of an environment. Before the supervisor, which hands it on."""
    os.environ.clear()
    os.environ.update(
        PATH="/usr/local/bin:/usr/bin:/bin",
        HOME=workspace,
        TMPDIR=temporary,
        LANG="C.UTF-8",
        USER="sandbox",
        TZ="UTC",
        XDG_CACHE_HOME=f"{temporary}/cache",  # both are below HOME else, where they would be the program's own files
        XDG_CONFIG_HOME=f"{temporary}/config",
    )


class Worker(NamedTuple):
    pid: int
    command_fd: int
    answer_fd: int


class Outcome(NamedTuple):
    """Why a turn ended."""

    status: str
    detail: str = ""
    exit_code: int | None = None
    signal: int | None = None
    value: bytes = b""
    ends: bool = True
    """All processes must end with it."""


def _outcome_of_death(code: int) -> Outcome:
    """`code` as subprocess has it: negative for a signal."""
    if code < 0:
        return Outcome("SIGNALED", f"the process died of signal {-code}", signal=-code)
    return Outcome("SESSION_LOST", f"the process ended by itself with exit code {code}", exit_code=code)


class Supervisor:
    """See the module's docstring. `limits` are the fields of SandboxLimits."""

    def __init__(
        self,
        control_fd: int,
        limits: dict[str, Any],
        walls: landlock.Walls,
        scope: processes.Scope,
        answer_fd: int | None = None,
    ) -> None:
        """`walls`: what programs may touch. `answer_fd`: where control is a pair of pipes and not a socket."""
        workspace = walls.writable[0]
        self.control_fd = control_fd
        self.answer_fd = control_fd if answer_fd is None else answer_fd
        self.limits = limits
        self.walls = landlock.Ruleset(walls)
        self.scope = scope
        self.context = runtimes.Context(workspace, limits["value_bytes"])
        self.folder = files.Folder(workspace, limits["file_bytes"])
        self.spaces = spaces.Spaces(walls.writable)
        self.decoder = frames.Decoder()
        self.stdout, self.stderr = Outlet(), Outlet()
        self.workers: dict[str, Worker] = {}
        self.used: set[str] = set()
        """Runtimes that ran a turn in an earlier generation and have not run since."""
        self.dead: dict[int, int] = {}
        """Wait statuses of reaped workers."""
        self.turn_number = 0
        self.cpu_seen: dict[int, float] = {}
        self.cpu_total = 0.0
        """Seconds that were seen to be used, in all turns and between them."""
        self.idle_cpu_end = math.inf
        """What `cpu_total` may be before the next turn."""
        self.stuck = False
        """Something does not die. Once the turn is answered the supervisor ends, and the kernel ends the rest."""
        self.cgroup = cgroup.find()
        self.answer = bytearray()
        self.wake_fd, wake_write = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(wake_write, False)
        linux.set_handler(signal.SIGCHLD, lambda number, frame: None)
        # The one signal with a handler of Python's: programs could send it.
        linux.set_handler(signal.SIGINT, linux.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.poll = select.poll()
        for fd in (control_fd, self.wake_fd, self.stdout.read_fd, self.stderr.read_fd):
            self.poll.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Until the service closes the connection, or the sandbox cannot be used any more."""
        self.send({"ready": True})
        wait, longest = _IDLE_WATCH_SECONDS
        while not self.stuck:
            ready = self.wait(wait if self.workers else None)
            if self.control_fd in ready:
                if not self.receive():
                    return
                while (frame := self.decoder.next()) is not None:
                    self.handle(json.loads(frame[0]), frame[1])
                wait = _IDLE_WATCH_SECONDS[0]
            self.drain()
            if self.workers and (self.idle_trouble() or (not ready and self.over_budget())):
                self.end_generation()
            if not ready:
                wait = min(wait * 2, longest)
        self.send({"over": True})

    def wait(self, seconds: float | None) -> set[int]:
        """Descriptors with something to read; children that ended are reaped on the way."""
        ready = {fd for fd, _ in self.poll.poll(None if seconds is None else max(0, seconds) * 1000)}
        if self.wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_fd, 4096)
            self.reap()
        return ready

    def receive(self) -> bool:
        try:
            data = os.read(self.control_fd, 1 << 20)
        except ConnectionResetError:
            return False
        self.decoder.feed(data)
        return bool(data)

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        view = memoryview(frames.encode(header, blob))
        while view:
            view = view[os.write(self.answer_fd, view) :]

    def reap(self) -> None:
        mine = {w.pid for w in self.workers.values()}
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in mine:
                    self.dead[pid] = status
        except ChildProcessError:
            return

    def handle(self, request: dict[str, Any], blob: bytes) -> None:
        try:
            if request["op"] == "turn":
                self.turn(request)
            elif request["op"] == "put":
                self.folder.put(request["path"], blob)
                self.send({})
            elif request["op"] == "get":
                self.send({}, self.folder.get(request["path"], request["max_bytes"]))
            else:
                self.send({"error": self.reset()} if request["op"] == "reset" else {})
        except files.Refused as error:
            self.send({"error": str(error)})

    def reset(self) -> str:
        """Make the sandbox as it was before its first turn; why that cannot be had, empty if it is so."""
        if self.scope is not processes.Scope.NAMESPACE:
            return "without a PID namespace nobody can tell that nothing is left"
        self.end_generation()
        try:
            self.spaces.wipe()
            left = self.spaces.leftovers()
        except OSError as error:
            return f"the folders resist: {error}"
        self.used.clear()
        self.cpu_seen.clear()
        for outlet in (self.stdout, self.stderr):
            outlet.take()
        return "processes" if processes.members(self.scope) else left

    def turn(self, request: dict[str, Any]) -> None:
        begun = time.monotonic()
        runtime = request["runtime"]
        for outlet in (self.stdout, self.stderr):
            outlet.begin(min(request["output_bytes"], self.limits["output_bytes"]))
        self.turn_number += 1
        restarted = runtime in self.used
        pid, cpu_begun = -1, 0.0
        one, body = self.prepare(runtime, request["payload"])
        if isinstance(one, Worker):
            self.used.discard(runtime)
            pid, cpu_begun = one.pid, processes.cpu_used(one.pid)
            self.cpu_seen[pid] = cpu_begun
            cpu_seconds = min(request["cpu_seconds"] or math.inf, self.limits["cpu_seconds"])
            outcome = self.await_answer(one, body, begun, request["timeout"], cpu_seconds)
        else:
            outcome = one
        self.idle_cpu_end = self.cpu_total + self.limits["cpu_seconds"]
        cpu = processes.cpu_used(pid) if runtime in self.workers else self.cpu_seen.get(pid, 0.0)
        stdout, out_total = self.stdout.take()
        stderr, err_total = self.stderr.take()
        header = {
            "status": outcome.status,
            "detail": outcome.detail,
            "exit_code": outcome.exit_code,
            "signal": outcome.signal,
            "stdout": len(stdout),
            "stderr": len(stderr),
            "total": out_total + err_total,
            "wall": time.monotonic() - begun,
            "cpu": max(0.0, cpu - cpu_begun),
            "restarted": restarted,
        }
        self.send(header, stdout + stderr + outcome.value)

    def prepare(self, runtime: str, payload: dict[str, Any]) -> tuple["Worker | Outcome", bytes]:
        """The runtime's worker, started if need be, and what to tell it; or why there is none."""
        if runtime not in _RUNTIMES:
            return Outcome("INFRA", f"no runtime {runtime!r} here; there are: {', '.join(_RUNTIMES)}"), b""
        try:
            body = _RUNTIMES[runtime].encode(payload)
        except ValueError as error:
            return Outcome("INFRA", str(error)), b""
        try:
            return self.workers.get(runtime) or self.start_worker(runtime), body
        except OSError as error:
            return Outcome("INFRA", f"could not start the worker: {error}"), b""

    def start_worker(self, runtime: str) -> Worker:
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        pid = linux.fork()
        if pid == 0:
            worker.start(
                _RUNTIMES[runtime],
                self.context,
                {**self.limits, "processes": self.limits["processes"] + processes.foreign_tasks(self.scope)},
                self.walls,
                (command_read, answer_write, self.stdout.write_fd, self.stderr.write_fd),
            )
        os.close(command_read)
        os.close(answer_write)
        for fd in (command_write, answer_read):
            os.set_blocking(fd, False)
        started = self.workers[runtime] = Worker(pid, command_write, answer_read)
        self.poll.register(answer_read, select.POLLIN)
        return started

    def await_answer(self, one: Worker, body: bytes, begun: float, timeout: float, cpu_seconds: float) -> Outcome:
        """Feed the command, drain output, watch clocks, until the turn has an outcome. A killed turn's processes are
        all gone when this returns."""
        command = memoryview(worker.COMMAND.pack(len(body), self.turn_number, timeout) + body)
        deadline = begun + timeout
        look = begun + _WATCH_SECONDS
        if self.cgroup is not None:
            self.cpu_total = self.cgroup.cpu_seconds()
        cpu_end = self.cpu_total + cpu_seconds
        self.answer.clear()
        while True:
            if command:
                command = self.feed(one, command)
            now = time.monotonic()
            pause = min(deadline, look) - now
            ready = self.wait(min(pause, 0.002) if command else pause)
            outcome = self.trouble(one, ready)
            if outcome is None and one.answer_fd in ready:
                outcome = self.read_answer(one)
                if outcome is not None and not outcome.ends:
                    self.drain()
                    return outcome
            now = time.monotonic()
            if outcome is None and now >= deadline:
                outcome = Outcome("TIMEOUT", f"killed after {timeout:g} s")
            if outcome is None and now >= look:
                look = now + _WATCH_SECONDS
                outcome = self.watch()
                if outcome is None and self.cpu_total > cpu_end:
                    outcome = Outcome("TIMEOUT", f"killed after {cpu_seconds:g} s of CPU time")
            if outcome is not None:
                self.end_generation()
                return outcome

    def feed(self, one: Worker, command: memoryview) -> memoryview:
        try:
            return command[os.write(one.command_fd, command) :]
        except BlockingIOError:
            return command
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            return command[len(command) :]  # it is gone or will not listen: its death or the deadline decides

    def trouble(self, one: Worker, ready: set[int]) -> Outcome | None:
        """What ends a turn other than its answer and the clocks."""
        if self.control_fd in ready and not self.receive():
            os._exit(0)  # the service is gone: so are we
        for other in self.workers.values():
            if other.answer_fd in ready and other is not one:
                return Outcome("SESSION_LOST", "a worker answered or ended out of its turn")
        self.drain()
        if self.stdout.total + self.stderr.total > 2 * self.limits["output_bytes"] + self.limits["flood_bytes"]:
            return Outcome("OUTPUT_LIMIT", f"more than {self.limits['flood_bytes']} bytes of output past the limit")
        if one.pid in self.dead and one.answer_fd not in ready:
            status = self.dead[one.pid]
            self.drain()
            if self.cgroup is not None and self.cgroup.has_killed():
                return Outcome("MEMORY", _OOM_KILL)
            return _outcome_of_death(os.waitstatus_to_exitcode(status))
        return None

    def read_answer(self, one: Worker) -> Outcome | None:
        """None while it is incomplete."""
        size = worker.ANSWER.size
        data = os.read(one.answer_fd, 65536)
        if not data:  # every holder closed it
            self.poll.unregister(one.answer_fd)
        self.answer += data
        if len(self.answer) < size:
            return None
        length, number, tag, exit_code = worker.ANSWER.unpack_from(self.answer)
        excess = len(self.answer) - size - length
        if length > self.limits["value_bytes"] or number != self.turn_number or tag not in _STATUS_OF_TAG or excess > 0:
            return Outcome("SESSION_LOST", "the worker broke the protocol")
        if excess < 0:
            return None
        body = bytes(self.answer[size:])
        code = None if exit_code == runtimes.NO_EXIT_CODE else exit_code
        if tag == runtimes.OK:
            return Outcome("OK", exit_code=code, value=body, ends=False)
        text, _, value = body.partition(b"\0")
        status, detail = _STATUS_OF_TAG[tag], text[:2000].decode("utf-8", "replace")
        if tag == runtimes.SIGNALED:
            return Outcome(status, detail, signal=exit_code, value=value, ends=False)
        return Outcome(status, detail, exit_code=code, value=value, ends=tag == runtimes.EXHAUSTED)

    def drain(self) -> None:
        self.stdout.drain(_DRAIN_BYTES)
        self.stderr.drain(_DRAIN_BYTES)

    def watch(self) -> Outcome | None:
        """Memory of all processes, and CPU that they used since the last look."""
        if self.cgroup is not None and self.cgroup.has_killed():
            return Outcome("MEMORY", _OOM_KILL)
        used, limit = self.look(), self.limits["memory_bytes"]
        if used > limit:
            return Outcome("MEMORY", f"the processes used {used >> 20} MiB of {limit >> 20} MiB")
        return None

    def look(self) -> int:
        """Bring `cpu_total` up to now; the bytes of memory and folders that are used, or, where it is within the limit
        already, a figure that includes more."""
        limit: int = self.limits["memory_bytes"]
        if self.cgroup is not None:
            self.cpu_total = self.cgroup.cpu_seconds()
            total = self.cgroup.memory_bytes()
            if total <= limit:
                return total
        pids = processes.members(self.scope)
        if self.cgroup is None:
            seen = {pid: processes.cpu_used(pid) for pid in pids}
            self.cpu_total += sum(max(0.0, cpu - self.cpu_seen.get(pid, 0.0)) for pid, cpu in seen.items())
            self.cpu_seen = seen
        return processes.memory_used(pids, limit) + self.spaces.bytes_used()

    def idle_trouble(self) -> bool:
        """Between turns: a flood, a dead worker, or an answer that nobody asked for."""
        if self.stdout.total + self.stderr.total > self.limits["flood_bytes"]:
            return True
        if any(one.pid in self.dead for one in self.workers.values()):
            return True
        answers = {one.answer_fd for one in self.workers.values()}
        return not answers.isdisjoint(fd for fd, _ in self.poll.poll(0))

    def over_budget(self) -> bool:
        """Between turns: what is left running uses too much memory, or as much CPU as a whole turn may."""
        over_memory: bool = self.look() > self.limits["memory_bytes"]
        return over_memory or self.cpu_total > self.idle_cpu_end

    def end_generation(self) -> None:
        """Kill every process but this one; the next turn of each runtime starts afresh."""
        for one in self.workers.values():
            self.cpu_seen[one.pid] = processes.cpu_used(one.pid) or self.cpu_seen.get(one.pid, 0.0)
        self.stuck = not processes.end_all(self.scope, _REAP_SECONDS)
        if self.cgroup is not None:
            self.cgroup.has_killed()  # whom the kernel was still killing, too: the next turn has no part in it
        self.used.update(self.workers)
        for one in self.workers.values():
            with contextlib.suppress(KeyError):  # at its end already
                self.poll.unregister(one.answer_fd)
            os.close(one.command_fd)
            os.close(one.answer_fd)
        self.workers.clear()
        self.dead.clear()
        self.drain()
