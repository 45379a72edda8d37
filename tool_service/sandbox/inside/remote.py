"""Calls between tests and the code under test, which run in two processes: both ends of the link.

The candidate's process is a clean interpreter that runs this file's text and nothing else of ours: it sees the calls
that are made of it, never the tests, their source or what they expect. What crosses are values of exactly the built-in
types (numbers, text, bytes, lists, tuples, dicts, sets, ranges) and the standard library's exact numbers, by value; all
else stays where it is and is a *handle* on the other side. So nothing that the candidate returns brings code along: no
`__eq__`, no `__class__`, no pickle. Exception classes cross by their names and those of the classes below them.

Messages are lines of JSON: a request `{"q": [operation, ...]}`, or the answer to the last one, `{"v": value}` or
`{"e": [exception class, arguments, attributes]}`. Whoever waits for an answer serves requests meanwhile, so that
functions can be passed to the candidate. A call's lists, dicts and sets come back with its answer, as they were left.

This file is also run as text, alone: it imports nothing but the standard library.
"""

import builtins
import contextlib
import importlib
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
_FRACTION_DIGITS = 1 << 16
"""Of numerator and denominator, in hexadecimal: what divides longer ones cannot be stopped in time."""
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
        *,
        classes: "dict[str, type[BaseException]]",
    ) -> None:
        """`classes`: exception classes by what is said of them, those of this side and stand-ins for the other's."""
        self._read_fd, self._write_fd = read_fd, write_fd
        self._export, self._serve, self._classes = export, serve, classes
        self._decoders: dict[str, Callable[[Any], Any]] = {
            **_SCALARS,
            "d": self._decode_dict,
            "h": resolve,
            "k": self._decode_class,
            "x": _builtin_exception,
        }
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
                raise _made(*map(self._decode, message["e"]))
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
            parts = (self._arguments, vars)
            message = {"e": [self._encode(type(error)), *(self._part_of(error, part) for part in parts)]}
        self._send(message)

    @staticmethod
    def _arguments(error: BaseException) -> list[Any]:
        return [item if type(item) in _BY_VALUE else str(item) for item in error.args]

    def _part_of(self, error: BaseException, part: Callable[[BaseException], Any]) -> Any:
        try:
            return self._encode(part(error))
        except Exception:  # noqa: BLE001 - its own __str__ failed, or it holds what cannot cross
            return None

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
        if isinstance(value, type) and issubclass(value, BaseException):
            return self._encode_class(value)
        texts = _EXACT.get(f"{kind.__module__}.{kind.__name__}")
        return {"n": [kind.__name__, *texts(value)]} if texts else {"h": self._export(value)}

    def _encode_class(self, kind: type[BaseException]) -> Any:
        if kind.__module__ == "builtins":
            return {"x": kind.__name__}
        bases = [self._encode_class(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        said = [kind.__module__, kind.__qualname__, bases]
        self._classes[json.dumps(said)] = kind
        return {"k": said}

    def _decode_class(self, said: list[Any]) -> type[BaseException]:
        """The same class for the same words, so that one that was imported is the one that is raised."""
        key = json.dumps(said)
        if key not in self._classes:
            module, name, bases = said
            below = tuple(dict.fromkeys(map(self._decode, bases)))
            made = type(name.rpartition(".")[2], below, {"__module__": str(module), "__qualname__": name})
            if not issubclass(made, Exception):
                raise TypeError("no exception")
            self._classes[key] = made
        return self._classes[key]

    def _decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        try:
            ((tag, body),) = value.items()
            if tag in _CONTAINERS:
                return _CONTAINERS[tag](map(self._decode, body))
            return self._decoders[tag](body)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise LinkError("a value that is none") from error

    def _decode_dict(self, items: list[Any]) -> dict[Any, Any]:
        return {self._decode(key): self._decode(item) for key, item in items}


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
    "n": lambda said: _exact(*said),
}
_BY_VALUE = frozenset({str, bool, type(None), dict, *_ENCODERS, *_TAGS})
_EXACT: "dict[str, Callable[[Any], list[str]]]" = {
    "fractions.Fraction": lambda value: [hex(value.numerator), hex(value.denominator)],
    "decimal.Decimal": lambda value: [str(value)],
}
"""Numbers of the standard library that cross as others do, as texts."""


def _exact(name: str, *texts: str) -> Any:
    if name == "Decimal":
        return importlib.import_module("decimal").Decimal(*texts)
    if name != "Fraction" or max(map(len, texts)) > _FRACTION_DIGITS:
        raise ValueError("no number")
    return importlib.import_module("fractions").Fraction(*(int(text, 16) for text in texts))


def _builtin_exception(name: str) -> "type[Exception]":
    """What is no ordinary exception, as SystemExit, is one here: it must not end the tests."""
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError


def _made(kind: Any, arguments: Any, attributes: Any) -> Exception:
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise LinkError("an exception that is none")
    try:
        error = kind(*(arguments or ()))
    except Exception:  # noqa: BLE001 - as ExceptionGroup, which wants other arguments
        error = RuntimeError(f"{kind.__name__}: {arguments}")
    if isinstance(attributes, dict):
        vars(error).update((name, value) for name, value in attributes.items() if isinstance(name, str))
    return error


class Server:
    """The candidate's end: its module, and the objects that the tests hold handles of."""

    def __init__(self, name: str) -> None:
        self._module = types.ModuleType(name)
        sys.modules[name] = self._module
        self._objects: dict[int, Any] = {}
        self.link: Link

    def export(self, value: Any) -> list[Any]:
        """A handle. The same object has the same one."""
        self._objects[id(value)] = value
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
        program = compile(code.removeprefix("\ufeff"), f"{self._module.__name__}.py", "exec", dont_inherit=True)
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
    server.link = Link(read_fd, write_fd, server.export, server.resolve, server.serve, classes={})
    with contextlib.suppress(LinkError):
        server.link.serve_forever()
    os._exit(0)
