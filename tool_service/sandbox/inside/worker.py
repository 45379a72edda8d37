"""The worker process: takes turns from a pipe, hands them to its runtime, answers on another pipe.

Untrusted code runs in this process and can reach everything in it. The loop defends against accidents and pranks (a
fork that returns into it, patched modules, exceptions from signal handlers) by holding the few functions it needs;
against malice the supervisor defends, by believing nothing.
"""

import ast
import builtins
import fcntl
import gc
import io
import os
import random
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from . import landlock, linux, runtimes

__builtins__ = vars(builtins).copy()  # type: ignore[assignment]
"""Of the functions here, which are made with it: a program may patch its own as it likes."""

COMMAND = struct.Struct("=IId")  # body length, turn number, seconds
ANSWER = struct.Struct("=IIBi")  # body length, turn number, tag, exit code
_FIRST_PRIVATE_FD = 20
_FAILED = 70
"""Exit code of a worker that cannot go on."""
_ALL_SIGNALS = [int(number) for number in signal.valid_signals()]


def greeting(runtime: str) -> bytes:
    """What a worker must be told before its first command."""
    return bytes((runtimes.NAMES.index(runtime),))


def start(
    context: runtimes.Context,
    limits: dict[str, Any],
    walls: landlock.Ruleset,
    pipes: tuple[int, int, int, int],
) -> NoReturn:
    """In the fork: arrange descriptors, lower limits, go behind the walls, become a runtime's, serve until the pipe
    ends. Never returns. `pipes`: the ends to read commands from, write answers to, and write stdout and stderr to."""
    try:
        command_fd, answer_fd, stdout_fd, stderr_fd = pipes
        signal.set_wakeup_fd(-1)
        linux.set_handler(signal.SIGCHLD, linux.SIG_DFL)
        linux.set_handler(signal.SIGINT, signal.default_int_handler)
        random.seed()
        os.setsid()
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)
        linux.set_dumpable(True)  # its own /proc entries are its own again; the supervisor's stay closed
        linux.die_with_parent()
        _go_first_when_memory_ends()
        walls.confine()
        _move_high(command_fd, answer_fd)
        _lower_limits(limits)
        gc.enable()
        _rehearse()
        if greeted := os.read(_FIRST_PRIVATE_FD, 1):
            _serve(runtimes.find(runtimes.NAMES[greeted[0]]).Session(context))
    except BaseException as error:  # noqa: BLE001 - told, then the process ends
        os.write(2, f"worker: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(_FAILED)  # never back into the supervisor's code, of which this process is a copy


def _rehearse() -> None:
    """Compile and run something before there is a turn that waits for it: of all that a first turn does, copying the
    pages which this writes to takes longest."""
    source = "from math import pi\nresult = sum(i * i for i in range(9))\nf'{result:>3}'.strip()"
    exec(compile(ast.parse(source), "<rehearsal>", "exec", dont_inherit=True), {})  # noqa: S102 - it is ours


def parse(source: str, name: str, _compile: Callable[..., Any] = compile, _kind: type = ast.Module) -> Any:
    """The syntax tree. Raises RuntimeError in another interpreter than this one began in: its trees are of other types
    (Py_NewInterpreter)."""
    tree = _compile(source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    if type(tree) is not _kind:
        raise RuntimeError("another interpreter runs here")
    return tree


def _is_intact(compile_code: Callable[..., Any] = compile, run: Callable[..., Any] = exec) -> bool:
    """Whether code can be run here at all: behind an audit hook that raises it cannot, as long as the process lives."""
    try:
        run(compile_code(parse("pass", "<check>"), "<check>", "exec", dont_inherit=True), {})
    except BaseException:  # noqa: BLE001 - whatever the hook raises
        return False
    return True


def _move_high(command_fd: int, answer_fd: int) -> None:
    """Put the two pipes at 20 and 21 and close everything else above 2."""
    spare_command = fcntl.fcntl(command_fd, fcntl.F_DUPFD_CLOEXEC, 64)
    spare_answer = fcntl.fcntl(answer_fd, fcntl.F_DUPFD_CLOEXEC, 64)
    os.dup2(spare_command, _FIRST_PRIVATE_FD, inheritable=False)
    os.dup2(spare_answer, _FIRST_PRIVATE_FD + 1, inheritable=False)
    os.closerange(3, _FIRST_PRIVATE_FD)
    linux.close_from(_FIRST_PRIVATE_FD + 2)


def _go_first_when_memory_ends() -> None:
    """Of all the machine's processes: the kernel's choice, should it come to that."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(fd, b"1000")
    os.close(fd)


def _lower_limits(limits: dict[str, Any]) -> None:
    memory = limits["memory_bytes"]
    wanted = {
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_AS: 4 * memory + (1 << 30),  # DATA does not see shared mappings; reserving is not using
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 64 << 10,
        resource.RLIMIT_MSGQUEUE: 64 << 10,
        resource.RLIMIT_SIGPENDING: 1024,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
    }
    for kind, limit in wanted.items():
        _, hard = resource.getrlimit(kind)
        value = int(limit) if hard == resource.RLIM_INFINITY else min(int(limit), hard)
        resource.setrlimit(kind, (value, value))
    if "niceness" in limits:
        os.nice(limits["niceness"])


def _serve(session: runtimes.Session) -> None:
    """Until the pipe ends. Signals are blocked outside of the program's own time, so that a handler of its own that
    raises cannot tear a command or an answer in two."""
    write, getpid, leave = write_all, os.getpid, os._exit
    mask, block, restore = linux.mask_signals, signal.SIG_BLOCK, signal.SIG_SETMASK
    everything = _ALL_SIGNALS
    pack, reply_type, error_tag = ANSWER.pack, runtimes.Reply, runtimes.ERROR
    receive, intact = _receive, _is_intact
    me = getpid()
    run = session.run
    stat = os.fstat
    pipes = stat(_FIRST_PRIVATE_FD).st_ino, stat(_FIRST_PRIVATE_FD + 1).st_ino
    programs_mask = mask(block, everything)
    while True:
        command = receive()
        if command is None:
            return
        number, seconds, body = command
        failure = None
        try:
            mask(restore, programs_mask)
            reply = run(body, seconds)
        except BaseException as error:  # noqa: BLE001 - the program may have patched anything
            failure = error  # and no more: where a call ends a handler of the program's may run, and raise again
        # Handlers whose signals came before the block still run, up to the first that raises: one more with each call.
        # Three are as many as a program has timers. No loop: they would run where it goes back, too.
        try:
            programs_mask = mask(block, everything)
        except BaseException:  # noqa: BLE001 - the block holds
            try:
                mask(block, everything)
            except BaseException:  # noqa: BLE001 - as above
                try:
                    mask(block, everything)
                except BaseException:  # noqa: BLE001 - as above
                    mask(block, everything)
        if failure is not None:
            reply = reply_type(error_tag, body=type(failure).__name__.encode("utf-8", "replace"))
        if getpid() != me:
            # A fork of the program's that came back: exactly one process answers.
            leave(reply.exit_code if reply.exit_code >= 0 else int(reply.tag != 0))
        if reply.tag == error_tag and not intact():
            leave(_FAILED)  # no later turn could do any better: the next one has another worker
        if (stat(_FIRST_PRIVATE_FD).st_ino, stat(_FIRST_PRIVATE_FD + 1).st_ino) != pipes:
            return  # the program put something else in their place
        write(_FIRST_PRIVATE_FD + 1, pack(len(reply.body), number, reply.tag, reply.exit_code) + reply.body)


def _receive(
    read: Callable[[int, int], bytes] = os.read,
    unpack: Callable[[bytes], tuple[Any, ...]] = COMMAND.unpack,
    size: int = COMMAND.size,
) -> tuple[int, float, bytes] | None:
    """The next command, None at the end. What it needs is bound as defaults, out of the program's easy reach."""
    buffer = b""
    want = size
    while len(buffer) < want:
        data = read(_FIRST_PRIVATE_FD, 1 << 16)
        if not data:
            return None
        buffer += data
        if want == size and len(buffer) >= size:
            want = size + unpack(buffer[:size])[0]
    _, number, seconds = unpack(buffer[:size])
    return number, seconds, buffer[size:]


def write_all(fd: int, data: Any, _write: Callable[..., int] = os.write, _view: Any = memoryview) -> None:
    """write(2) until all is written: a signal may cut it short. Raises OSError."""
    rest = _view(data).cast("B")
    while rest:
        rest = rest[_write(fd, rest) :]


class _Whole(io.FileIO):
    """Writes all that it is given. A plain one may not, and text streams do not look."""

    def write(
        self,
        data: Any,
        _write: Callable[..., int | None] = io.FileIO.write,
        _write_all: Callable[..., None] = write_all,
        _view: Any = memoryview,
    ) -> int:
        """Raises BlockingIOError where a program has made it non-blocking and there is no room."""
        whole: int = _view(data).nbytes
        written = _write(self, data)
        if written != whole:
            _write_all(self.fileno(), _view(data).cast("B")[written or 0 :])
        return whole


def own_streams() -> None:
    """Text streams on whatever 1 and 2 will be, that write through: nothing is lost when the process is killed."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = _Whole(fd, "w", closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
