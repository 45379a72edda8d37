# ruff: noqa: E501 - programs are data
"""B: processes and signals."""

from __future__ import annotations

from tool_service.sandbox.base import Tier, Turn
from tool_service.sandbox.hostile.case import (
    ERROR,
    LOST,
    MEMORY,
    OK,
    SIGNALED,
    TIMEOUT,
    Cancel,
    Case,
    Wait,
    bash,
    case,
    py,
)
from tool_service.sandbox.hostile.programs import CALLS, SYSCALL, TRY

CASES: tuple[Case, ...] = (
    case(
        "B1-ignores-signals",
        "ignores SIGHUP, SIGINT and SIGTERM, and loops",
        py("import signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nwhile 1: pass", TIMEOUT, timeout=0.5),
    ),
    case(
        "B2-kill-all", "SIGKILL to everything it can reach", py("import os; os.kill(-1, 9)", OK, SIGNALED, ERROR, LOST)
    ),
    case("B2-kill-group", "SIGKILL to its process group", py("import os; os.killpg(0, 9)", SIGNALED, signal=9)),
    case(
        "B3-kill-parent",
        "SIGKILL to its parent",
        py("import os, time; os.kill(os.getppid(), 9); time.sleep(.2)", OK, ERROR, LOST),
        py("1", OK, LOST),
    ),
    case(
        "B3-signal-parent",
        "every signal to its parent",
        py(
            "import os, time\nfor s in range(1, 65):\n  try: os.kill(1 if os.getppid() == 1 else os.getppid(), s)\n  except OSError: pass\ntime.sleep(.2)\nprint('still here')",
            shows="still here",
        ),
        py("1", shows="1", restarted=False),
        tier=Tier.ISOLATED,
    ),
    case(
        "B3-reach-for-the-supervisor",
        "limits, priority, memory and OOM score of its supervisor",
        py(
            TRY
            + "import os, resource\ns = os.getppid()\nattempt('rlimit', lambda: resource.prlimit(s, resource.RLIMIT_NOFILE, (0, 0)))\nattempt('nice', lambda: os.setpriority(os.PRIO_PROCESS, s, 19))\nattempt('user', lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))\nattempt('idle', lambda: os.sched_setscheduler(s, os.SCHED_IDLE, os.sched_param(0)))\nattempt('mem', lambda: open(f'/proc/{s}/mem', 'rb+'))\nattempt('oom', lambda: open(f'/proc/{s}/oom_score_adj', 'w'))\nattempt('raise', lambda: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)))",
            hides="DONE",
        ),
        py("1", shows="1", restarted=False),
    ),
    case(
        "B3-signals-by-other-ways",
        "signals by pidfd and by descriptor owner",
        py(
            "import fcntl, os, signal, socket, time\ns = os.getppid()\nfor number in (9, 19, 15):\n  try: signal.pidfd_send_signal(os.pidfd_open(s), number)\n  except OSError: pass\na, b = socket.socketpair()\ntry: fcntl.fcntl(a, fcntl.F_SETOWN, s)\nexcept OSError: pass\nfcntl.fcntl(a, 10, 9); fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\nb.send(b'x'); time.sleep(.1)",
            OK,
            SIGNALED,
            LOST,
        ),
        py("1", OK, LOST),
    ),
    case(
        "B4-daemon",
        "a daemon by double fork and setsid",
        py(
            "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)\n  os._exit(0)\nprint('parent')",
            shows="parent",
        ),
    ),
    case(
        "B7-subreaper",
        "becomes a subreaper and leaves an orphan",
        py(
            CALLS
            + "import time\nprint(libc.prctl(36, 1))\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)\n  os._exit(0)",
            shows="0",
        ),
    ),
    case(
        "B9-stop", "SIGSTOP to its own group", py("import os; os.kill(0, 19)", TIMEOUT, timeout=0.5), py("1", shows="1")
    ),
    case(
        "B9-stopped-after-its-turn",
        "stops the interpreter and the shell when nothing runs in them",
        py("import os, threading; x = 5; threading.Timer(.1, os.kill, (os.getpid(), 19)).start()"),
        Wait(1.5),
        py("x", shows="5", restarted=False),
        bash("x=6; (sleep .1; kill -STOP $$) &"),
        Wait(1.5),
        bash("echo $x", shows="6"),
    ),
    case(
        "B10-fork-race",
        "processes that fork faster than they can be listed",
        py("import os\nwhile 1:\n  try:\n    if os.fork(): os._exit(0)\n  except OSError: pass", LOST, timeout=1),
    ),
    case(
        "B12-segfault",
        "a segmentation fault",
        py("import ctypes; ctypes.string_at(0)", SIGNALED, signal=11),
        py("1", shows="1"),
    ),
    case("B12-exit", "_exit without an answer", py("import os; os._exit(7)", LOST), py("1", shows="1", restarted=True)),
    case(
        "B12-exit-codes",
        "codes beyond what fits, and such as are none",
        py("import sys; sys.exit(256)"),
        py("sys.exit(-(2**40))"),
        *(py(f"sys.exit({code})", ERROR) for code in ("257", "-1", "10**100", "0.0", "[]")),
        py("class Odd(int): __eq__ = lambda s, o: True\nsys.exit(Odd(3))", ERROR),
    ),
    case(
        "B16-ptrace",
        "ptrace of the first process",
        py(SYSCALL + "call(101 if os.uname().machine == 'x86_64' else 117, 16, 1, 0, 0)", shows="not permitted"),
    ),
    case(
        "B16-tracing",
        "ptrace, process_vm_writev, pidfd_getfd, kcmp",
        py(
            CALLS
            + "s = os.getppid()\nprint(call(101, 117, 0, 0, 0, 0), call(310, 270, s, 0, 0, 0, 0, 0), call(311, 271, s, 0, 0, 0, 0, 0), call(438, 438, 0, 0, 0), call(312, 272, s, s, 0, 0, 0), call(157, 167, 0x59616D61, -1))",
            shows="EPERM EPERM EPERM EPERM EPERM EPERM",
        ),
    ),
    case(
        "B18-late-print",
        "a thread that prints in the next turn",
        py("import threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), print('late'))).start()"),
        py("time.sleep(.4)", shows="late"),
    ),
    case(
        "B20-traps",
        "a timer of turn 1 that fires in turn 2",
        py(
            "import signal, sys\ndef boom(*a): raise RuntimeError('trap')\nsignal.signal(14, boom); signal.setitimer(signal.ITIMER_REAL, .01, .01)",
            OK,
            ERROR,
        ),
        py("import time\nwhile 1: time.sleep(1)", ERROR, shows="RuntimeError"),
        py("signal.setitimer(signal.ITIMER_REAL, 0)", OK, ERROR),
        spoils=True,
    ),
    case(
        "B20-many-traps",
        "three timers, each shorter than a turn, that raise in whatever runs",
        py(
            "import signal\ndef boom(*a): raise RuntimeError('trap')\nfor s, t in ((14, 0), (26, 1), (27, 2)): signal.signal(s, boom); signal.setitimer(t, .001, .0003)",
            OK,
            ERROR,
        ),
        *(py("x = 1", OK, ERROR) for _ in range(9)),
        spoils=True,
    ),
    case(
        "B20-traps-at-once",
        "five signals in one moment, with a handler that raises in whatever runs",
        py(
            "import os, signal\nmany = range(34, 39)\ndef boom(*a): raise RuntimeError('trap')\n"
            "for s in many: signal.signal(s, boom)\nsignal.pthread_sigmask(0, many)\n"
            "for s in many: os.kill(os.getpid(), s)\nsignal.pthread_sigmask(1, many)",
            ERROR,
        ),
        py("42", shows="42"),
    ),
    case(
        "B20-settrace",
        "a trace function that raises, from turn 1 on",
        py("import sys\ndef t(*a): raise ValueError\nsys.settrace(t)", OK, ERROR),
        py("1", OK, ERROR, TIMEOUT, timeout=1),
        spoils=True,
    ),
    case(
        "B22-fork-returns",
        "the child of a fork also returns from the turn",
        py("import os; pid = os.fork(); x = 1"),
        py("x", shows="1"),
    ),
    case(
        "B24-clone-parent",
        "a child that becomes its sibling (CLONE_PARENT)",
        py(SYSCALL + "call(56 if os.uname().machine == 'x86_64' else 220, 0x8011, 0, 0, 0, 0)", shows="not permitted"),
    ),
    case("B25-input", "input() with nobody to answer", py("input()", ERROR, shows="EOFError")),
    case(
        "B6-jobs-left-behind",
        "nohup, disown, setsid, and jobs for at, cron and systemd",
        bash(
            "nohup sleep 1000 >/dev/null 2>&1 & disown; (setsid setsid sleep 1000 &)\ntrue | at now 2>/dev/null && echo REACHED; echo '* * * * * true' | crontab - 2>/dev/null && echo REACHED; systemd-run true 2>/dev/null && echo REACHED\necho left",
            shows="left",
            hides="REACHED",
        ),
    ),
    case(
        "B8-numbers-used-again",
        "short-lived children without end, so that process numbers come round",
        py(
            "import os\nwhile 1:\n  pid = os.fork()\n  if pid == 0: os._exit(0)\n  os.waitpid(pid, 0)",
            TIMEOUT,
            timeout=1,
        ),
    ),
    case(
        "B19-at-exit",
        "exit handlers that fork and sleep, in the interpreter and in a child",
        py("import atexit, os, sys, time\natexit.register(lambda: (os.fork(), time.sleep(1000)))\nsys.exit(0)"),
        py(
            "import subprocess; subprocess.run(['python3', '-c', 'import atexit, time; atexit.register(time.sleep, 1000)'])",
            TIMEOUT,
            timeout=1,
        ),
    ),
    case(
        "B21-loops-of-events",
        "an event loop left running, and asyncio.run inside asyncio.run",
        py(
            "import asyncio, threading\nloop = asyncio.new_event_loop(); threading.Thread(target=loop.run_forever, daemon=True).start()\nasync def f(): return 7\nasyncio.run_coroutine_threadsafe(f(), loop).result()",
            shows="7",
        ),
        py("asyncio.run(f())", shows="7"),
        py("async def g(): return asyncio.run(f())\nasyncio.run(g())", ERROR, shows="running event loop"),
    ),
    case(
        "B26-much-input",
        "50 MB through the stdin of a child, and the stdin of a shell",
        py(
            "import subprocess; print(subprocess.run(['wc', '-c'], input=bytes(50 << 20), capture_output=True).stdout)",
            shows="52428800",
        ),
        bash("wc -c", shows="0"),
    ),
    case(
        "B27-client-goes-away",
        "goes on, with a child, when nobody waits for it any more",
        Cancel(
            Turn("python", {"code": "import subprocess, time\nsubprocess.Popen(['sleep', '1000']); time.sleep(1000)"})
        ),
    ),
    case(
        "B2-every-signal",
        "every signal to all that there is, and to what runs it, thousands of times",
        py(
            "import ctypes, os, time\nlibc = ctypes.CDLL(None); libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]\nend = time.monotonic() + .5\nwhile time.monotonic() < end:\n  for n in (*range(1, 32), *range(34, 65)):\n    for pid in {1, os.getppid()}:\n      libc.sigqueue(pid, n, 5)\n      try: os.kill(pid, n)\n      except OSError: pass\nprint('here')",
            shows="here",
        ),
        py("1", shows="1", restarted=False),
    ),
    case(
        "B9-stopped-children",
        "children that have stopped, a first thread that has ended, a child that waits in vfork",
        py(
            "import os, signal, time\nfor i in range(20):\n  if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)",
            TIMEOUT,
            timeout=0.5,
        ),
        py(
            "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nctypes.CDLL(None).syscall(60 if __import__('os').uname().machine == 'x86_64' else 93, 0)",
            TIMEOUT,
            timeout=0.5,
        ),
        py(
            "import ctypes, os, time\nif os.fork() == 0: ctypes.CDLL(None).vfork() or time.sleep(60)\ntime.sleep(60)",
            TIMEOUT,
            timeout=0.5,
        ),
        py("1", shows="1", restarted=True),
    ),
    case(
        "B10-kill-in-mid-fork",
        "twenty times: forks and execs as fast as they can, killed in the middle",
        *(
            py(
                "import os\nwhile 1:\n  try:\n    if os.fork() == 0 and @EXEC@: os.execv('/bin/sh', ['sh', '-c', 'while :; do (sleep 5 &); done'])\n  except OSError: pass".replace(
                    "@EXEC@", str(turn % 2)
                ),
                TIMEOUT,
                MEMORY,
                timeout=0.08 + 0.01 * (turn % 5),
            )
            for turn in range(20)
        ),
        py("1", shows="1", restarted=True),
    ),
    case(
        "B12-odd-ends",
        "dies of SIGBUS in a file cut short, of SIGXFSZ, of a trap",
        py(
            "import mmap\nf = open('m', 'w+b'); f.truncate(1 << 20); m = mmap.mmap(f.fileno(), 1 << 20); f.truncate(0)\nm[5]",
            SIGNALED,
            signal=7,
        ),
        py(
            "import os, signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL); os.write(os.open('f', os.O_CREAT | os.O_WRONLY), bytes(9 << 20)); os.truncate('f', 9 << 20)",
            SIGNALED,
            signal=25,
        ),
        py("import os; os.kill(os.getpid(), 5)", SIGNALED, signal=5),
        py("1", shows="1", restarted=True),
    ),
)
