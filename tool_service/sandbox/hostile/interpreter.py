# ruff: noqa: E501 - programs are data
"""B and C, from inside the interpreter that runs the program and its worker alike."""

from __future__ import annotations

from tool_service.sandbox.hostile.case import ERROR, LOST, OK, SIGNALED, TIMEOUT, Case, bash, case, py

CASES: tuple[Case, ...] = (
    case(
        "C7-names-that-lie",
        "exceptions whose class has no name, whose __str__, cause and traceback raise",
        py(
            "kept = 5\nclass Meta(type):\n  @property\n  def __name__(cls): raise cls()\nclass E(BaseException, metaclass=Meta): pass\nraise E()",
            ERROR,
            restarted=False,
        ),
        py(
            "class E(Exception):\n  __class__ = property(lambda s: 1 / 0)\n  @property\n  def __traceback__(s): 1 / 0\n  @property\n  def __cause__(s): 1 / 0\nraise E",
            ERROR,
        ),
        py("e = SyntaxError('m'); e.lineno = object(); e.offset = 'x'; e.text = b'y'; e.filename = 3; raise e", ERROR),
        py("kept", shows="5", restarted=False),
    ),
    case(
        "C7-exits-that-lie",
        "sys.exit with numbers that are none, and codes that raise or loop",
        py("kept = 5\nimport sys\nclass I(int):\n  def __and__(s, o): return 'x'\nsys.exit(I(3))", ERROR),
        py("class I:\n  __class__ = int\n  def __and__(s, o): return 10**30\nsys.exit(I())", ERROR),
        py("class E(SystemExit):\n  @property\n  def code(s): raise s\nraise E", ERROR),
        py("sys.exit(10**5000)", ERROR),
        py("kept", shows="5", restarted=False),
        py("class I:\n  def __str__(s):\n    while 1: pass\nsys.exit(I())", TIMEOUT, timeout=0.5),
    ),
    case(
        "C7-exceptions-without-end",
        "exceptions nested 20,000 deep, in circles, with 100,000 notes",
        py("kept = 5; e = ValueError('v')\nfor i in range(20000): e = ExceptionGroup('g', [e])\nraise e", ERROR),
        py(
            "a = ValueError('a'); b = ValueError('b'); a.__cause__ = b; b.__cause__ = a\nraise a",
            ERROR,
            shows="ValueError",
        ),
        py("e = ValueError('x'); e.__notes__ = ['n'] * 10**5\nraise e", ERROR),
        py("kept", shows="5", restarted=False),
    ),
    case(
        "C3-builtins",
        "takes len, type, isinstance, repr and __import__ from everybody, itself included",
        py(
            "import builtins\nfor n in ('len', 'type', 'isinstance', 'repr', 'str', 'BaseException', 'open'): setattr(builtins, n, None)\n7",
            OK,
            ERROR,
            restarted=False,
        ),
        py("kept = 8\nraise ValueError", ERROR, restarted=False),
        py("__builtins__ = {}", restarted=False),
        py("print(kept)", shows="8", restarted=False),
    ),
    case(
        "C3-frames",
        "climbs the frames of its caller and breaks what it finds there",
        py(
            "import sys\nf = sys._getframe()\nwhile f:\n  one = f.f_locals.get('self')\n  if hasattr(one, '_outputs'): one._write = one._outputs = one._namespace = one._streams = None\n  f = f.f_back",
            OK,
            ERROR,
            LOST,
        ),
        py("1", OK, ERROR, LOST),
        spoils=True,
    ),
    case(
        "C3-hooks",
        "import hooks, path hooks and audit hooks that raise or never come back",
        py(
            "import sys\nclass F:\n  def find_spec(s, n, *a): raise SystemExit(3)\nsys.meta_path.insert(0, F()); sys.path_hooks.insert(0, lambda p: 1 / 0); sys.path = None"
        ),
        py("1", OK, ERROR),
        py("def loop(*a):\n  while 1: pass\nsys.addaudithook(loop)", OK, TIMEOUT, timeout=0.5),
        py("1", TIMEOUT, timeout=0.5),
        py("2", shows="2", restarted=True),
        py("import sys\ndef fail(*a): raise ValueError\nsys.addaudithook(fail)", OK, ERROR, LOST),
        py("1", LOST),
        py("2", shows="2", restarted=True),
    ),
    case(
        "C3-streams",
        "closes, detaches and replaces its streams, and makes them non-blocking: what later turns print is still there",
        py("import sys; sys.stdout.close(); sys.stderr.close()"),
        py("print('after closing'); 1", shows=("after closing", "1\n")),
        py("sys.stdout.detach(); sys.stderr.detach()", OK, ERROR),
        py("print('after detaching'); 1 / 0", ERROR, shows=("after detaching", "ZeroDivisionError")),
        py("import os\nfor fd in (0, 1, 2): os.set_blocking(fd, False)"),
        py(
            "import sys, time; sys.stdout.write('x' * 60_000); time.sleep(.05); sys.stdout.write('y' * 60_000); print('end', file=sys.stderr)",
            shows="end",
        ),
        py("import fcntl; fcntl.fcntl(1, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_ASYNC | os.O_APPEND)", shows="0"),
        bash("exec 1<&-; :", OK, ERROR),
        bash("echo shown", shows="shown"),
    ),
    case(
        "C9-in-messages",
        "surrogates, escapes, NUL and turned text in what an exception says, and in names of files",
        py("raise ValueError('\\ud800\\0\\x1b[2J\\u202e')", ERROR, shows="\\ud800"),
        py(
            "import os; os.makedirs('outputs')\nfor n in (b'\\xff' * 255, b'\\xed\\xa0\\x80', b'\\x1b[2J', '\\u202e'.encode(), b'a\\nb', b'-rf', b'$(x)'): open(b'outputs/' + n, 'wb').close()\nlen(os.listdir('outputs'))",
            shows="7",
        ),
    ),
    case(
        "C15-shapes-of-source",
        "source in odd codings, with deep nesting, 300,000 statements and a megabyte on one line",
        py("# -*- coding: rot13 -*-\nprint('not turned')", shows="not turned"),
        py("\x0c\x0c1", shows="1"),
        *(
            py(text, ERROR)
            for text in (
                "x = " + "-" * 100_000 + "1",
                "lambda:" * 50_000 + "1",
                "a." * 50_000 + "b",
                "'%s' % " * 20_000 + "1",
            )
        ),
        py("x = 1;" * 150_000 + "y = 2", OK, ERROR),
        *(py(text, ERROR) for text in ("(yield)", "await x", "*a", "return 3", "x := 1")),
        py("...", shows="Ellipsis"),
    ),
    case(
        "B12-out-of-the-interpreter",
        "Py_Exit, Py_FinalizeEx, fatal errors, a lock given away, None freed, by way of the C API",
        *(
            step
            for call in (
                "Py_Exit(0)",
                "Py_FinalizeEx()",
                "Py_FatalError(b'x')",
                "PyEval_SaveThread()",
            )
            for step in (
                py(f"import ctypes; ctypes.pythonapi.{call}", SIGNALED, LOST, TIMEOUT, timeout=2),
                py("1", shows="1", restarted=True),
            )
        ),
        py("import ctypes\nfor i in range(10**6): ctypes.pythonapi.Py_DecRef(ctypes.py_object(None))", SIGNALED),
        py("1", shows="1", restarted=True),
    ),
    case(
        "B12-another-interpreter",
        "goes on in another interpreter of the same process",
        py("import ctypes; ctypes.pythonapi.Py_NewInterpreter()", OK, SIGNALED, LOST, TIMEOUT, timeout=2),
        py("1", OK, SIGNALED, LOST, TIMEOUT, timeout=2),
        py("2", shows="2"),
    ),
    case(
        "B15-descriptors-moved",
        "moves its output onto the pipes of its worker, and closes each of them",
        py("import os; os.dup2(1, 21)", LOST, hides="\0"),
        py("import os\nfor fd in range(3, 63): os.dup2(1, fd)", LOST, OK),
        py("1", OK, LOST),
        py("import os; os.close(21)", LOST),
        py("import os; os.close(20)", LOST),
        py("1", shows="1"),
    ),
    case(
        "B15-reads-the-commands",
        "a thread that reads the worker's commands before it does",
        py(
            "import os, threading, time\nthreading.Thread(target=lambda: [os.read(20, 10) for i in range(100)], daemon=True).start(); time.sleep(.2)"
        ),
        py("1", OK, TIMEOUT, LOST, timeout=0.5),
        py("import os; os._exit(1)", LOST, TIMEOUT, timeout=0.5),
        py("2", shows="2"),
    ),
    case(
        "B20-locks-of-the-interpreter",
        "threads that never let go of the interpreter, from turn to turn",
        py(
            "import re, threading\nthreading.Thread(target=lambda: re.match('(a+)+$', 'a' * 64 + 'b'), daemon=True).start()",
            OK,
            TIMEOUT,
            timeout=0.5,
        ),
        py("1", TIMEOUT, OK, timeout=0.5),
        py(
            "import sys, threading\nsys.setswitchinterval(1e9)\ndef f():\n  while 1: pass\nthreading.Thread(target=f, daemon=True).start()",
            OK,
            TIMEOUT,
            timeout=0.5,
        ),
        py("1", TIMEOUT, OK, timeout=0.5),
        py("2", OK, TIMEOUT, timeout=1),
        spoils=True,
    ),
    case(
        "B20-late-ends",
        "a watchdog of faulthandler's, finalizers and generators that end in a later turn",
        py("import faulthandler; faulthandler.dump_traceback_later(.2, exit=True)"),
        py("import time; time.sleep(5)", LOST),
        py("class D:\n  def __del__(s):\n    while 1: pass\nd = D()"),
        py("d = 1", TIMEOUT, timeout=0.5),
        py("def g():\n  try:\n    yield 1\n  finally:\n    while 1: pass\ni = g(); next(i)"),
        py("del i", TIMEOUT, timeout=0.5),
        py("1", shows="1", restarted=True),
    ),
    case(
        "B20-thrown-from-a-thread",
        "exceptions that another thread throws into the worker, again and again",
        py(
            "import ctypes, threading, time\nmain = threading.get_ident()\ndef f():\n  while 1: ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(KeyboardInterrupt)); time.sleep(.001)\nthreading.Thread(target=f, daemon=True).start()",
            OK,
            ERROR,
            LOST,
        ),
        py("1", OK, ERROR, LOST),
        py("import time; time.sleep(.2)", OK, ERROR, LOST),
        spoils=True,
    ),
)
