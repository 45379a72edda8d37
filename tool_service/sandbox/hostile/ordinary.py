"""Ordinary use, which must work behind every wall."""

from __future__ import annotations

from tool_service.sandbox.base import Tier
from tool_service.sandbox.hostile.case import ERROR, Case, case, py

CASES: tuple[Case, ...] = (
    case(
        "state-persists", "variables stay from turn to turn", py("x = 40"), py("x + 2", shows="42"), py("_", shows="42")
    ),
    case(
        "last-expression",
        "the last expression is shown, as in a notebook",
        py("1\n2", shows="2", hides="1\n"),
        py("None", hides="None"),
        py("x = 3", hides="3"),
    ),
    case(
        "traceback",
        "an exception is told as a traceback of the program's own code",
        py("def f():\n    return 1 / 0\nf()", ERROR, shows="in f\n    return 1 / 0", hides="worker"),
    ),
    case(
        "syntax-error",
        "a syntax error is told and costs no state",
        py("x = = 1", ERROR, shows="SyntaxError"),
        py("1", shows="1"),
    ),
    case(
        "exit",
        "sys.exit ends the turn and not the session",
        py("x = 1; import sys; sys.exit(0)"),
        py("sys.exit(3)", ERROR),
        py("x", shows="1"),
    ),
    case("subprocess", "a child process", py("import subprocess; subprocess.run(['echo', 'hi'])", shows="hi")),
    case("asyncio", "an event loop", py("import asyncio\nasync def f(): return 7\nasyncio.run(f())", shows="7")),
    case(
        "threads",
        "a thread",
        py("import threading; t = threading.Thread(target=print, args=('t',)); t.start(); t.join()", shows="t"),
    ),
    case(
        "multiprocessing",
        "a pool of two worker processes",
        py("import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1]))", shows="[1]"),
        tier=Tier.ISOLATED,
    ),
)
