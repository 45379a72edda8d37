# ruff: noqa: E501 - programs are data
"""A: memory, processes, files, output, time."""

from __future__ import annotations

from tool_service.sandbox.base import Tier, Turn
from tool_service.sandbox.hostile.case import (
    ERROR,
    FLOOD,
    LOST,
    MEMORY,
    OK,
    PROCESS,
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
        bash(":(){ :|:& };:"),
        Wait(2),
        py("import subprocess; subprocess.run(['true']).returncode", shows="0\n"),
        bash(":(){ :|:& };:; sleep 1"),
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
        "A6-slow-growth",
        "memory, page by page",
        py("a = []\nwhile 1: a.append(bytearray(4096))", MEMORY),
        py("1", shows="1"),
    ),
    case(
        "A6-one-big",
        "one allocation far past the limit",
        py("bytearray(10**9)", MEMORY, restarted=False),
        py("1", shows="1", restarted=False),
    ),
    case(
        "A6-shared-mapping",
        "a shared mapping past the limit",
        py(
            "import mmap, time\nm = mmap.mmap(-1, 400 << 20)\nfor i in range(0, 400 << 20, 4096): m[i] = 1\ntime.sleep(1)",
            MEMORY,
        ),
    ),
    case(
        "A6-between-turns",
        "memory that grows after its turn is over",
        py(
            "import threading, time\ndef grow():\n  time.sleep(.3); global a; a = bytearray(150 << 20); global b; b = bytearray(150 << 20)\nthreading.Thread(target=grow).start()"
        ),
        py("time.sleep(1)", OK, MEMORY, ERROR),
    ),
    case(
        "A6-shared-and-out-of-sight",
        "shared memory whose pages nobody has mapped any more: filled by children that end, or given back",
        py(
            "import mmap, os, time\nm = mmap.mmap(-1, 400 << 20)\nfor i in range(0, 400 << 20, 20 << 20):\n  if os.fork() == 0: m[i : i + (20 << 20)] = bytes(20 << 20); os._exit(0)\n  os.wait()\ntime.sleep(1)",
            MEMORY,
        ),
        py(
            "import mmap, time\nm = mmap.mmap(-1, 400 << 20)\nfor i in range(0, 400 << 20, 20 << 20): m[i : i + (20 << 20)] = bytes(20 << 20); m.madvise(mmap.MADV_DONTNEED, i, 20 << 20)\ntime.sleep(1)",
            MEMORY,
        ),
        py("1", shows="1", restarted=True),
    ),
    case(
        "A7-first-threads-gone",
        "twenty children with 30 MiB each whose first thread has ended",
        py(
            "import ctypes, os, threading, time\ndef hold(): time.sleep(.1); b = bytearray(30 << 20); time.sleep(60)\nfor i in range(10):\n  if os.fork() == 0: threading.Thread(target=hold).start(); ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)\ntime.sleep(60)",
            MEMORY,
            timeout=10,
        ),
    ),
    case(
        "A7-after-its-turn",
        "children that wait for their turn to be over, and grow one after another",
        py(
            "import os, time\nfor i in range(20):\n  if os.fork() == 0: time.sleep(1.2 + i / 20); b = bytearray(30 << 20); os.write(os.open('grown', os.O_CREAT | os.O_APPEND | os.O_WRONLY), b'x'); time.sleep(60); os._exit(0)"
        ),
        Wait(4),
        py("import os; os.path.getsize('grown') < 14", shows="True", restarted=True),
        backends=(PROCESS,),  # in a container its cgroup holds them
    ),
    case(
        "A7-lent-memory",
        "a large program that starts others all the time, which run in its memory until they have begun",
        py(
            "import subprocess, time\na = bytearray(110 << 20); end = time.monotonic() + 3\nwhile time.monotonic() < end: subprocess.run(['true'])",
            OK,
        ),
    ),
    case(
        "A7-many-children",
        "twenty children with 30 MiB each",
        py(
            "import os, time\nfor i in range(20):\n  if os.fork() == 0:\n    b = bytearray(30 << 20); time.sleep(60)\ntime.sleep(60)",
            MEMORY,
            timeout=10,
        ),
    ),
    case(
        "A8-recursion",
        "recursion with the limit raised",
        py(
            "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
            MEMORY,
            SIGNALED,
            ERROR,
            TIMEOUT,
            timeout=5,
        ),
    ),
    case(
        "A9-c-stack",
        "repr of a list nested a million deep",
        py(
            "import sys; sys.setrecursionlimit(10**9)\na = []\nfor i in range(10**6): a = [a]\nrepr(a)",
            SIGNALED,
            signal=11,
        ),
        py("1", shows="1", restarted=True),
    ),
    case(
        "A10-workspace-fill",
        "files until the workspace is full",
        py("import os\nfor i in range(9): open(f'f{i}', 'wb').write(b'x' * (4 << 20))", ERROR, shows="No space left"),
        tier=Tier.ISOLATED,
    ),
    case(
        "A10-files-in-memory",
        "files of the workspace that are mapped into a large program: they count once",
        py(
            "import mmap, time\na = bytearray(161 << 20); kept = []\nfor name, size in (('f', 7 << 20), ('/tmp/g', 3 << 20)):\n  f = open(name, 'w+b'); f.truncate(size); kept.append(mmap.mmap(f.fileno(), size)); kept[-1][:] = bytes(size)\ntime.sleep(.3)"
        ),
        tier=Tier.ISOLATED,
    ),
    case(
        "A10-shm-fill",
        "files until /dev/shm is full",
        py(
            "import os\nfor i in range(9): open(f'/dev/shm/f{i}', 'wb').write(b'x' * (4 << 20))",
            ERROR,
            shows="No space left",
        ),
        tier=Tier.ISOLATED,
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
        "A27-pipe-buffers",
        "pipes filled to their brim",
        py(
            "import os, fcntl\nkept = []\ntry:\n  while 1:\n    r, w = os.pipe(); kept.append(r); os.set_blocking(w, False)\n    try: fcntl.fcntl(w, 1031, 1 << 20)\n    except OSError: pass\n    try:\n      while 1: os.write(w, bytes(65536))\n    except BlockingIOError: pass\nexcept OSError as error: print(error.errno)",
            shows="24",
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
        "A6-deleted-files",
        "memory behind files that have no name any more, or never had one",
        py(
            "import os\nkept = []\ntry:\n  for i in range(60):\n    fd = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600) if i % 2 else os.open('d', os.O_RDWR | os.O_CREAT)\n    if not i % 2: os.unlink('d')\n    kept.append(fd); os.write(fd, bytes(4 << 20))\nexcept OSError as error: print(error)",
            shows="No space left",
        ),
        py("1", shows="1"),
        tier=Tier.ISOLATED,
    ),
    case(
        "A7-memory-behind-names",
        "children that hide their sizes, behind odd names and closed /proc entries",
        py(
            "import ctypes, os, time\nlibc = ctypes.CDLL(None); libc.prctl(15, b') 1 1 1 (')\nfor i in range(4):\n  if os.fork() == 0:\n    libc.prctl(4, 0); b = bytearray(60 << 20); time.sleep(60)\ntime.sleep(60)",
            MEMORY,
            timeout=10,
        ),
    ),
    case(
        "A7-two-runtimes",
        "memory of the interpreter and of the shell, which count together",
        py("x = bytearray(110 << 20)"),
        bash("x=$(head -c 90000000 /dev/zero | tr '\\0' x); echo ${#x}; sleep 5", MEMORY),
        py("x", ERROR, shows="NameError"),
    ),
    case(
        "A7-at-once-in-two-runtimes",
        "memory of the shell, so fast that in a container the kernel chooses whom to kill for it",
        py("x = bytearray(140 << 20)"),
        bash("printf -v x '%0150000000d' 1; echo ${#x}; sleep 5", MEMORY),
        py("x", ERROR, shows="NameError"),
    ),
    case(
        "A9-source",
        "a __repr__ that calls itself, with the limit raised",
        py(
            "import sys; sys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(s): return repr(s)\nA()",
            SIGNALED,
            MEMORY,
        ),
        py("1", shows="1", restarted=True),
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
        "A27-mappings",
        "30,000 mappings in each of 30 processes, which make looking at memory slow",
        py(
            "import ctypes, os, time\nlibc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p; libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]; libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]\nb = libc.mmap(None, 1 << 29, 0, 0x22, -1, 0); x = bytearray(12 << 20)\nfor i in range(0, 1 << 29, 8192):\n  if libc.mprotect(b + i, 4096, 1) != 0: break\ntry:\n  while 1:\n    if os.fork() == 0: time.sleep(60)\nexcept OSError: time.sleep(60)",
            TIMEOUT,
            MEMORY,
            timeout=2,
        ),
        py("1", OK, LOST),
    ),
    case(
        "A27-socket-buffers",
        "socket pairs filled to their brim, with buffers as large as they get",
        py(
            "import socket\nkept = []\ntry:\n  while 1:\n    for one in (pair := socket.socketpair(type=socket.SOCK_DGRAM)):\n      one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30); one.setblocking(False)\n      try:\n        while 1: one.send(bytes(60000))\n      except BlockingIOError: pass\n    kept.append(pair)\nexcept OSError as error: print(error.errno)",
            OK,
            MEMORY,
        ),
        py("1", shows="1"),
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
