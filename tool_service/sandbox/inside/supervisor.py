"""The supervisor: first process of a sandbox, only holder of the service's socket, only source of a status.

Single-threaded and driven by poll. Requests (frames, see frames.py) come one at a time:

    {"op": "turn", "runtime", "payload", "timeout", "cpu_seconds", "output_bytes"}
                                                                     ->  {"status", ...}, blob = stdout + stderr
    {"op": "put", "path"} + blob                                     ->  {"error"?}
    {"op": "get", "path", "max_bytes"}                               ->  {"error"?}, blob = the file
    {"op": "reset"}                                                  ->  {"error"?}: why it cannot be as new; or it is,
                                                                         and begins anew in the place of this process
    {"op": "ping"}                                                   ->  {}

It exits when the socket closes, and with it, as first process of the PID namespace, everything in the sandbox.

What a worker says can at worst cost its own session: an answer is a length, the number of the present turn, one of a
few words and a bounded body. All else, and anything out of turn, ends all processes of the sandbox as SESSION_LOST.
All workers die together (a *generation*), so that no process of a killed turn can be left behind.
"""

import contextlib
import errno
import math
import os
import time
from collections.abc import Callable
from typing import Any

from . import events, files, frames, generation, landlock, outcome, processes, runtimes, spaces, worker
from .generation import Worker
from .outcome import Outcome
from .watch import OOM_KILL, Watch

_READ_BYTES = 65536
"""More would be mapped and unmapped again for each read."""
_QUIET_SECONDS = 0.05
"""Of a turn's begin, in which output waits in its pipe: most turns are over by then, and need not wake us for it."""
_DEATHS = ("SIGNALED", "SESSION_LOST")
_FULL = 3 / 4
"""Of the most processes: fork bombs hover somewhat below them."""
_MOST_IDLE_SECONDS = 16.0
"""Between two looks at memory and CPU between turns, where nothing moves and programs have left no process behind: one
alone is held by its own limits. The first comes as soon as in a turn."""


def report_failure(fd: int, reason: str) -> None:
    """Tell the service that no sandbox came of this socket."""
    with contextlib.suppress(OSError):  # the service may have given up already
        os.write(fd, frames.encode({"failed": reason}))


