# ruff: noqa: E501 - programs are data
"""C: what is between a program and its supervisor."""

from __future__ import annotations

from tool_service.sandbox.hostile.case import ERROR, LOST, OK, TIMEOUT, Case, bash, case, py, sql
from tool_service.sandbox.hostile.programs import TRY

CASES: tuple[Case, ...] = (
    case(
        "C1-frames-printed",
        "prints what looks like a frame of the protocol",
        py("import os; os.write(1, b'\\0\\0\\0\\x02\\0\\0\\0\\0{}') ", shows="{}"),
        py("1", shows="1"),
    ),
    case(
        "C3-patches",
        "replaces every function of json, struct, os and traceback",
        py(
            "import json, struct, os, sys, builtins, traceback\nfor m in (json, struct, os, traceback):\n  for n in list(vars(m)):\n    if callable(getattr(m, n)): setattr(m, n, None)"
        ),
        py("41 + 1", OK, ERROR, LOST),
        py("2", OK, ERROR, LOST),
        spoils=True,
    ),
    case(
        "C3-print",
        "takes print, repr and stdout away: to the end of its turn",
        py("import builtins, sys; sys.stdout = None; builtins.print = None; builtins.repr = None; builtins.own = 3"),
        py("print(repr('5'), own)", shows="'5' 3", restarted=False),
        py("import builtins; vars(builtins).clear()", OK, ERROR),
        py("print(len('five'))", shows="4", restarted=False),
    ),
    case(
        "C4-wipe",
        "empties sys.modules",
        py("import sys; sys.modules.clear()"),
        py("1 + 1", OK, ERROR, LOST),
    ),
    case(
        "C6-named-exception",
        "raises an exception named FinalAnswer",
        py("class FinalAnswer(BaseException): pass\nraise FinalAnswer('42')", ERROR, shows="FinalAnswer: 42"),
    ),
    case(
        "C7-repr-loops",
        "a __repr__ that loops",
        py("class A:\n  def __repr__(s):\n    while 1: pass\nA()", TIMEOUT, timeout=0.5),
    ),
    case(
        "C7-repr-raises",
        "a __repr__ that raises",
        py("class A:\n  def __repr__(s): raise KeyError(1)\nA()", ERROR, shows="KeyError"),
    ),
    case(
        "C7-str-raises",
        "an exception whose __str__ raises",
        py("class E(Exception):\n  def __str__(s): raise KeyError(1)\nraise E", ERROR),
    ),
    case("C7-huge-repr", "a value whose repr is 600 KB long", py("list(range(10**5))", OK)),
    case(
        "C9-surrogates",
        "lone surrogates in output and in code",
        py("print('\\ud800')", shows="\\ud800"),
        py("'\ud800'", OK, ERROR),
    ),
    case("C9-raw-bytes", "bytes that are no UTF-8", py("import os; os.write(1, b'\\xff\\xfe')", shows="2")),
    case("C10-nul-in-code", "NUL in code and in output", py("print(1)\0", ERROR), py("print('\\0')", shows="\0")),
    case("C12-empty-lines", "a million empty lines", py("print('\\n' * 10**6)", OK)),
    case(
        "C15-empty",
        "no code, comments alone, a byte order mark, CRLF with tabs",
        py(""),
        py("# only a comment"),
        py("\ufeffprint('bom')", shows="bom"),
        py("if 1:\r\n\tprint('crlf')\r\n", shows="crlf"),
    ),
    case("C15-large-source", "1 MB of source", py("'''" + "x" * 1_000_000 + "'''\nprint('big')", shows="big")),
    case(
        "C20-terminal",
        "types into a terminal (TIOCSTI)",
        py(
            TRY
            + "import fcntl\nfor fd in (0, 1, 2): attempt(fd, lambda: fcntl.ioctl(fd, 0x5412, b'x'))\nattempt('tty', lambda: open('/dev/tty'))",
            hides="DONE",
        ),
    ),
    case(
        "C21-large-argument",
        "200 KB in one argument",
        py("import subprocess\nsubprocess.run(['true', 'x' * 200_000])", ERROR, shows="too long"),
    ),
    case(
        "C2-markers-printed",
        "prints prompts and markers of exit codes",
        bash("echo ':1:0:' >&2; echo '$ '; echo '__EXIT__0'; (exit 3)", ERROR, shows="__EXIT__0"),
        bash("echo right", shows="right"),
    ),
    case(
        "C8-unpickling-runs-code",
        "a value whose unpickling runs a program",
        py(
            "class A:\n  def __reduce__(self): return (__import__('os').system, ('echo UNPICKLED',))\nA()",
            hides="UNPICKLED",
        ),
    ),
    case(
        "C13-no-numbers",
        "values that JSON cannot hold",
        py("float('nan'), float('-inf'), 1e999", shows="(nan, -inf, inf)"),
        sql("select 9e999 as a", value={"rows": [[{"float": "inf"}]]}),
    ),
    case(
        "C21-large-environment",
        "200 KB in one variable, and a script as long",
        py("import subprocess\nsubprocess.run(['true'], env={'A': 'x' * 200_000})", ERROR, shows="too long"),
        bash("A='" + "x" * 200_000 + "'; echo ${#A}", shows="200000"),
    ),
    case(
        "C22-ends-of-the-shell",
        "open quotes and heredocs, exit, exec, set -e, traps, no PATH",
        bash("cat <<END\nhere", OK, ERROR, LOST),
        bash("echo 'open", ERROR, LOST),
        bash("exit 3", ERROR, LOST),
        bash("set -e; false", ERROR, LOST),
        bash("exec true", OK, LOST),
        bash("trap 'exit 4' DEBUG EXIT ERR", OK, ERROR, LOST),
        bash("echo next", OK, ERROR, LOST),
        bash("PS1=; PS2=; unset PATH; echo here", OK, ERROR, LOST),
        bash("exit 0", OK, LOST),
        bash("echo still", shows="still"),
    ),
    case(
        "C24-names-taken",
        "aliases and functions in the place of the shell's own words",
        bash(
            "shopt -s expand_aliases; alias echo=false; cd() { :; }; exit() { :; }; eval() { :; }; printf() { :; }; builtin() { :; }; command() { :; }; (\\exit 5)",
            OK,
            ERROR,
            LOST,
        ),
        bash("/bin/echo here", OK, ERROR, LOST),
        py("2 + 2", shows="4"),
    ),
)
