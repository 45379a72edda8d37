"""The first process of a container: gives up what the engine left it, then supervises.

The engine has already made the walls (namespaces, read-only root, capped mounts, a uid, no capabilities, cgroups); what
is put on here is what would be missing if the engine were told less or did less than it was asked. Control is the
container's stdin and stdout, moved out of the reach of programs; stderr is for a start that fails.
"""

import fcntl
import gc
import os
import site
import sys
from typing import Any

from . import interpreter, jail, linux, processes, seccomp, supervisor

_NICENESS = 10
"""Of programs against the supervisor, with which they share the container's processors: 64 busy ones must not keep it
from its clocks."""
_FIRST_CONTROL_FD = 100
"""Above what a worker keeps: it closes everything from 22 on."""


def main(start: dict[str, Any]) -> None:
    """The process's whole life. `start`: `limits`, the fields of SandboxLimits, and `again`: that another was this
    process before, and went behind the filter."""
    requests = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FIRST_CONTROL_FD)
    answers = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _FIRST_CONTROL_FD)
    code = 1
    try:
        _hide_control()
        limits = {**start["limits"], "niceness": _NICENESS}
        site.main()  # the image's own packages, which -S left out
        _give_up_rights()
        os.chdir(jail.WORKSPACE)
        interpreter.set_environment(jail.WORKSPACE, jail.TEMPORARY)
        interpreter.warm_up(shared=False)
        gc.collect()
        gc.freeze()
        gc.disable()
        made = supervisor.Supervisor(
            requests,
            limits,
            jail.WALLS,
            processes.Scope.NAMESPACE,
            answers,
            begin_anew=lambda: _begin_anew(requests, answers),
        )
        if not start["again"]:
            seccomp.Filter(seccomp.build(linux.MACHINE, isolated=True)).install()
        made.serve()
        code = 0
    except BaseException as error:  # noqa: BLE001 - all of it is told to the service, then the container ends
        supervisor.report_failure(answers, f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def _begin_anew(requests: int, answers: int) -> None:
    """As the engine started it: it waits for the same message, in a memory in which nothing is left."""
    os.dup2(requests, 0)
    os.dup2(answers, 1)
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - our own


def _hide_control() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _give_up_rights() -> None:
    """Idempotent where the engine has done it: nothing here fails for want of a right that is gone already."""
    if os.getuid() == 0:
        raise PermissionError("the container runs as root: the engine ignored its user")
    linux.drop_capabilities()
    linux.no_new_privileges()
    linux.set_dumpable(False)
