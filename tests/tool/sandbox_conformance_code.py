# ruff: noqa: E501 - programs are data
"""Conformance cases of the `python` runtime."""

from sandbox_conformance import ERROR, FLOOD, LOST, MEMORY, OK, SIGNALED, TIMEOUT, Case, case, py

from tool_service.sandbox.base import Tier

_SYSCALL = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\ndef call(*a):\n  r = libc.syscall(*a); return r, os.strerror(ctypes.get_errno())\n"

CASES: tuple[Case, ...] = (
    # Sessions
    case("state-persists", py("x = 40"), py("x + 2", shows="42"), py("_", shows="42")),
    case("last-expression", py("1\n2", shows="2", hides="1\n"), py("None", hides="None"), py("x = 3", hides="3")),
    case("traceback", py("def f():\n    return 1 / 0\nf()", ERROR, shows="in f\n    return 1 / 0", hides="worker")),
    case("syntax-error", py("x = = 1", ERROR, shows="SyntaxError"), py("1", shows="1")),
    case("exit", py("x = 1; import sys; sys.exit(0)"), py("sys.exit(3)", ERROR), py("x", shows="1")),
    case("B25-input", py("input()", ERROR, shows="EOFError")),
    case("subprocess", py("import subprocess; subprocess.run(['echo', 'hi'])", shows="hi")),
    case("asyncio", py("import asyncio\nasync def f(): return 7\nasyncio.run(f())", shows="7")),
    case(
        "threads",
        py("import threading; t = threading.Thread(target=print, args=('t',)); t.start(); t.join()", shows="t"),
    ),
    case(
        "multiprocessing", py("import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1]))", shows="[1]")
    ),
    case(
        "C15-empty",
        py(""),
        py("# only a comment"),
        py("\ufeffprint('bom')", shows="bom"),
        py("if 1:\r\n\tprint('crlf')\r\n", shows="crlf"),
    ),
    case("C15-large-source", py("'''" + "x" * 1_000_000 + "'''\nprint('big')", shows="big")),
    case("C10-nul-in-code", py("print(1)\0", ERROR), py("print('\\0')", shows="\0")),
    case("C9-surrogates", py("print('\\ud800')", shows="\\ud800"), py("'\ud800'", OK, ERROR)),
    case("C9-raw-bytes", py("import os; os.write(1, b'\\xff\\xfe')", shows="2")),
    case(
        "C21-large-argument", py("import subprocess\nsubprocess.run(['true', 'x' * 200_000])", ERROR, shows="too long")
    ),
    # A: resources
    case("A1-fork-bomb-shell", py("import os; os.system(':(){ :|:& };:')", OK, TIMEOUT, MEMORY, timeout=1)),
    case(
        "A2-fork-bomb",
        py(
            "import os\nwhile 1:\n  try: os.fork()\n  except OSError: pass", TIMEOUT, MEMORY, LOST, OK, ERROR, timeout=1
        ),
    ),
    case("A3-chain", py("import os\nwhile 1:\n  if os.fork(): os._exit(0)", LOST, TIMEOUT, timeout=1)),
    case(
        "A4-thread-bomb",
        py(
            "import threading, time\nfor i in range(1000): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            ERROR,
            MEMORY,
            shows="start new thread",
        ),
    ),
    case("A6-slow-growth", py("a = []\nwhile 1: a.append(bytearray(4096))", MEMORY), py("1", shows="1")),
    case("A6-one-big", py("bytearray(10**9)", MEMORY, restarted=False), py("1", shows="1", restarted=False)),
    case(
        "A7-many-children",
        py(
            "import os, time\nfor i in range(20):\n  if os.fork() == 0:\n    b = bytearray(30 << 20); time.sleep(60)\ntime.sleep(60)",
            MEMORY,
            timeout=10,
        ),
    ),
    case(
        "A6-shared-mapping",
        py(
            "import mmap, time\nm = mmap.mmap(-1, 400 << 20)\nfor i in range(0, 400 << 20, 4096): m[i] = 1\ntime.sleep(1)",
            MEMORY,
        ),
    ),
    case(
        "A6-between-turns",
        py(
            "import threading, time\ndef grow():\n  time.sleep(.3); global a; a = bytearray(150 << 20); global b; b = bytearray(150 << 20)\nthreading.Thread(target=grow).start()"
        ),
        py("time.sleep(1)", OK, MEMORY, ERROR),
    ),
    case(
        "A8-recursion",
        py("import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", MEMORY, SIGNALED, ERROR, TIMEOUT),
    ),
    case(
        "A9-c-stack",
        py(
            "import sys; sys.setrecursionlimit(10**9)\na = []\nfor i in range(10**6): a = [a]\nrepr(a)",
            SIGNALED,
            signal=11,
        ),
        py("1", shows="1", restarted=True),
    ),
    case(
        "A10-workspace-fill",
        py("import os\nfor i in range(9): open(f'f{i}', 'wb').write(b'x' * (4 << 20))", ERROR, shows="No space left"),
        tier=Tier.ISOLATED,
    ),
    case(
        "A10-shm-fill",
        py(
            "import os\nfor i in range(9): open(f'/dev/shm/f{i}', 'wb').write(b'x' * (4 << 20))",
            ERROR,
            shows="No space left",
        ),
        tier=Tier.ISOLATED,
    ),
    case("A12-one-big-file", py("open('f', 'wb').write(b'x' * (9 << 20))", ERROR, shows="File too large")),
    case(
        "A13-inodes",
        py("for i in range(10**6): open(f'f{i}', 'wb').close()", ERROR, shows="No space left"),
        tier=Tier.ISOLATED,
    ),
    case("A14-sparse", py("open('f', 'wb').truncate(1 << 40)", ERROR, shows="File too large")),
    case("A15-flood", py("while 1: print('x' * 10**6)", FLOOD)),
    case(
        "A16-stderr-flood", py("import sys\nprint('kept')\nwhile 1: sys.stderr.write('y' * 10**6)", FLOOD, shows="kept")
    ),
    case("A18-long-line", py("print('x' * 2_000_000)", OK)),
    case("A19-tiny-writes", py("import os\nfor i in range(50_000): os.write(1, b'.')", OK)),
    case(
        "A20-partial-output",
        py("print('before', end='')\nimport time; time.sleep(60)", TIMEOUT, shows="before", timeout=0.5),
    ),
    case("A22-busy-loop", py("while 1: pass", TIMEOUT, timeout=0.5), py("1", shows="1", restarted=True)),
    case("A22-c-loop", py("from itertools import repeat; any(repeat(0))", TIMEOUT, timeout=0.5)),
    case("A24-regex", py("import re; re.match('(a+)+$', 'a' * 64 + 'b')", TIMEOUT, timeout=0.5)),
    case("A24-power", py("3 ** 10**8", TIMEOUT, ERROR, timeout=0.5)),
    case("A25-sleep", py("import time; time.sleep(1e9)", TIMEOUT, timeout=0.5)),
    case("A25-select", py("import select; select.select([], [], [])", TIMEOUT, timeout=0.5)),
    case(
        "A26-descriptors",
        py("import os\nf = []\nwhile 1: f.append(os.dup(0))", ERROR, shows="Too many open files"),
        py("1", shows="1"),
    ),
    case(
        "A28-sysv-shm",
        py(_SYSCALL + "call(29 if os.uname().machine == 'x86_64' else 194, 0, 1 << 30, 0o600)", shows="-1"),
    ),
    case("A28-memfd", py("import os; os.memfd_create('x')", ERROR, shows="not permitted")),
    case("A30-core", py("import os; os.abort()", SIGNALED, signal=6), py("import os; os.listdir()", shows="[]")),
    case("A31-nice", py("import os; os.nice(-20)", ERROR, shows="not permitted")),
    case(
        "A33-zombies",
        py(
            "import os\nfor i in range(10**4):\n  if os.fork() == 0: os._exit(0)",
            ERROR,
            shows="temporarily unavailable",
        ),
    ),
    case(
        "A36-timers",
        py(
            _SYSCALL
            + "import ctypes\nt = ctypes.c_int()\nn = 0\nwhile libc.timer_create(0, None, ctypes.byref(t)) == 0: n += 1\nn < 10**5",
            shows="True",
        ),
    ),
    # B: processes and signals
    case(
        "B1-ignores-signals",
        py("import signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nwhile 1: pass", TIMEOUT, timeout=0.5),
    ),
    case("B2-kill-all", py("import os; os.kill(-1, 9)", OK, SIGNALED, ERROR, LOST)),
    case("B2-kill-group", py("import os; os.killpg(0, 9)", SIGNALED, signal=9)),
    case(
        "B3-kill-parent",
        py("import os, time; os.kill(os.getppid(), 9); time.sleep(.2)", OK, ERROR, LOST),
        py("1", OK, LOST),
    ),
    case(
        "B3-signal-parent",
        py(
            "import os, time\nfor s in range(1, 65):\n  try: os.kill(1 if os.getppid() == 1 else os.getppid(), s)\n  except OSError: pass\ntime.sleep(.2)\nprint('still here')",
            shows="still here",
        ),
        py("1", shows="1", restarted=False),
        tier=Tier.ISOLATED,
    ),
    case(
        "B4-daemon",
        py(
            "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)\n  os._exit(0)\nprint('parent')",
            shows="parent",
        ),
    ),
    case("B9-stop", py("import os; os.kill(0, 19)", TIMEOUT, timeout=0.5), py("1", shows="1")),
    case(
        "B10-fork-race",
        py("import os\nwhile 1:\n  try:\n    if os.fork(): os._exit(0)\n  except OSError: pass", LOST, timeout=1),
    ),
    case("B12-segfault", py("import ctypes; ctypes.string_at(0)", SIGNALED, signal=11), py("1", shows="1")),
    case("B12-exit", py("import os; os._exit(7)", LOST), py("1", shows="1", restarted=True)),
    case(
        "B13-exec",
        py("import os; os.execv('/bin/sh', ['sh', '-c', 'echo shell; exit 5'])", LOST, shows="shell"),
        py("1", shows="1"),
    ),
    case(
        "B13-exec-loop", py("import os; os.execv('/bin/sh', ['sh', '-c', 'while :; do :; done'])", TIMEOUT, timeout=0.5)
    ),
    case("B14-close-all", py("import os; os.closerange(0, 256)", LOST), py("1", shows="1")),
    case("B14-close-output", py("import os; os.close(1); os.close(2); print('x')", OK, ERROR), py("2", OK, ERROR)),
    case(
        "B15-garbage-on-every-fd",
        py("import os\nfor fd in range(256):\n  try: os.write(fd, b'A' * 64)\n  except OSError: pass", LOST),
        py("1", shows="1"),
    ),
    case(
        "B15-forged-answer",
        py("import os, struct, time\nos.write(21, struct.pack('=IIBi', 0, 1, 0, -1)); time.sleep(.3)", OK),
        py("2", LOST, OK),
        py("3", shows="3"),
    ),
    case(
        "B15-forged-huge",
        py("import os, struct, time\nos.write(21, struct.pack('=IIBi', 2**31, 1, 0, -1)); time.sleep(5)", LOST),
        py("1", shows="1"),
    ),
    case(
        "B15-forged-value",
        py("import os, struct, time\nos.write(21, struct.pack('=IIBi', 3, 1, 0, -1) + b'{]x'); time.sleep(5)", LOST),
    ),
    case(
        "B15-deep-value",
        py(
            "import os, struct, time\nb = b'[' * 60000\nos.write(21, struct.pack('=IIBi', len(b), 1, 0, -1) + b); time.sleep(5)",
            LOST,
        ),
    ),
    case(
        "B15-descriptors",
        py("import os; print(sorted({*map(int, os.listdir('/proc/self/fd'))} - {3}))", shows="[0, 1, 2, 20, 21]"),
    ),
    case(
        "B16-ptrace",
        py(_SYSCALL + "call(101 if os.uname().machine == 'x86_64' else 117, 16, 1, 0, 0)", shows="not permitted"),
    ),
    case(
        "B18-late-print",
        py("import threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), print('late'))).start()"),
        py("time.sleep(.4)", shows="late"),
    ),
    case(
        "B20-traps",
        py(
            "import signal, sys\ndef boom(*a): raise RuntimeError('trap')\nsignal.signal(14, boom); signal.setitimer(signal.ITIMER_REAL, .01, .01)",
            OK,
            ERROR,
        ),
        py("import time\nwhile 1: time.sleep(1)", ERROR, shows="RuntimeError"),
        py("signal.setitimer(signal.ITIMER_REAL, 0)", OK, ERROR),
    ),
    case(
        "B20-settrace",
        py("import sys\ndef t(*a): raise ValueError\nsys.settrace(t)", OK, ERROR),
        py("1", OK, ERROR, TIMEOUT, timeout=1),
    ),
    case("B22-fork-returns", py("import os; pid = os.fork(); x = 1"), py("x", shows="1")),
    case(
        "B24-clone-parent",
        py(_SYSCALL + "call(56 if os.uname().machine == 'x86_64' else 220, 0x8011, 0, 0, 0, 0)", shows="not permitted"),
    ),
    # C: protocol and output
    case(
        "C1-frames-printed",
        py("import os; os.write(1, b'\\0\\0\\0\\x02\\0\\0\\0\\0{}') ", shows="{}"),
        py("1", shows="1"),
    ),
    case(
        "C3-patches",
        py(
            "import json, struct, os, sys, builtins, traceback\nfor m in (json, struct, os, traceback):\n  for n in list(vars(m)):\n    if callable(getattr(m, n)): setattr(m, n, None)"
        ),
        py("41 + 1", OK, ERROR, LOST),
        py("2", OK, ERROR, LOST),
    ),
    case(
        "C3-print",
        py("import builtins, sys; sys.stdout = None; builtins.print = None; builtins.repr = None"),
        py("5", OK, ERROR),
    ),
    case("C4-wipe", py("import sys; sys.modules.clear()"), py("1 + 1", OK, ERROR, LOST)),
    case(
        "C6-named-exception",
        py("class FinalAnswer(BaseException): pass\nraise FinalAnswer('42')", ERROR, shows="FinalAnswer: 42"),
    ),
    case("C7-repr-loops", py("class A:\n  def __repr__(s):\n    while 1: pass\nA()", TIMEOUT, timeout=0.5)),
    case("C7-repr-raises", py("class A:\n  def __repr__(s): raise KeyError(1)\nA()", ERROR, shows="KeyError")),
    case("C7-str-raises", py("class E(Exception):\n  def __str__(s): raise KeyError(1)\nraise E", ERROR)),
    case("C7-huge-repr", py("list(range(10**5))", OK)),
    case("C12-empty-lines", py("print('\\n' * 10**6)", OK)),
    # D: files
    case(
        "D8-mknod",
        py("import os, stat; os.mknod('d', 0o600 | stat.S_IFBLK, os.makedev(254, 0))", ERROR, shows="not permitted"),
    ),
    case(
        "D10-read-only",
        py(
            "import os\nfor p in ('/usr/x', '/bin/bash', '/etc/passwd', os.__file__, '/x'):\n  try: open(p, 'a'); print('WROTE', p)\n  except OSError as e: print(e.errno)",
            hides="WROTE",
        ),
    ),
    case(
        "D15-proc-root",
        py(
            "import os\nfor p in ('/proc/1/root', '/proc/1/cwd', '/proc/1/fd/3', '/proc/1/environ', '/proc/1/mem', '/proc/1/maps'):\n  try: open(p, 'rb').read(1); print('OPEN', p)\n  except OSError as e: print(p, e.errno)\n  try: print('LIST', os.listdir(p))\n  except OSError as e: pass",
            hides=("OPEN", "LIST"),
        ),
    ),
    # E: privilege
    case(
        "E1-unshare",
        py(
            _SYSCALL + "print(libc.unshare(0x10000000), libc.unshare(0x20000), os.strerror(ctypes.get_errno()))",
            shows="-1 -1 Operation not permitted",
        ),
    ),
    case(
        "E2-mount",
        py(
            _SYSCALL
            + "print(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None), libc.umount2(b'/proc', 2), call(428, -100, b'/', 0), call(430, b'tmpfs', 0), call(442, -100, b'/', 0, 0, 0))",
            shows="-1 -1 (-1, 'Operation not permitted') (-1, 'Operation not permitted') (-1, 'Operation not permitted')",
        ),
    ),
    case(
        "E3-setns",
        py(
            _SYSCALL + "print(libc.setns(os.open('/proc/self/ns/net', 0), 0), os.strerror(ctypes.get_errno()))",
            shows="-1 Operation not permitted",
        ),
    ),
    case("E4-chroot", py("import os; os.chroot('/tmp')", ERROR, shows="not permitted")),
    case(
        "E4-clone-new",
        py(
            _SYSCALL
            + "print(call(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0), call(435, 0, 0))",
            shows="(-1, 'Operation not permitted') (-1, 'Function not implemented')",
        ),
    ),
    case(
        "E7-unknown",
        py(
            _SYSCALL + "print(call(999), call(470))",
            shows="(-1, 'Function not implemented') (-1, 'Function not implemented')",
        ),
    ),
    case(
        "E8-sockets",
        py(
            "import socket\nfor f in (16, 17, 38, 40, 41, 31, 30):\n  for t in (1, 2, 3, 5):\n    try: socket.socket(f, t); print('MADE', f, t)\n    except OSError: pass\nprint('done')",
            shows="done",
            hides="MADE",
        ),
    ),
    case("E8-raw", py("import socket\nfor t in (3,):\n  socket.socket(2, t, 1)", ERROR)),
    case(
        "E-bpf-and-friends",
        py(_SYSCALL + "print([call(n, 0, 0, 0, 0)[0] for n in (425, 426, 447, 438)])", shows="[-1, -1, -1, -1]"),
    ),
    case("E13-setuid", py("import os; os.setuid(0)", ERROR)),
    case(
        "E15-devices",
        py(
            "import os\nprint([d for d in ('mem', 'kmsg', 'fuse', 'kvm', 'vda', 'tty') if os.path.exists('/dev/' + d)])",
            shows="[]",
        ),
        tier=Tier.ISOLATED,
    ),
    case(
        "E16-clock",
        py("import time; time.clock_settime(0, 1)", ERROR, shows="not permitted"),
        py("import socket; socket.sethostname('x')", ERROR),
    ),
    case(
        "E20-no-capabilities",
        py(
            "import os\nprint({l.split()[1] for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapPrm', 'CapAmb', 'CapInh'))}, os.getuid() != 0)",
            shows="{'0000000000000000'} True",
        ),
    ),
    # F: network
    case(
        "F1-metadata",
        py(
            "import socket\ns = socket.socket(); s.settimeout(1); s.connect(('169.254.169.254', 80))",
            ERROR,
            hides="timed out",
        ),
    ),
    case("F4-dns", py("import socket; socket.getaddrinfo('example.com', 80)", ERROR, timeout=3)),
    case(
        "F6-own-loopback",
        py(
            "import socket\na = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname()); c, _ = a.accept(); b.send(b'mine'); print(c.recv(9))",
            shows="mine",
        ),
        tier=Tier.ISOLATED,
    ),
    # G: secrets
    case("G1-environment", py("import os; print(sorted(os.environ), open('/proc/self/environ').read())", shows="HOME")),
    case(
        "D15-host-files",
        py(
            "import os\nprint(os.path.exists('/etc/shadow'), os.path.exists('/etc/hostname'), os.path.exists('/sys'), os.path.exists('/home'), len([p for p in os.listdir('/proc') if p.isdigit()]))",
            shows="False False False False 2",
        ),
        tier=Tier.ISOLATED,
    ),
    case("D15-shadow", py("open('/etc/shadow').read()", ERROR)),
)
