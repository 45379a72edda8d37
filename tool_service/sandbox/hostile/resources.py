# ruff: noqa: E501 - programs are data
"""A: processes, files, output, time."""

from __future__ import annotations

from tool_service.sandbox.base import Tier, Turn
from tool_service.sandbox.hostile.case import (
    ERROR,
    FLOOD,
    LOST,
    MEMORY,
    OK,
    SIGNALED,
    TIMEOUT,
    Case,
    Run,
    Wait,
    bash,
    case,
    py,
)
from tool_service.sandbox.hostile.programs import CALLS, SYSCALL, TRY

CASES: tuple[Case, ...] = (
    case(
        "A1-fork-bomb-shell",
        "the shell's fork bomb",
        py("import subprocess; subprocess.run(['bash', '-c', ':(){ :|:& };:'])", OK, TIMEOUT, MEMORY, timeout=1),
    ),
    case(
        "A1-fork-bomb-after-its-turn",
        "the shell's fork bomb, which goes on when its turn is over",
        # What a job says later would stand in another call. The shell itself starts but one process: where it cannot, it
        # tries for 15 s, as those of the bomb do, after 1 s, 3 s and 7 s; so the bomb is full and at rest in between.
        bash(":(){ :|:& }; (:) 2>/dev/null &"),
        Wait(2),
        py("import subprocess; subprocess.run(['true']).returncode", shows="0\n"),
        bash("exec 9<> <(true); :(){ :|:& }; (:) 2>/dev/null & read -t 1.5 -u 9; true"),
        py("import subprocess; subprocess.run(['true']).returncode", shows="0\n"),
    ),
    case(
        "A2-fork-bomb",
        "forks for ever",
        py(
            "import os\nwhile 1:\n  try: os.fork()\n  except OSError: pass", TIMEOUT, MEMORY, LOST, OK, ERROR, timeout=1
        ),
    ),
    case(
        "A3-chain",
        "a chain in which each process forks the next and dies",
        py("import os\nwhile 1:\n  if os.fork(): os._exit(0)", LOST, TIMEOUT, timeout=1),
    ),
    case(
        "A4-thread-bomb",
        "a thousand threads",
        py(
            "import threading, time\nfor i in range(1000): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            ERROR,
            MEMORY,
            shows="start new thread",
        ),
    ),
    case(
        "A12-one-big-file",
        "one file past the limit",
        py("open('f', 'wb').write(b'x' * (9 << 20))", ERROR, shows="File too large"),
    ),
    case(
        "A13-inodes",
        "a million empty files",
        py("for i in range(10**6): open(f'f{i}', 'wb').close()", ERROR, shows="No space left"),
        tier=Tier.ISOLATED,
    ),
    case("A14-sparse", "a sparse file of 1 TB", py("open('f', 'wb').truncate(1 << 40)", ERROR, shows="File too large")),
    case("A15-flood", "endless stdout", py("while 1: print('x' * 10**6)", FLOOD)),
    case(
        "A16-stderr-flood",
        "endless stderr after a word on stdout",
        py("import sys\nprint('kept')\nwhile 1: sys.stderr.write('y' * 10**6)", FLOOD, shows="kept"),
    ),
    case(
        "A15-packets",
        "output in packets, which are read one at a time",
        py(
            "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)\nfor i in range(9): os.write(1, b'line %d\\n' % i)",
            shows="line 8",
        ),
        py("print('next')", shows="next", hides="line"),
    ),
    case(
        "A15-interrupted",
        "output into a small pipe, which signals interrupt all the time",
        py(
            "import fcntl, signal\nfcntl.fcntl(1, 1031, 4096); signal.signal(14, lambda *a: None); signal.setitimer(0, .001, .001)\nprint('x' * 40_000 + 'end')\nsignal.setitimer(0, 0)",
            shows="end",
        ),
    ),
    case("A18-long-line", "one line of 2 MB", py("print('x' * 2_000_000)", OK)),
    case(
        "A19-tiny-writes", "50,000 writes of one byte", py("import os\nfor i in range(50_000): os.write(1, b'.')", OK)
    ),
    case(
        "A20-partial-output",
        "output, then sleep past the deadline",
        py("print('before', end='')\nimport time; time.sleep(60)", TIMEOUT, shows="before", timeout=2.0),
    ),
    case(
        "A22-busy-loop",
        "a loop of bytecode",
        py("while 1: pass", TIMEOUT, timeout=0.5),
        py("1", shows="1", restarted=True),
    ),
    case(
        "A22-c-loop",
        "a loop inside C code, which no signal handler interrupts",
        py("from itertools import repeat; any(repeat(0))", TIMEOUT, timeout=0.5),
    ),
    case(
        "A22-by-short-lived-children",
        "CPU time of children that each end before anybody looks",
        Run(
            Turn(
                "python",
                {
                    "code": "import os, time\nwhile 1:\n  if os.fork() == 0:\n    end = time.process_time() + .02\n    while time.process_time() < end: pass\n    os._exit(0)\n  os.wait()\n  if sum(os.times()[2:4]) > 1.7: print('twice as much'); time.sleep(60)"
                },
                30.0,
                cpu_seconds=1.0,
            ),
            (TIMEOUT,),
            shows=("1 s of CPU time",),
            hides=("twice",),
        ),
        py("1", shows="1", restarted=True),
    ),
    case(
        "A24-regex",
        "a catastrophic regular expression",
        py("import re; re.match('(a+)+$', 'a' * 64 + 'b')", TIMEOUT, timeout=0.5),
    ),
    case("A24-power", "3 to the power of 10^8", py("3 ** 10**8", TIMEOUT, ERROR, timeout=0.5)),
    case("A25-sleep", "sleep for 30 years", py("import time; time.sleep(1e9)", TIMEOUT, timeout=0.5)),
    case("A25-select", "select() for ever", py("import select; select.select([], [], [])", TIMEOUT, timeout=0.5)),
    case(
        "A26-descriptors",
        "descriptors until there are no more",
        py("import os\nf = []\nwhile 1: f.append(os.dup(0))", ERROR, shows="Too many open files"),
        py("1", shows="1"),
    ),
    case(
        "A26-kernel-objects",
        "eventfds, epolls and pipes until there are no more",
        py(
            "import os, select, signal\nfor make in (os.eventfd, select.epoll, os.pipe):\n  kept = []\n  try:\n    while 1: kept.append(make(0) if make is os.eventfd else make())\n  except OSError as error: print(error.errno)\n  for one in kept:\n    for fd in one if isinstance(one, tuple) else (one,): os.close(fd) if isinstance(fd, int) else fd.close()",
            shows="24\n24\n24",
        ),
        py("1", shows="1"),
    ),
    case(
        "A28-sysv-shm",
        "1 GiB of System V shared memory",
        py(SYSCALL + "call(29 if os.uname().machine == 'x86_64' else 194, 0, 1 << 30, 0o600)", shows="-1"),
    ),
    case(
        "A28-memfd",
        "a file in memory outside of every folder",
        py("import os; os.memfd_create('x')", ERROR, shows="not permitted"),
    ),
    case(
        "A28-system-v",
        "System V shared memory, semaphores and queues",
        py(
            CALLS + "print(call(29, 194, 0, 4096, 0o1600), call(64, 190, 0, 1, 0o1600), call(68, 186, 0, 0o1600))",
            shows="EPERM EPERM EPERM",
        ),
    ),
    case("A28-message-queue", "a POSIX message queue", py(CALLS + "call(240, 180, b'q', 0o102, 0o600, 0)", shows="E")),
    case(
        "A30-core",
        "abort, and a look for a core file",
        py("import os; os.abort()", SIGNALED, signal=6),
        py("import os; os.listdir()", shows="[]"),
    ),
    case("A31-nice", "a higher priority", py("import os; os.nice(-20)", ERROR, shows="not permitted")),
    case(
        "A31-scheduling",
        "real-time and I/O priorities",
        py(
            CALLS
            + TRY
            + "attempt('fifo', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))\nattempt('nice', lambda: os.nice(-5))\nprint(call(251, 30, 1, 0, 1 << 13), call(314, 274, 0, 0, 0))",
            shows="EPERM EPERM",
            hides="DONE",
        ),
    ),
    case(
        "A33-zombies",
        "ten thousand children that nobody waits for",
        py(
            "import os\nfor i in range(10**4):\n  if os.fork() == 0: os._exit(0)",
            ERROR,
            shows="temporarily unavailable",
        ),
    ),
    case(
        "A34-keys",
        "keys in the kernel's keyring",
        py(CALLS + "call(248, 217, b'user', b'k', b'v', 1, -3), call(250, 219, 0, -3, 1)", shows="('EPERM', 'EPERM')"),
    ),
    case(
        "A36-asynchronous-io",
        "slots of asynchronous I/O",
        py(CALLS + "call(206, 0, 100000, ctypes.byref(ctypes.c_ulong()))", shows="ENOSYS"),
    ),
    case(
        "A36-timers",
        "timers until there are no more",
        py(
            SYSCALL
            + "import ctypes\nt = ctypes.c_int()\nn = 0\nwhile libc.timer_create(0, None, ctypes.byref(t)) == 0: n += 1\nn < 10**5",
            shows="True",
        ),
    ),
    case(
        "A21-bombs",
        "archives that grow a thousandfold, into a file and into memory",
        py(
            "import gzip, shutil\nopen('b.gz', 'wb').write(gzip.compress(bytes(32 << 20), 1))\nwith gzip.open('b.gz') as a, open('out', 'wb') as b: shutil.copyfileobj(a, b)",
            ERROR,
            shows="File too large",
        ),
        py("gzip.decompress(gzip.compress(bytes(16 << 20), 1) * 40)", MEMORY),
    ),
    case(
        "A32-a-worker-per-processor",
        "a pool of as many processes as there seem to be processors",
        py(
            "import multiprocessing as m, os\ntry:\n  with m.Pool(os.cpu_count()) as p: print(p.map(abs, [-1]))\nexcept OSError as error: print('in band', error)",
            OK,
            ERROR,
        ),
        tier=Tier.ISOLATED,
    ),
    case(
        "A37-storm-of-writes",
        "four loops that write files as fast as they can",
        bash(
            "for i in 1 2 3 4; do (while :; do dd if=/dev/zero of=f$i bs=1M count=3 2>/dev/null; done) & done; wait",
            TIMEOUT,
            timeout=1.5,
        ),
    ),
    case(
        "A14-holes",
        "fallocate past the limit, and a file punched and filled again a thousand times",
        py(
            "import ctypes, os\nlibc = ctypes.CDLL(None); fd = os.open('f', os.O_RDWR | os.O_CREAT)\nfor n in (9 << 20, 1 << 40, 1 << 62):\n  try: os.posix_fallocate(fd, 0, n); print('MADE', n)\n  except OSError as error: print(error.errno)\nos.ftruncate(fd, 8 << 20)\nfor i in range(1000): libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4 << 20))\nprint('blocks', os.fstat(fd).st_blocks)",
            shows="27",
            hides="MADE",
        ),
    ),
    case(
        "A24-numbers",
        "integers and texts of 10^9 digits",
        *(py(text, MEMORY) for text in ("(1,) * 10**9", "'a' * 10**9", "1 << 10**10")),
        py("1 << 10**8", ERROR, shows="limit"),
        py("import sys; sys.set_int_max_str_digits(0); 10**1_000_000", TIMEOUT, timeout=0.5),
        py("9**9**9", TIMEOUT, timeout=0.5),
    ),
    case(
        "A26-passed-descriptors",
        "sockets that hold themselves and each other in flight",
        py(
            "import array, socket\nn = 0\ntry:\n  while n < 20000:\n    a, b = socket.socketpair(); fds = array.array('i', [a.fileno(), b.fileno()])\n    for one in (a, b): one.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])\n    a.close(); b.close(); n += 1\nexcept OSError as error: print(error)\nprint(n < 20000)",
            shows="True",
        ),
        py("1", shows="1"),
    ),
    case(
        "A26-nested-epolls",
        "epolls within epolls, and instances of everything that is a descriptor",
        py(
            "import ctypes, os, select\ne = [select.epoll() for i in range(40)]\ntry:\n  for a, b in zip(e, e[1:]): a.register(b, select.EPOLLIN)\nexcept OSError as error: print(error.errno)\nfor one in e: one.close()\nlibc = ctypes.CDLL(None); mask = (ctypes.c_ulong * 16)()\nfor make in (lambda: libc.eventfd(0, 0), lambda: libc.timerfd_create(1, 0), lambda: libc.signalfd(-1, mask, 0), lambda: libc.syscall(434, os.getpid(), 0)):\n  kept = []\n  while (fd := make()) >= 0: kept.append(fd)\n  print(len(kept) < 64)\n  for fd in kept: os.close(fd)",
            shows="40\nTrue\nTrue\nTrue\nTrue\n",
        ),
    ),
    case(
        "A31-processors",
        "puts its supervisor and itself on one processor, with 30 loops that print",
        py(
            "import os\nfor pid in (1, os.getppid(), 0):\n  try: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})\n  except OSError: pass\ntry:\n  while os.fork(): pass\nexcept OSError: pass\nwhile 1: os.write(1, b'x')",
            TIMEOUT,
            FLOOD,
            timeout=1,
        ),
        py("1", shows="1", restarted=True),
    ),
)
