"""Runtime `python`: a namespace that lives as long as the sandbox; the last expression of a turn is shown by `repr`.

Figures of matplotlib that are open when a turn ends are saved as `outputs/figure_N.png` and closed. The value is
`{"files": what the turn left in `outputs` (see outputs.py)}`, or none.
"""

import ast
import builtins
import contextlib
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any

from . import outputs, runtimes, worker

__builtins__ = vars(builtins).copy()  # type: ignore[assignment] # a name that Python knows
"""Of the functions here, which are made with it: a program may patch its own as it likes."""

_TURN_FILE = "<turn "
_SOURCES_KEPT = 64
_TRACEBACK_FRAMES = 30
_LONGEST_LINE = 1000
"""Of source, in characters, that is shown with a syntax error."""
_BETWEEN = "\x1f"
_HEADROOM = 16 << 20
"""Bytes that must be free after a MemoryError for the session to go on."""


def encode(payload: dict[str, Any]) -> bytes:
    code = payload.get("code")
    if not isinstance(code, str):
        raise ValueError("the python runtime takes a payload of {'code': str}")  # noqa: TRY004 - as any bad payload
    options = ["figures" if payload.get("figures") else "", *payload.get("paths", ())]
    return f"{_BETWEEN.join(options)}\n{code}".encode("utf-8", "surrogatepass")


