"""The zygote: a small warm interpreter from which every sandbox of the process backend is forked.

Started by exec with an empty environment before anything of the service can leak into it, single-threaded, standard
library only. Messages on its SOCK_SEQPACKET socket are JSON objects:

    in   start   {"mode", "extra_paths"}                  once, first
    out  started {"event": "started"} or {"event": "failed", "reason"}
    in   create  {"op": "create", "id", "uid", "workspace", "limits"} and the sandbox's stream socket (SCM_RIGHTS)
    in   kill    {"op": "kill", "id"}
    out  gone    {"event": "gone", "id"}     when nothing of the sandbox is left

In mode `isolated` it is the first process of a PID namespace that holds every sandbox: when it dies, by whatever cause,
the kernel kills them all. It dies when its socket closes, hence when the service does.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from . import interpreter, jail, landlock, linux, metadata, processes, seccomp, supervisor

MESSAGE_BYTES = 65536
_CONTROL_FD = 3


class Zygote:
    """Forks sandboxes, kills them, reports when they are gone. `main` says what surrounds it."""

    def __init__(self, control: socket.socket, mode: str, root: bool, extra_paths: list[str]) -> None:
        self.control = control
        self.isolated = mode == "isolated"
        self.root = root
        self.filter = seccomp.Filter(seccomp.build(linux.MACHINE, self.isolated))
        self.readable = jail.readable_paths(extra_paths)
        self.children: dict[int, tuple[str, int]] = {}
        """pid of a supervisor not yet reaped: (sandbox id, uid)."""
        self.own_pid_namespace = -1
        if self.isolated:
            self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        else:
            linux.become_subreaper()
            if not root and landlock.ABI < landlock.SIGNAL_SCOPE_ABI:
                raise PermissionError(
                    "without root a sandbox has the service's uid, and without Landlock's signal scope (Linux 6.12) it "
                    "could kill the service"
                )

    def serve(self) -> None:
        """Until the service's end of the socket closes."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == wake_read:
                    os.read(wake_read, 4096)
                    self.reap()
                elif not self.handle_one():
                    self.end_all()
                    return

    def handle_one(self) -> bool:
        """One message; False at the end of the stream."""
        data, fds, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 4)
        if not data:
            return False
        message = json.loads(data)
        if message["op"] == "create":
            self.create(message, fds[0])
        else:
            for pid, (name, _) in self.children.items():
                if name == message["id"]:
                    os.kill(pid, signal.SIGKILL)  # ours and unreaped, so the number cannot be another's
        for fd in fds:
            os.close(fd)
        return True

    def create(self, message: dict[str, Any], stream_fd: int) -> None:
        try:
            if self.isolated:
                linux.unshare(linux.CLONE_NEWPID)
            try:
                pid = linux.fork()
                if pid == 0:
                    self.child(message, stream_fd)
            finally:
                if self.isolated:
                    linux.setns(self.own_pid_namespace, linux.CLONE_NEWPID)
        except OSError as error:
            supervisor.report_failure(stream_fd, f"the zygote could not fork: {error}")
            self.send({"event": "gone", "id": message["id"]})
            return
        self.children[pid] = (message["id"], message["uid"])

    def child(self, message: dict[str, Any], stream_fd: int) -> None:
        """In the fork: become the supervisor of a sandbox. Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            os.dup2(stream_fd, _CONTROL_FD)
            linux.close_from(_CONTROL_FD + 1)
            uid = message["uid"]
            gid = uid if self.root else os.getgid()  # an ordinary user can be no other group than its own
            limits = message["limits"]
            if self.isolated:
                jail.enter_namespaces()
                jail.mount_private(uid, gid, limits["workspace_bytes"], limits["workspace_inodes"])
                walls = jail.WALLS
            else:
                linux.become_subreaper()
                workspace, temporary = message["workspace"] + "/work", message["workspace"] + jail.TEMPORARY
                walls = landlock.Walls(self.readable, (workspace, temporary), jail.DEVICES, alone=True)
                interpreter.set_environment(workspace, temporary)
                os.chdir(workspace)
            jail.become(uid, gid, own_uid=self.root, user_namespace=self.isolated and not self.root)
            if walls.alone and not self.root:
                metadata.guard(walls.writable)
            check_interpreter()
            scope = processes.choose_scope(self.isolated, self.root)
            made = supervisor.Supervisor(_CONTROL_FD, limits, walls, scope)
            self.filter.install()
            made.serve()
            code = 0
        except BaseException as error:  # noqa: BLE001 - all of it is told to the service, then the process ends
            supervisor.report_failure(_CONTROL_FD, f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)

    def reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self.children:
                continue  # an orphan that only the restricted tier can leave to us
            name, uid = self.children.pop(pid)
            if not self.isolated:
                self.end_strays(uid)
            self.send({"event": "gone", "id": name})

    def end_strays(self, uid: int) -> None:
        """Restricted tier: what outlived its supervisor is a child of ours by now. Until none is left."""

        def left() -> list[int]:
            return processes.strays(set(self.children), uid if self.root else None)

        while processes.kill_listed(left):
            time.sleep(0.002)
            for pid in left():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def end_all(self) -> None:
        """The service is gone. Isolated: returning ends the PID namespace and all in it. Restricted: by hand."""
        if self.isolated:
            return
        for pid, (_, uid) in list(self.children.items()):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self.children[pid]
            self.end_strays(uid)

    def send(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the service is gone: serve() sees it next
            self.control.send(json.dumps(event).encode())


def check_root() -> None:
    """Refuse a root that is none."""
    if ~linux.effective_capabilities() & linux.CAPS_OF_ROOT:
        raise PermissionError(
            "running as root without one of CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_KILL, CAP_SETGID, CAP_SETUID: "
            "run the service with them, or as an ordinary user"
        )


def check_interpreter() -> None:
    """Refuse one that a sandbox's user cannot read."""
    if not os.access(os.__file__, os.R_OK):
        raise PermissionError(
            f"the Python that runs inside lies where a sandbox's user cannot read it ({sys.base_prefix}): name another "
            "(sandbox.process.interpreter), as /usr/bin/python3"
        )


