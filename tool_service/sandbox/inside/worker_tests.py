"""Runtime `tests`: runs a candidate program against tests that it cannot see, and counts the tests that passed.

The worker runs the tests; the candidate runs in processes of its own, clean interpreters that this one starts, talks to
over pipes (see remote.py) and kills. So a verdict is made where no candidate's code ever runs: it can patch, exit, fork
and print what it likes. The worker is not dumpable, so that processes of its own user cannot open its memory or its
descriptors, and nothing of the tests is ever on a disk or in an argument.

Which tests there are is read off their source, before anything runs: what cannot be run counts as not passed, and
fewer tests than there are can never be all of them. Each has a time limit; a candidate that died or was killed is
started again for the next.
"""

import ast
import builtins
import functools
import importlib
import json
import math
import numbers
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import linux, remote, runtimes
from .candidate import Candidate, Module, Remote, held_by, kill

_DEFAULTS = {"tests": "", "cases": [], "module": "solution", "language": "python", "test_seconds": 5.0}
HEAVY = ("asyncio", "tempfile", "unittest")
"""What is imported by the worker alone, which is one of many; and before any test, whose time could cut an import in
two."""
_FILE = "<tests>"
"""What tracebacks call the tests: no name under which a file of the candidate's would be read."""
_BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.TryStar, ast.Match)
_MOST_TESTS = 2000
_DETAIL_CHARACTERS, _NAME_CHARACTERS = 300, 100
_LANGUAGES = {"python": ((sys.executable, "-I", "-B", "-X", "utf8"), ".py"), "bash": (("bash",), ".sh")}
_OUTPUT_BYTES = 16 << 20
"""Of a program that is compared; a longer output is a wrong one."""
_LAST_SECONDS = 0.5
"""Kept of a turn's time to answer in it."""


def encode(payload: dict[str, Any]) -> bytes:
    kinds = {"code": str, "tests": str, "cases": list, "module": str, "language": str, "test_seconds": (int, float)}
    for key, value in payload.items():
        if key not in kinds or not isinstance(value, kinds[key]):  # type: ignore[arg-type]
            raise ValueError(f"the tests runtime does not take {key}={type(value).__name__}")
    if "code" not in payload:
        raise ValueError("the tests runtime takes the candidate's 'code'")
    return json.dumps({**_DEFAULTS, **payload}).encode("ascii")


class TooLong(BaseException):
    """A test's time is over. No Exception, so that no test takes it for the candidate's."""


class Test(NamedTuple):
    name: str
    run: Callable[[], None]
    """Raises where it does not pass."""


class Session:
    """Values: {"passed", "total", "tests": [{"name", "passed", "detail"}]}, or {"unreadable": why}."""

    def __init__(self, context: runtimes.Context) -> None:
        linux.set_dumpable(False)
        for name in HEAVY:
            importlib.import_module(name)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a candidate could send it
        self._context = context
        self._timing = False

    def run(self, body: bytes, seconds: float) -> runtimes.Reply:
        end = time.monotonic() + seconds - _LAST_SECONDS
        payload = json.loads(body)
        candidate = Candidate(payload["code"], payload["module"])
        try:
            tests = [*_tests_of(payload["tests"], candidate), *_cases_of(payload, candidate)]
        except (SyntaxError, ValueError, RecursionError, MemoryError, KeyError, TypeError) as error:
            return _unreadable(f"{type(error).__name__}: {error}")
        if not 0 < len(tests) <= _MOST_TESTS:
            return _unreadable(f"there are {len(tests)}; 1 to {_MOST_TESTS} are run")
        signal.signal(signal.SIGALRM, self._out_of_time)
        try:
            results = [
                self._result(test, candidate, min(payload["test_seconds"], end - time.monotonic())) for test in tests
            ]
        finally:
            candidate.stop()
        value = {"passed": sum(one["passed"] for one in results), "total": len(results), "tests": results}
        body = json.dumps(value).encode("ascii")
        if len(body) > self._context.value_bytes:
            body = json.dumps({**value, "tests": []}).encode("ascii")
        return runtimes.Reply(runtimes.OK, body=body)

    def _result(self, test: Test, candidate: Candidate, seconds: float) -> dict[str, Any]:
        passed, detail = False, ""
        try:
            self._timing = True
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), 1.0)  # and again, for a tearDown that hangs
            try:
                passed, detail = _outcome(test, candidate)
            finally:
                self._timing = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except TooLong:
            passed, detail = False, "out of time"
        except BaseException as error:  # noqa: BLE001 - it could not be told how it failed
            passed, detail = False, f"{type(error).__name__} in telling why"
        return {
            "name": _text(test.name, _NAME_CHARACTERS),
            "passed": passed,
            "detail": _text(detail, _DETAIL_CHARACTERS),
        }

    def _out_of_time(self, number: int, frame: object) -> None:
        if self._timing:  # a candidate could send the signal at any time
            raise TooLong