class Session:
    """Holds the program's namespace, and references to what it needs itself, since the program may patch anything."""

    def __init__(self, context: runtimes.Context) -> None:
        main = types.ModuleType("__main__")
        self._main = main
        self._namespace = main.__dict__
        self._namespace["__builtins__"] = builtins
        sys.modules["__main__"] = main
        sys.argv = [""]
        sys.path.insert(0, context.workspace)
        self._streams = sys.stdout, sys.stderr
        self._built_in, self._built_in_now = vars(builtins).copy(), vars(builtins)
        self._turn = 0
        self._files: list[str] = []
        self._write = worker.write_all
        self._cache = linecache.cache
        self._outputs = outputs.Outputs(context)
        self._folder = f"{context.workspace}/{outputs.FOLDER}"
        self._figures = 0
        """Numbers of figures used."""

    def run(self, body: bytes, seconds: float) -> runtimes.Reply:
        head, _, source = body.decode("utf-8", "surrogatepass").partition("\n")
        source = source.removeprefix("\ufeff")
        figures, *paths = head.split(_BETWEEN)
        for path in paths:
            if path not in sys.path:
                sys.path.append(path)
        self._outputs.begin()
        reply = self._turn_of(source)
        if figures:
            reply = self._save_figures(reply)
        files = self._outputs.changed()
        value = _dumps({"files": files}).encode("ascii") if files else b""
        if reply.tag == runtimes.OK:
            return reply._replace(body=value)
        return reply._replace(body=reply.body + (b"\0" + value if value else b""))

    def _turn_of(self, source: str) -> runtimes.Reply:
        self._turn += 1
        # Whatever the turns before have made of these.
        self._built_in_now.update(self._built_in)
        self._namespace["__builtins__"] = builtins
        self._open_streams()
        name = f"{_TURN_FILE}{self._turn}>"
        self._remember(name, source)
        try:
            program, last = _compile(source, name)
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError, UnicodeError) as error:
            self._show(error, syntax=True)
            return _failed(error)
        reply = self._execute(program, last)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # noqa: BLE001, S112 - the program may have put anything there
                continue
        return reply

    def _open_streams(self) -> None:
        """Anew where a turn before has closed them, or all that later ones print would be lost."""
        try:
            for stream in self._streams:
                stream.flush()
        except BaseException:  # noqa: BLE001 - closed, detached, or patched
            worker.own_streams()
            self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._streams

    def _execute(self, program: Any, last: Any) -> runtimes.Reply:
        run, evaluate = _exec, _eval
        try:
            run(program, self._namespace)
            if last is not None:
                value = evaluate(last, self._namespace)
                if value is not None:
                    self._namespace["_"] = value
                    self._streams[0].write(repr(value) + "\n")
        except SystemExit as error:
            return self._exit(error)
        except MemoryError as error:
            self._show(error)
        except BaseException as error:  # noqa: BLE001 - whatever the program raises
            self._show(error)
            return _failed(error)
        else:
            return runtimes.Reply(runtimes.OK)
        try:  # now that the failed frames are gone
            bytearray(_HEADROOM)
        except MemoryError:
            return runtimes.Reply(runtimes.EXHAUSTED, body=b"MemoryError; the variables alone fill the memory")
        return runtimes.Reply(runtimes.MEMORY, body=b"MemoryError")

    def _exit(self, error: SystemExit) -> runtimes.Reply:
        try:
            return _exit_reply(error.code)
        except BaseException as failure:  # noqa: BLE001 - a class of the program's has its own `code`
            _programs_part(error)
            self._show(failure)
            return _failed(failure)

    def _save_figures(self, reply: runtimes.Reply) -> runtimes.Reply:
        """What the turn drew. A figure that cannot be drawn is the program's error."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return reply
        try:
            for number in pyplot.get_fignums():
                os.makedirs(self._folder, exist_ok=True)
                pyplot.figure(number).savefig(self._next_figure(), format="png")
        except BaseException as error:  # noqa: BLE001 - whatever the program drew, or patched
            self._show(error)
            reply = _failed(error) if reply.tag == runtimes.OK else reply
        with contextlib.suppress(BaseException):
            pyplot.close("all")
        return reply

    def _next_figure(self) -> str:
        while True:
            self._figures += 1
            path = f"{self._folder}/figure_{self._figures}.png"
            if not os.path.lexists(path):
                return path

    def _remember(self, name: str, source: str) -> None:
        """Let tracebacks show source lines; only of the last turns, so that memory stays bounded."""
        self._cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        self._files.append(name)
        if len(self._files) > _SOURCES_KEPT:
            self._cache.pop(self._files.pop(0), None)

    def _show(self, error: BaseException, syntax: bool = False) -> None:
        """The traceback on stderr."""
        try:
            place = None if syntax else _programs_part(error)
            report: Any = traceback.TracebackException(
                type(error), error, place, limit=-_TRACEBACK_FRAMES, compact=True
            )
            if len(getattr(report, "text", None) or "") > _LONGEST_LINE:
                report.text = None  # or nothing would be seen of what is wrong with it
            text = "".join(report.format())
        except BaseException:  # noqa: BLE001 - its own __str__ or a patched module failed
            text = f"{_name_of(error)}\n"
        try:
            self._write(2, text.encode("utf-8", "backslashreplace"))
        except OSError:
            return  # the program closed its stderr


_exec, _eval, _compile_code = exec, eval, compile
_dumps = json.dumps
_class_name = type.__dict__["__name__"].__get__
_traceback = BaseException.__dict__["__traceback__"]
_EXIT_CODES = range(-(1 << 63), 1 << 63)
"""What a C long holds."""


def _compile(source: str, name: str) -> tuple[Any, Any]:
    """The statements, and the last expression by itself if there is one. Raises what `compile` does."""
    worker.parse("", name)  # raises where another interpreter runs
    try:
        return _compile_apart(source, name)
    except _NOT_APART:
        pass  # out of the handler, or the errors of the whole would have those of a half as their context
    tree = worker.parse(source, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = _compile_code(ast.Expression(tree.body.pop().value), name, "eval", dont_inherit=True)
    return _compile_code(tree, name, "exec", dont_inherit=True), last


_NOT_APART = SyntaxError, ValueError, OverflowError, RecursionError, MemoryError
_BEGINS_NOTHING = frozenset(("", *"\n\r \t\f#)]}"))
"""First characters of lines that no statement at the left edge begins with."""


def _compile_apart(source: str, name: str) -> tuple[Any, Any]:
    """The same by cutting the text where the last line begins that can begin a statement. If what is before it is
    whole, and what is after it an expression, then they part there: nothing that is open, a bracket, a string, a block,
    goes on into an expression at the left edge. Most turns end so, and need no syntax tree made of objects, which is
    half of what a short turn costs. Raises one of `_NOT_APART` for all others."""
    end = len(source)
    while (start := source.rfind("\n", 0, end) + 1) and source[start : start + 1] in _BEGINS_NOTHING:
        end = start - 1
    last = _compile_code("\n" * source.count("\n", 0, start) + source[start:], name, "eval", dont_inherit=True)
    return _compile_code(source[:start], name, "exec", dont_inherit=True), last


def _programs_part(error: BaseException) -> Any:
    """Its traceback from the program's first frame on; so it stays, for another exception that it is the cause of."""
    place = _traceback.__get__(error)
    while place is not None and not place.tb_frame.f_code.co_filename.startswith(_TURN_FILE):
        place = place.tb_next
    _traceback.__set__(error, place)
    return place


def _failed(error: BaseException) -> runtimes.Reply:
    return runtimes.Reply(runtimes.ERROR, body=runtimes.failure(_name_of(error)[:200]))


def _name_of(error: BaseException) -> str:
    """Of its class, past a metaclass that has something else to say."""
    return str(_class_name(type(error)))


def _exit_reply(code: object) -> runtimes.Reply:
    """`sys.exit()` ends the turn, not the session."""
    if code is None:
        return runtimes.Reply(runtimes.OK, exit_code=0)
    if issubclass(type(code), int):  # not isinstance, to which an object can lie
        number: Any = code
        plain = int.__pos__(number)
        status = plain & 0xFF if plain in _EXIT_CODES else 0xFF  # as the interpreter and the kernel make of it
        return runtimes.Reply(runtimes.ERROR if status else runtimes.OK, status, b"SystemExit" if status else b"")
    with contextlib.suppress(BaseException):  # its own __str__, or whatever it put in place of stderr
        sys.stderr.write(f"{code}\n")
    return runtimes.Reply(runtimes.ERROR, exit_code=1, body=b"SystemExit")
