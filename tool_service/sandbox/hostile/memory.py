# ruff: noqa: E501 - programs are data
"""A: memory, of whatever kind."""

from __future__ import annotations

from tool_service.sandbox.base import Tier
from tool_service.sandbox.hostile.case import (
    ERROR,
    LOST,
    MEMORY,
    OK,
    PROCESS,
    SIGNALED,
    TIMEOUT,
    Case,
    Wait,
    bash,
    case,
    py,
)

CASES: tuple[Case, ...] = (
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
        "A27-pipe-buffers",
        "pipes filled to their brim",
        py(
            "import os, fcntl\nkept = []\ntry:\n  while 1:\n    r, w = os.pipe(); kept.append(r); os.set_blocking(w, False)\n    try: fcntl.fcntl(w, 1031, 1 << 20)\n    except OSError: pass\n    try:\n      while 1: os.write(w, bytes(65536))\n    except BlockingIOError: pass\nexcept OSError as error: print(error.errno)",
            shows="24",
        ),
        py("1", shows="1"),
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
)