def _outcome(test: Test, candidate: Candidate) -> tuple[bool, str]:
    """Whether it passes, and why not: what it raised may be for the candidate to say, as `assert f(1) == 3, f(1)`."""
    candidate.lost = False
    try:
        test.run()
        if candidate.lost:  # and a bare `except` of the test's has swallowed it
            return False, "the program's process ended, or its time was over"
    except TooLong:
        raise
    except BaseException as error:  # noqa: BLE001 - a test may raise anything
        return False, f"{type(error).__name__}: {error}"
    return True, ""


def _text(text: str, most: int) -> str:
    """A part of it, without the lone surrogates that a candidate's may have and no message can carry."""
    return text[:most].encode("utf-8", "backslashreplace").decode()


def _unreadable(why: str) -> runtimes.Reply:
    """The task's mistake, and no candidate's: told as a value, which a candidate cannot bring about."""
    value = {"unreadable": _text(f"the tests cannot be read: {why}", 2 * _DETAIL_CHARACTERS)}
    return runtimes.Reply(runtimes.OK, body=json.dumps(value).encode("ascii"))


# -- tests as Python source


def _tests_of(source: str, candidate: Candidate) -> list[Test]:
    """`test_*` functions and methods of `unittest.TestCase`s; where there are none, each top-level `assert` or call,
    and each top-level loop, `with`, `try` or `if` that asserts something, or comes after all that does."""
    tree = ast.parse(source, _FILE)
    names = list(dict.fromkeys([*_functions(tree), *_methods(tree)]))
    called = "tests" if names else "__main__"  # a script's `if __name__ == "__main__"` is to run
    module = sys.modules[called] = types.ModuleType(called)  # unittest and dataclasses look for it there
    sys.modules[candidate.module] = Module(candidate)
    if names:
        return _named_tests(tree, names, module, candidate)
    return list(_statements(tree, module, candidate))


def _functions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name


