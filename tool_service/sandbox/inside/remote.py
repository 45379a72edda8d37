"""Calls between tests and the code under test, which run in two processes: both ends of the link.

The candidate's process is a clean interpreter that runs this file's text and nothing else of ours: it sees the calls
that are made of it, never the tests, their source or what they expect. What crosses are values of exactly the built-in
types (numbers, text, bytes, lists, tuples, dicts, sets, ranges), by value; all else stays where it is and is a *handle*
on the other side. So nothing that the candidate returns brings code along: no `__eq__`, no `__class__`, no pickle.

Messages are lines of JSON: a request `{"q": [operation, ...]}`, or the answer to the last one, `{"v": value}` or
`{"e": [exception class, arguments]}`. Whoever waits for an answer serves requests meanwhile, so that functions can be
passed to the candidate. A call's lists, dicts and sets come back with its answer, as the candidate left them.

This file is also run as text, alone: it imports nothing but the standard library.
"""

import builtins
import contextlib
import json
import math
import numbers
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

LONGEST = 16 << 20
"""Bytes of one message."""
_DECIMAL_BITS = 4096
"""Longer integers travel as hexadecimal: Python refuses to read and write long decimals."""
_COMPARISONS = tuple(f"__{name}__" for name in ("lt", "le", "gt", "ge"))
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_ARITHMETIC = (*(f"__{name}__" for name in _BINARY), *(f"__r{name}__" for name in _BINARY))
_OPERATORS: "dict[str, Callable[..., Any]]" = {
    **{name: getattr(operator, name) for name in (*_COMPARISONS, "__eq__", "__contains__", "__index__")},
    **{name: getattr(operator, name) for name in ("__getitem__", "__setitem__", "__delitem__")},
    **{name: getattr(operator, name) for name in ("__neg__", "__pos__", "__abs__", "__invert__")},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in _BINARY},
    **{f"__r{name}__": lambda one, other, name=name: _OPERATORS[f"__{name}__"](other, one) for name in _BINARY},
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__reversed__": reversed,
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
    "__int__": int,
    "__float__": float,
    "__round__": round,
    "__enter__": lambda one: type(one).__enter__(one),
    "__exit__": lambda one, *about: type(one).__exit__(one, None, None, None),
}
"""What may be done with a handle besides calls and attributes."""


class LinkError(BaseException):
    """The other side is gone, or does not keep to the protocol. No Exception: a test that expects one of the code under
    test must not take this for it."""


