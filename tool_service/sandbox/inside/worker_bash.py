"""Runtime `bash`: one shell that lives as long as the sandbox; each turn is a script that it runs in its own process.

The worker runs nothing untrusted itself, and programs can neither reach into it (it is not dumpable) nor write
where it listens. The shell reads its commands from a pipe, one byte at a time, so that what follows a script is
still there when the script is over. Three lines make a turn:

1. one that makes line numbers begin at 1 again;
2. `\\builtin eval $'the script'`, with /dev/null as stdin, and stdout and stderr as the turn's output. All three are
   put back afterwards, so that `exec >file` holds for its own turn only;
3. one that says the exit code on a pipe which no command inherits. It does so by an arithmetic expression that is
   wrong, whose text bash repeats in its error message: a number that nobody knew before, and `$?`. So it needs no
   command but `builtin`, and nothing that a program prints can look like it. A script that searches the shell's own
   descriptors for that number can claim another exit code for itself, and for nobody else.

Aliases, functions, options, traps and redirections of the script's are the shell's own business. What ends the shell
(`exit`, `exec`, `set -e`, a signal) is seen by the kernel's word, and the next turn starts another one. A shell that
has read everything and said nothing (`set -n`, its descriptors closed, `builtin` replaced) is ended and told as lost.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import termios
from typing import Any

from . import linux, outputs, runtimes

_ARGV = ("bash", "--noprofile", "--norc", "-s")
_FIRST_LINE = b"{ [[ 1 ]]; } <<<$((LINENO=0))\n"
_RUN = b"\\builtin eval $'%b' 2>&1 >&2 </dev/null\n"
_REPORT = b"\\builtin eval '! ((:%d:$?:))' >&2 </dev/null\n\n"
_QUOTED = {ord("\\"): "\\\\", ord("'"): "\\'", ord("\n"): "\\n"}
_KEPT = 4096
"""Bytes of what the shell said that are searched again together with what it says next: longer than any report."""
_NOTHING = bytes(4)
"""No bytes, as FIONREAD says it."""
_IDLE_SECONDS = 0.5
"""Between two looks at whether the shell has read everything and will say nothing."""


def encode(payload: dict[str, Any]) -> bytes:
    script = payload.get("script")
    if not isinstance(script, str) or "\0" in script:
        raise ValueError("the bash runtime takes a payload of {'script': str without NUL}")
    return script.encode("utf-8", "surrogatepass")


class _Shell:
    """A bash process and the ends of its two pipes that are ours."""

    def __init__(self, workspace: str) -> None:
        """Raises OSError when there is no bash, or no room for another process."""
        commands, self.commands = os.pipe()
        self.reports, reports = os.pipe()
        try:
            self.process = subprocess.Popen(
                _ARGV, stdin=commands, stdout=1, stderr=reports, start_new_session=True, cwd=workspace
            )
        except OSError:
            self._close_ours()
            raise
        finally:
            os.close(commands)
            os.close(reports)
        self.exit_fd = os.pidfd_open(self.process.pid)
        for fd in (self.commands, self.reports):
            os.set_blocking(fd, False)

    def run(self, script: bytes) -> int | None:
        """The exit code of a script; None when the shell ended, or is of no use any more."""
        number = int.from_bytes(os.urandom(7), "big")
        quoted = script.decode("latin-1").translate(_QUOTED).encode("latin-1")
        unsent = memoryview(_FIRST_LINE + _RUN % quoted + _REPORT % number)
        report = re.compile(rb":%d:(\d{1,3}):" % number)
        said = b""
        poll = select.poll()
        poll.register(self.reports, select.POLLIN)
        poll.register(self.exit_fd, select.POLLIN)
        poll.register(self.commands, select.POLLOUT)
        while True:
            ready = dict(poll.poll(_IDLE_SECONDS * 1000))
            if unsent:
                unsent = unsent[self._send(unsent) :]
                if not unsent:
                    poll.unregister(self.commands)
            silent = not ready and not unsent and self._has_read_everything()
            said = said[-_KEPT:] + self._said()
            if found := report.search(said):
                return int(found[1])
            if silent or self.process.poll() is not None:
                return None
            if ready.get(self.reports) == select.POLLHUP:  # the shell became another program: its end decides
                poll.unregister(self.reports)

    def go_on(self) -> None:
        """Where what an earlier turn left behind has stopped it."""
        with contextlib.suppress(ChildProcessError):  # it has ended
            if os.waitid(os.P_PIDFD, self.exit_fd, os.WSTOPPED | os.WNOHANG) is not None:
                signal.pidfd_send_signal(self.exit_fd, signal.SIGCONT)

    def _send(self, data: memoryview) -> int:
        try:
            return os.write(self.commands, data)
        except BlockingIOError:
            return 0
        except BrokenPipeError:  # it ended, or became another program by `exec`: its end decides
            return len(data)

    def _said(self) -> bytes:
        try:
            return os.read(self.reports, 1 << 16)
        except BlockingIOError:
            return b""

    def _has_read_everything(self) -> bool:
        """The last newline is read only after the report is made."""
        return fcntl.ioctl(self.commands, termios.FIONREAD, _NOTHING) == _NOTHING

    def end(self) -> int | None:
        """Free what is ours of it. Its exit code as subprocess has it; None when it still ran and was killed."""
        code = self.process.poll()
        if code is None:
            self.process.kill()
            self.process.wait()
        os.close(self.exit_fd)
        self._close_ours()
        return code

    def _close_ours(self) -> None:
        os.close(self.commands)
        os.close(self.reports)


class Session:
    """Values: {"files": what came into `outputs` (see outputs.py), "restarted": True after a shell that ended, "ended":
    True when it ended in this turn, "missing": why there is no shell}, each only where there is something to say."""

    def __init__(self, context: runtimes.Context) -> None:
        linux.set_dumpable(False)  # programs run as the same user: they are not to open our /proc entries
        self._workspace = context.workspace
        self._outputs = outputs.Outputs(context)
        self._shell: _Shell | None = None
        self._lost = False

    def run(self, body: bytes, seconds: float) -> runtimes.Reply:
        value: dict[str, Any] = {}
        if self._shell is not None and self._shell.process.poll() is not None:  # a background job killed it
            self._end()
        if self._lost:
            value["restarted"] = True
        if self._shell is None:
            try:
                self._shell = _Shell(self._workspace)
            except FileNotFoundError:
                return _reply(runtimes.ERROR, {"missing": f"there is no bash in {os.environ['PATH']}"})
            except OSError as error:
                return _reply(runtimes.ERROR, value, text=f"bash cannot be started: {error.strerror}")
            self._lost = False
        self._outputs.begin()
        self._shell.go_on()
        code = self._shell.run(body)
        if files := self._outputs.changed():
            value["files"] = files
        if code is not None:
            return _reply(runtimes.ERROR if code else runtimes.OK, value, code)
        return self._ended(value)

    def _ended(self, value: dict[str, Any]) -> runtimes.Reply:
        """What became of the shell."""
        code = self._end()
        if code is None:
            return _reply(runtimes.LOST, value, text="the shell no longer takes commands")
        value["ended"] = True
        if code < 0:
            return _reply(runtimes.SIGNALED, value, -code, f"the shell died of signal {signal.Signals(-code).name}")
        return _reply(runtimes.ERROR if code else runtimes.OK, value, code)

    def _end(self) -> int | None:
        shell, self._shell, self._lost = self._shell, None, True
        return shell.end() if shell is not None else None


def _reply(tag: int, value: dict[str, Any], code: int = runtimes.NO_EXIT_CODE, text: str = "") -> runtimes.Reply:
    body = json.dumps(value).encode("ascii") if value else b""
    return runtimes.Reply(tag, code, body if tag == runtimes.OK else runtimes.failure(text, body))