def _methods(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (node.bases or node.name.startswith("Test")):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name.startswith("test"):
                    yield f"{node.name}.{part.name}"


def _named_tests(tree: ast.Module, names: list[str], module: types.ModuleType, candidate: Candidate) -> list[Test]:
    ready: list[bool] = []

    def run(name: str) -> None:
        if not ready:
            ready.append(False)
            _lend_names(tree, module, candidate)
            exec(compile(tree, _FILE, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the task's tests
            ready[0] = True
        if not ready[0]:
            raise remote.LinkError("the tests' module did not load: see the first test")
        owner, _, method = name.rpartition(".")
        if owner:
            _run_method(module.__dict__[owner], method)
        else:
            _finish(module.__dict__[name]())

    return [Test(name, functools.partial(run, name)) for name in names]


def _run_method(kind: Any, method: str) -> None:
    """Raises unless exactly this test ran and succeeded."""
    import unittest  # noqa: PLC0415 - see HEAVY

    if not (isinstance(kind, type) and issubclass(kind, unittest.TestCase)):
        _finish(getattr(kind(), method)())
        return
    result = unittest.TestResult()
    unittest.TestSuite([kind(method)]).run(result)
    for _, trace in (*result.failures, *result.errors):
        raise AssertionError(trace.strip().splitlines()[-1])
    if result.testsRun != 1 or result.skipped or result.expectedFailures or result.unexpectedSuccesses:
        raise AssertionError("it was skipped, or did not run")


def _finish(returned: Any) -> None:
    """Run what a test has only begun. Raises for a generator, which is none."""
    if isinstance(returned, types.CoroutineType):
        import asyncio  # noqa: PLC0415 - see HEAVY

        asyncio.run(returned)
    elif returned is not None:
        raise TypeError(f"the test returned {type(returned).__name__} and has run nothing")


def _statements(tree: ast.Module, module: types.ModuleType, candidate: Candidate) -> Iterator[Test]:
    before: list[ast.stmt] = []
    lent: list[bool] = []

    def run(setup: list[ast.stmt], test: ast.stmt) -> None:
        if not lent:
            _lend_names(tree, module, candidate)
            lent.append(True)
        for statement in (*setup, test):
            part = ast.Module([statement], [])
            exec(compile(part, _FILE, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the task's tests

    for node in tree.body:
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if is_call or _asserts(node):
            name = ast.unparse(node)
            yield Test(name, functools.partial(run, before, node))
            before = []
        else:
            before.append(node)
    if blocks := [node for node in before if isinstance(node, _BLOCKS)]:  # as a loop that calls what asserts
        yield Test(ast.unparse(blocks[0]), functools.partial(run, before[:-1], before[-1]))


def _asserts(node: ast.AST) -> bool:
    """Whether it does so itself: what a function or class asserts is its caller's test."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    parts = (part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.expr))
    return isinstance(node, ast.Assert) or any(map(_asserts, parts))


def _lend_names(tree: ast.Module, module: types.ModuleType, candidate: Candidate) -> None:
    """Give the tests what they use without importing it, as `assert add(1, 2) == 3` does. Never a built-in: a
    candidate's `len` is not the tests'."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    solution = sys.modules[candidate.module]
    candidate.ask("name", "__name__")  # loads it
    for name in used & set(candidate.names):
        if not (name.startswith("_") or hasattr(builtins, name)):
            module.__dict__[name] = getattr(solution, name)


# -- tests as cases


def _cases_of(payload: dict[str, Any], candidate: Candidate) -> Iterator[Test]:
    """`{"call", "args", "kwargs", "returns"}`, or `{"stdin", "stdout"}` of the whole program."""
    for number, case in enumerate(payload["cases"], start=1):
        if "call" in case:
            run = functools.partial(_run_call, candidate, case["call"], case.get("args", []), case.get("kwargs", {}))
            yield Test(f"{case['call']} {number}", functools.partial(run, case["returns"]))
        else:
            run = functools.partial(_run_program, payload["code"], payload["language"])
            yield Test(f"program {number}", functools.partial(run, str(case["stdin"]), str(case["stdout"])))


def _run_call(candidate: Candidate, name: str, positional: list[Any], named: dict[str, Any], right: Any) -> None:
    got = candidate.ask("name", name)(*positional, **named)
    if not same(got, right):
        raise AssertionError(f"returned {got!r}, not {right!r}")


def same(got: Any, right: Any) -> bool:
    """Whether a returned value is what JSON says: tuples are lists there, keys are text, and floats may be off by
    rounding."""
    if isinstance(got, Remote):
        return any(same(held, right) for held in held_by(got))
    if isinstance(got, numbers.Number) and not isinstance(got, int | float | complex):  # a Fraction, a Decimal
        number: Any = got
        return isinstance(right, int | float) and (number == right or same(float(number), right))
    if isinstance(got, list | tuple) and isinstance(right, list):
        return len(got) == len(right) and all(map(same, got, right))
    if isinstance(got, dict) and isinstance(right, dict):
        by_text = {str(key): value for key, value in got.items()}
        return by_text.keys() == right.keys() and all(same(by_text[key], value) for key, value in right.items())
    if isinstance(got, float) or isinstance(right, float):
        both = isinstance(got, int | float) and isinstance(right, int | float)
        return both and (got == right or math.isclose(got, right, rel_tol=1e-9, abs_tol=1e-12))
    return type(got) in (bool, int, str, type(None)) and bool(got == right)


def _run_program(code: str, language: str, given: str, right: str) -> None:
    """The program in a file, its input and output in others: nothing to wait for but its end."""
    import tempfile  # noqa: PLC0415 - see HEAVY

    command, suffix = _LANGUAGES[language]
    with (
        tempfile.NamedTemporaryFile("w", prefix="program", suffix=suffix, errors="surrogatepass") as file,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
    ):
        file.write(code)
        file.flush()
        stdin.write(given.encode())
        stdin.seek(0)
        process = subprocess.Popen(
            [*command, file.name], stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait()
        finally:
            kill(process)
        stdout.seek(0)
        got = stdout.read(_OUTPUT_BYTES).decode("utf-8", "replace")
    if _lines(got) != _lines(right):
        raise AssertionError(f"printed {got[:200]!r}, not {right[:200]!r}")


def _lines(text: str) -> list[str]:
    """Without blanks at the ends of lines and blank lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