class Link:
    """One end. `export(value)` says what a value that cannot cross is there, `resolve(reference)` the reverse; `serve`
    answers a request's arguments."""

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        export: Callable[[Any], Any],
        resolve: Callable[[Any], Any],
        serve: Callable[[str, list[Any]], Any],
    ) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._export, self._resolve, self._serve = export, resolve, serve
        self._buffer = bytearray()

    def request(self, operation: str, *arguments: Any) -> Any:
        """Ask, and wait. Raises what the other side raised, or LinkError."""
        self._send({"q": [operation, *map(self._encode, arguments)]})
        while True:
            message = self._receive()
            if message is None:
                raise LinkError("the process ended")
            if "q" in message:
                self._answer(message["q"])
            elif "e" in message:
                kind, arguments_of_error = map(self._decode, message["e"])
                raise _made(kind, arguments_of_error)
            else:
                return self._decode(message.get("v"))

    def serve_forever(self) -> None:
        """Until the other side closes."""
        while (message := self._receive()) is not None:
            self._answer(message["q"])

    def _answer(self, request: list[Any]) -> None:
        try:
            operation, *arguments = request
            message = {"v": self._encode(self._serve(operation, list(map(self._decode, arguments))))}
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - all of it is the caller's to see
            message = {"e": [self._encode(type(error)), self._plain_arguments(error)]}
        self._send(message)

    def _plain_arguments(self, error: BaseException) -> Any:
        try:
            return self._encode([item if type(item) in (str, int, float) else str(item) for item in error.args])
        except Exception:  # noqa: BLE001 - its own __str__ failed
            return self._encode([])

    def _send(self, message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n")
        if len(data) > LONGEST:
            raise LinkError(f"a message of {len(data)} bytes")
        try:
            while data:
                data = data[os.write(self._write_fd, data) :]
        except OSError as error:
            raise LinkError(f"the process is gone: {error.strerror}") from error

    def _receive(self) -> "dict[str, Any] | None":
        while (end := self._buffer.find(b"\n")) < 0:
            data = os.read(self._read_fd, 1 << 16)
            if not data:
                return None
            self._buffer += data
            if len(self._buffer) > LONGEST:
                raise LinkError("an answer without end")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LinkError("an answer that is no message") from error
        if not isinstance(message, dict):
            raise LinkError("an answer that is no message")
        return message

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind in _ENCODERS:
            return _ENCODERS[kind](value)
        if kind is dict:
            return {"d": [[self._encode(key), self._encode(item)] for key, item in value.items()]}
        if kind in _TAGS:
            return {_TAGS[kind]: [self._encode(item) for item in value]}
        is_exception = isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "builtins"
        return {"x": value.__name__} if is_exception else {"h": self._export(value)}

    def _decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        try:
            ((tag, body),) = value.items()
            if tag in _CONTAINERS:
                return _CONTAINERS[tag](map(self._decode, body))
            if tag == "d":
                return {self._decode(key): self._decode(item) for key, item in body}
            if tag == "x":
                return _builtin_exception(body)
            if tag == "h":
                return self._resolve(body)
            return _SCALARS[tag](body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LinkError("a value that is none") from error


def _held(one: Any) -> "list[Any]":
    """`[value]`, what an object of a class below a built-in one holds, as a Counter a dict; of a number of another
    class, as a Fraction, the same number where there is one. Empty for everything else."""
    for kind, taken in _HELD.items():
        if issubclass(type(one), kind):
            return [taken(one)]
    if isinstance(one, numbers.Number):
        number: Any = one
        for taken in (int, float):
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                if taken(number) == number:
                    return [taken(number)]
    return []


_HELD: "dict[type, Callable[[Any], Any]]" = {
    **{kind: kind for kind in (int, float, complex, bytes, list, tuple, dict, set, frozenset)},
    str: str.__str__,
    bytearray: bytes,
}
_MUTABLE = (list, dict, set)
_CONTAINERS: "dict[str, Any]" = {"l": list, "t": tuple, "s": set, "z": frozenset}
_TAGS = {kind: tag for tag, kind in _CONTAINERS.items()}
_ENCODERS: "dict[type, Callable[[Any], Any]]" = {
    int: lambda value: value if value.bit_length() < _DECIMAL_BITS else {"i": hex(value)},
    float: lambda value: value if math.isfinite(value) else {"f": repr(value)},
    bytes: lambda value: {"b": value.hex()},
    complex: lambda value: {"c": [repr(value.real), repr(value.imag)]},
    range: lambda value: {"r": [value.start, value.stop, value.step]},
}
_SCALARS: "dict[str, Callable[[Any], Any]]" = {
    "i": lambda text: int(text, 16),
    "f": float,
    "b": bytes.fromhex,
    "c": lambda parts: complex(float(parts[0]), float(parts[1])),
    "r": lambda parts: range(*parts),
}


def _builtin_exception(name: str) -> "type[Exception]":
    """What is no ordinary exception, as SystemExit, is one here: it must not end the tests."""
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError


def _made(kind: Any, arguments: Any) -> Exception:
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise LinkError("an exception that is none")
    try:
        return kind(*arguments)
    except Exception:  # noqa: BLE001 - as UnicodeDecodeError, which wants other arguments
        return RuntimeError(f"{kind.__name__}: {arguments}")


class Server:
    """The candidate's end: its module, and the objects that the tests hold handles of."""

    def __init__(self, name: str) -> None:
        self._module = types.ModuleType(name)
        sys.modules[name] = self._module
        self._objects: dict[int, Any] = {}
        self.link: Link

    def export(self, value: Any) -> list[Any]:
        """A handle; of an exception class with its name and the built-in class below it. The same object has the same
        handle."""
        self._objects[id(value)] = value
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(kind for kind in value.__mro__ if kind.__module__ == "builtins")
            return [id(value), value.__name__, base.__name__]
        return [id(value)]

    def resolve(self, reference: list[Any]) -> Any:
        """An object of ours, or a function of the tests'."""
        number, *rest = reference
        if not rest:
            return self._objects[number]

        def call(*arguments: Any, **named: Any) -> Any:
            return self.link.request("call", number, list(arguments), named)

        return call

    def serve(self, operation: str, arguments: list[Any]) -> Any:
        """Answer the tests."""
        answers: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "name": lambda name: getattr(self._module, name),
            "call": _call,
            "get": getattr,
            "set": setattr,
            "isinstance": isinstance,
            "held": _held,
            **_OPERATORS,
        }
        return answers[operation](*arguments)

    def _load(self, code: str) -> list[str]:
        """Run the candidate's own code; the names that it defines."""
        program = compile(code, f"{self._module.__name__}.py", "exec", dont_inherit=True)
        exec(program, self._module.__dict__)  # noqa: S102 - what this process is for
        return [name for name in vars(self._module) if not name.startswith("__")]


def _call(function: Any, positional: list[Any], named: dict[str, Any]) -> Any:
    """What it returns, and what it left of the arguments that it could change."""
    return function(*positional, **named), [one if type(one) in _MUTABLE else None for one in positional]


def main() -> None:
    """In the candidate's process: `argv` has the two descriptors and the module's name."""
    read_fd, write_fd, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.argv = [f"{name}.py"]
    sys.path.insert(0, os.getcwd())
    server = Server(name)
    server.link = Link(read_fd, write_fd, server.export, server.resolve, server.serve)
    with contextlib.suppress(LinkError):
        server.link.serve_forever()
    os._exit(0)