def enter_isolation(extra_paths: list[str], root: bool) -> None:
    """Namespaces and root of the zygote itself. Returns in a new first process; the caller's process only waits."""
    if root and not linux.effective_capabilities() & linux.CAP_SYS_ADMIN:
        raise PermissionError("running as root without CAP_SYS_ADMIN")
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(linux.CLONE_NEWPID if root else linux.CLONE_NEWUSER | linux.CLONE_NEWPID)
    if not root:
        jail.map_identity(uid, gid)
    pid = os.fork()
    if pid != 0:
        linux.close_from(_CONTROL_FD)
        os.waitpid(pid, 0)
        os._exit(0)
    linux.die_with_parent()
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
    jail.build_root(extra_paths)


def reset_signals() -> None:
    """None is blocked or ignored, whatever the service was started with, but those that Python ignores itself."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def main(fd: int) -> None:
    """The process's whole life. `fd` is the SOCK_SEQPACKET socket to the service."""
    reset_signals()
    control = socket.socket(fileno=fd)
    start = json.loads(control.recv(MESSAGE_BYTES))
    mode = start["mode"]
    interpreter.warm_up(shared=True)
    del sys.path[0]  # where this code lies, which no sandbox sees
    try:
        root = os.geteuid() == 0
        if root:
            check_root()
        if mode == "isolated":
            enter_isolation(start["extra_paths"], root)
            interpreter.set_environment(jail.WORKSPACE, jail.TEMPORARY)
        if root:
            linux.drop_bounding_set()  # here, once for all sandboxes: it only bounds what an exec can gain
        zygote = Zygote(control, mode, root, start["extra_paths"])
        gc.collect()
        gc.freeze()
        gc.disable()
        zygote.send({"event": "started"})
        zygote.serve()
    except Exception as error:  # the service must hear of it before the process ends with it
        control.send(json.dumps({"event": "failed", "reason": f"{type(error).__name__}: {error}"}).encode())
        raise