class Supervisor:
    """See the module's docstring. `limits` are the fields of SandboxLimits."""

    def __init__(
        self,
        control_fd: int,
        limits: dict[str, Any],
        walls: landlock.Walls,
        scope: processes.Scope,
        answer_fd: int | None = None,
        *,
        begin_anew: Callable[[], None] | None = None,
    ) -> None:
        """`walls`: what programs may touch. `answer_fd`: where control is a pair of pipes and not a socket.
        `begin_anew` puts another in the place of this process, with none of its memory; it does not return."""
        self.control_fd = control_fd
        self.answer_fd = control_fd if answer_fd is None else answer_fd
        self.begin_anew = begin_anew
        self.limits = limits
        self.scope = scope
        self.events = events.Events()
        self.events.listen(control_fd)
        self.workers = generation.Workers(limits, walls, scope, self.events)
        self.folder = files.Folder(walls.writable[0], limits["file_bytes"])
        self.spaces = spaces.Spaces(walls.writable)
        self.watch = Watch(scope, limits, self.spaces)
        self.decoder = frames.Decoder()
        self.turn_number = 0
        """Of the present turn. No program knows it beforehand, so that a forged answer is none however it is timed."""
        self.answer = bytearray()
        """What the turn's worker has said so far."""

    def serve(self) -> None:
        """Until the service closes the connection, or the sandbox cannot be used any more: where something does not
        die, the supervisor ends once the turn is answered, and the kernel ends the rest."""
        self.workers.keep_spare()
        self.send({"ready": True})
        shortest = pause = self.watch.seconds
        look = math.inf
        while not self.workers.stuck:
            ready = self.wait(look - time.monotonic() if self.workers.used else None)
            if self.control_fd in ready:
                if not self.receive():
                    return
                while (frame := self.decoder.next()) is not None:
                    self.handle(frames.header(frame[0]), frame[1])
                pause, look = shortest, time.monotonic() + shortest
                continue  # what else was ready still is
            self.workers.drain(ready)
            due = self.workers.used and time.monotonic() >= look
            left = self.left_running() if due else 0
            if self.idle_trouble(ready) or self.is_full(left) or (due and self.watch.trouble() is not None):
                self.end_generation()
            if due:
                pause = shortest if ready or left > 0 else min(pause * 2, _MOST_IDLE_SECONDS)
                look = time.monotonic() + pause
        self.send({"over": True})

    def wait(self, seconds: float | None, but_output: bool = False) -> set[int]:
        """Descriptors with something to read; children that ended are reaped on the way."""
        ready = self.events.wait(seconds, but_output)
        if self.events.child_fd in ready:
            self.workers.reap()
        return ready

    def receive(self) -> bool:
        try:
            data = os.read(self.control_fd, _READ_BYTES)
        except ConnectionResetError:
            return False
        self.decoder.feed(data)
        return bool(data)

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        worker.write_all(self.answer_fd, frames.encode(header, blob))

    def handle(self, request: dict[str, Any], blob: bytes) -> None:
        try:
            if request["op"] == "turn":
                self.turn(request)
            elif request["op"] == "put":
                self.folder.put(request["path"], blob)
                self.send({})
            elif request["op"] == "get":
                self.send({}, self.folder.get(request["path"], request["max_bytes"]))
            elif request["op"] == "reset":
                error = self.reset()
                self.send({"error": error})
                if not error and self.begin_anew is not None:
                    self.begin_anew()
            else:
                self.send({})
        except files.Refused as error:
            self.send({"error": str(error)})

    def reset(self) -> str:
        """Make the sandbox as it was before its first turn; why that cannot be had, empty if it is so."""
        if self.begin_anew is None:
            return "workers are copies of their supervisor, whose memory holds what it was sent"
        self.end_generation()
        try:
            self.spaces.wipe()
            left = self.spaces.leftovers()
        except OSError as error:
            return f"the folders resist: {error}"
        self.workers.free_processors()
        return left or ("processes" if processes.members(self.scope) else "")

    def turn(self, request: dict[str, Any]) -> None:
        begun = time.monotonic()
        runtime, outlets = request["runtime"], (self.workers.stdout, self.workers.stderr)
        for outlet in outlets:
            outlet.begin(min(request["output_bytes"], self.limits["output_bytes"]))
        self.turn_number = int.from_bytes(os.urandom(4), "big")
        restarted = self.workers.has_lost(runtime)
        cpu = 0.0
        one, body = self.prepare(runtime, request["payload"])
        if isinstance(one, Worker):
            cpu_begun = one.cpu_used()
            self.watch.begin(min(request["cpu_seconds"] or math.inf, self.limits["cpu_seconds"]))
            result = self.await_answer(one, body, begun, request["timeout"])
            cpu = one.cpu_used() - cpu_begun
        else:
            result = one
        self.watch.begin(self.limits["cpu_seconds"])
        (stdout, out_total), (stderr, err_total) = (outlet.take() for outlet in outlets)
        header = {
            "status": result.status,
            "detail": result.detail,
            "exit_code": result.exit_code,
            "signal": result.signal,
            "stdout": len(stdout),
            "stderr": len(stderr),
            "total": out_total + err_total,
            "wall": time.monotonic() - begun,
            "cpu": cpu,
            "restarted": restarted,
        }
        self.send(header, stdout + stderr + result.value)

    def prepare(self, runtime: str, payload: dict[str, Any]) -> tuple[Worker | Outcome, bytes]:
        """The runtime's worker, started if need be, and what to tell it; or why there is none."""
        if runtime not in runtimes.NAMES:
            return Outcome("INFRA", f"no runtime {runtime!r} here; there are: {', '.join(runtimes.NAMES)}"), b""
        try:
            body = runtimes.find(runtime).encode(payload)
        except ValueError as error:
            return Outcome("INFRA", str(error)), b""
        try:
            return self.workers.of(runtime), body
        except OSError as error:
            return Outcome("INFRA", f"could not start the worker: {error}"), b""

    def await_answer(self, one: Worker, body: bytes, begun: float, timeout: float) -> Outcome:
        """Feed the command, drain output, watch clocks, until the turn has an outcome. A killed turn's processes are
        all gone when this returns."""
        command = memoryview(worker.COMMAND.pack(len(body), self.turn_number, timeout) + body)
        deadline, quiet_end, look = begun + timeout, begun + _QUIET_SECONDS, begun + self.watch.seconds
        self.answer.clear()
        while True:
            if command:
                command = _feed(one.command_fd, command)
            now = time.monotonic()
            quiet = now < quiet_end
            pause = min(deadline, quiet_end if quiet else look) - now
            ready = self.wait(min(pause, 0.002) if command else pause, but_output=quiet)
            result = self.trouble(one, ready)
            if result is None and one.answer_fd in ready:
                result = self.read_answer(one)
            if result is not None and result.status in _DEATHS and self.watch.memory_killed():
                result = OOM_KILL  # whichever process it was: a worker, another's, a shell
            if result is not None and not result.ends:
                self.workers.drain()
                if time.monotonic() >= quiet_end and self.is_full(self.left_running()):
                    self.end_generation()
                return result
            now = time.monotonic()
            if result is None and now >= deadline:
                result = Outcome("TIMEOUT", f"killed after {timeout:g} s")
            if result is None and now >= look:
                look = now + self.watch.seconds
                one.cpu_used()  # while it can be seen
                result = self.watch.trouble()
            if result is not None:
                self.end_generation()
                return result

    def trouble(self, one: Worker, ready: set[int]) -> Outcome | None:
        """What ends a turn other than its answer and the clocks."""
        if self.control_fd in ready and not self.receive():
            os._exit(0)  # the service is gone: so are we
        if self.workers.spoke(ready, but=one):
            return Outcome("SESSION_LOST", "a worker answered or ended out of its turn")
        self.workers.drain(ready)
        if self.workers.printed > 2 * self.limits["output_bytes"] + self.limits["flood_bytes"]:
            return Outcome("OUTPUT_LIMIT", f"more than {self.limits['flood_bytes']} bytes of output past the limit")
        if one.wait_status is not None and one.answer_fd not in ready:
            self.workers.drain()
            return outcome.of_death(one.wait_status)
        return None

    def read_answer(self, one: Worker) -> Outcome | None:
        """None while it is incomplete."""
        data = os.read(one.answer_fd, _READ_BYTES)
        if not data:  # every holder closed it
            self.events.ignore(one.answer_fd)
        self.answer += data
        return outcome.of_answer(self.answer, self.turn_number, self.limits["value_bytes"])

    def idle_trouble(self, ready: set[int]) -> bool:
        """Between turns: a flood, a dead worker, or an answer that nobody asked for."""
        return self.workers.printed > self.limits["flood_bytes"] or self.workers.spoke(ready)

    def left_running(self) -> int:
        """Processes that programs have started and not ended, between two turns."""
        return len(processes.members(self.scope)) - self.workers.at_rest

    def is_full(self, left: int) -> bool:
        """Whether with `left` processes next to no other can be started, as when a turn was a fork bomb, which is over
        at once: nothing more would come of this generation."""
        return left > 0 and left + self.workers.at_rest >= self.limits["processes"] * _FULL

    def end_generation(self) -> None:
        self.workers.end()
        self.watch.memory_killed()  # whom the kernel was still killing, too: the next turn has no part in it


def _feed(command_fd: int, command: memoryview) -> memoryview:
    """Write what fits; the rest."""
    try:
        return command[os.write(command_fd, command) :]
    except BlockingIOError:
        return command
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        return command[len(command) :]  # it is gone or will not listen: its death or the deadline decides
