"""The code under test as the tests have it: its process, its module, and stand-ins for its objects.

The tests' end of the link that remote.py describes. What the candidate answers is never taken for more than a value or
a handle; whatever else goes wrong (it is gone, it lies, a test's time is over) ends its process, and the next question
starts another.
"""

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

from . import remote

_REMOTE_SOURCE: str = remote.__spec__.loader.get_source(remote.__name__)  # type: ignore[union-attr]
_MOST_STARTS_IN_VAIN = 2
"""A candidate that does not load again and again is not tried for every test."""


class Candidate:
    """The process of the code under test, started when it is first needed, and again when it is gone."""

    def __init__(self, code: str, module: str) -> None:
        self.code, self.module = code, module
        self.names: list[str] = []
        self.generation = 0
        """Which process it is; objects of an earlier one are gone."""
        self.lost = False
        """Whether one ended, or had to be ended, since somebody last set this: a test that swallows that fails, too."""
        self._process: subprocess.Popen[bytes] | None = None
        self._link: remote.Link | None = None
        self._starts_in_vain = 0
        self._objects: dict[int, Remote] = {}
        self._exceptions: dict[str, type[BaseException]] = {}
        """Of all its processes: tests import a class once."""
        self._functions: list[Callable[..., Any]] = []

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Have the candidate do something. Raises what it raised; whatever else goes wrong ends its process."""
        try:
            link = self._link or self._start()
            return link.request(operation, *arguments)
        except Exception:  # an answer as any other
            raise
        except BaseException:  # the link is broken, or the time is over: what would be read next is no answer
            self.lost = True
            self.stop()
            raise

    def _start(self) -> remote.Link:
        if self._starts_in_vain >= _MOST_STARTS_IN_VAIN:
            raise remote.LinkError(f"{self.module} does not load")
        self._starts_in_vain += 1
        self.generation += 1
        self._objects.clear()
        read, candidate_writes = os.pipe()
        candidate_reads, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-B", "-X", "utf8", "-c", f"{_REMOTE_SOURCE}\nmain()"),
                    *(str(candidate_reads), str(candidate_writes), self.module),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(candidate_reads, candidate_writes),
                start_new_session=True,
            )
        except BaseException:  # there is no room for it, or the time is over
            os.close(read)
            os.close(write)
            raise
        finally:
            os.close(candidate_reads)
            os.close(candidate_writes)
        self._ends = (read, write)
        self._link = remote.Link(read, write, self._export, self._resolve, self._serve, classes=self._exceptions)
        try:
            names = self.ask("load", self.code)
        except Exception as error:
            self.stop()
            raise remote.LinkError(f"{self.module} does not load: {type(error).__name__}: {error}") from error
        self.names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        self._starts_in_vain = 0
        return self._link

    def stop(self) -> None:
        """Kill the process, if there is one."""
        process, self._process, self._link = self._process, None, None
        if process is not None:
            kill(process)
            for fd in self._ends:
                os.close(fd)

    def _export(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return [value._remote_handle()]
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} of the tests' cannot be passed to the code under test")
        self._functions.append(value)
        return [len(self._functions) - 1, "function"]

    def _resolve(self, reference: list[Any]) -> Any:
        number = int(reference[0])
        if number not in self._objects:
            self._objects[number] = Remote(self, number)
        return self._objects[number]

    def _serve(self, operation: str, arguments: list[Any]) -> Any:
        """The candidate may call functions that it was given, and nothing else."""
        number, positional, named = arguments
        if operation != "call" or not 0 <= number < len(self._functions):
            raise remote.LinkError("a request that is none")
        return self._functions[number](*positional, **named)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """It leads a session of its own, so its group is known until it is reaped."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.wait()


class Remote:
    """An object of the candidate's. It answers for itself, but never says how it compares with a value of the tests':
    it would be its own judge, and an object that subtracts to 0 and is below every number passes anything.

    - What it holds, where its class is below a built-in one (`held_by`), is asked for, and compared here.
    - Else it equals no such value and is neither above nor below one; `in` goes through its elements; arithmetic with a
      number leads to objects, but not back to numbers; and what sets do with each other it does with no set.
    """

    __slots__ = ("_remote",)

    def __init__(self, candidate: Candidate, handle: int, name: str = "", judging: bool = False) -> None:
        """`judging`: that it came of arithmetic with a number of the tests'."""
        held: list[Any] = []  # once known, where it cannot change
        object.__setattr__(self, "_remote", [candidate, candidate.generation, handle, name, judging, held])

    def _remote_handle(self) -> int:
        candidate, generation, handle, name, *_ = self._remote
        if generation != candidate.generation:
            if not name:
                raise remote.LinkError("an object of a process that ended")
            again = candidate.ask("name", name)
            if not isinstance(again, Remote):
                raise remote.LinkError(f"{name} is no such object any more")
            handle = again._remote_handle()
            self._remote[1:3] = candidate.generation, handle
        return int(handle)

    def __getattr__(self, name: str) -> Any:
        found = self._remote[0].ask("get", self, name)
        return _SetMethod(found, self, name) if name in _SET_METHODS and isinstance(found, Remote) else found

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote[0].ask("set", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        answer, left = self._remote[0].ask("call", self, list(arguments), named)
        for mine, theirs in zip(arguments, left, strict=True):
            if theirs is not None and type(mine) is type(theirs):
                _take_over(mine, theirs)
        return answer

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._remote[0].ask("isinstance", value, self) is True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return self._remote[0].ask("__eq__", self, other) is True
        held = held_by(self)
        return bool(held) and bool(held[0] == other)

    def __contains__(self, item: object) -> bool:
        if isinstance(item, Remote):
            return self._remote[0].ask("__contains__", self, item) is True
        held = held_by(self)
        elements: Any = self  # __iter__ is among the operators below
        return item in held[0] if held else any(item == element for element in elements)

    def __hash__(self) -> int:
        return hash(self._remote[2])


def _take_over(mine: Any, theirs: Any) -> None:
    """What the candidate did to a list, dict or set that it was given."""
    if mine != theirs:
        mine.clear()
        (mine.extend if isinstance(mine, list) else mine.update)(theirs)


def held_by(one: Remote) -> list[Any]:
    """`[value]`, as remote.py has it, or nothing. A number or text stays what it was said to be: or it would be above
    one bound and below the other."""
    candidate, _, _, _, judging, known = one._remote
    if judging or known:
        return [] if judging else list(known)
    held = candidate.ask("held", one)
    if type(held) is not list or any(isinstance(value, Remote) for value in held):
        return []
    known.extend(value for value in held if isinstance(value, int | float | complex | str | bytes))
    return held


def _set_held_by(one: Remote) -> Any:
    for held in held_by(one):
        if isinstance(held, set | frozenset):
            return held
    raise TypeError("an object of the code under test that is no set is asked for none")


def _forward(name: str) -> Any:
    def method(self: Remote, *arguments: Any) -> Any:
        answer = self._remote[0].ask(name, self, *arguments)
        kind = _ANSWERS.get(name)
        if kind is not None and type(answer) is not kind:
            raise TypeError(f"{name} answered {type(answer).__name__}")
        if name in _TO_NUMBERS and self._remote[4]:
            return _no_number(answer, name)
        return answer

    return method


def _comparison(name: str) -> Any:
    def method(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._remote[0].ask(name, self, other)
        if held := held_by(self):
            return remote._OPERATORS[name](held[0], other)
        raise TypeError(f"an object of the code under test does not say how it compares ({name}) with a value")

    return method


def _arithmetic(name: str) -> Any:
    def method(self: Remote, other: Any) -> Any:
        if isinstance(other, set | frozenset):
            return remote._OPERATORS[name](_set_held_by(self), other)
        if not isinstance(other, int | float | complex):
            answer = self._remote[0].ask(name, self, other)
            judging = self._remote[4] or (isinstance(other, Remote) and other._remote[4])
            return _no_number(answer, name) if judging else answer
        if (held := held_by(self)) and isinstance(held[0], int | float | complex):
            return remote._OPERATORS[name](held[0], other)
        return _no_number(self._remote[0].ask(name, self, other), name)

    return method


def _no_number(answer: Any, name: str) -> Any:
    """What came of a number of the tests' is no number of the candidate's choice."""
    if isinstance(answer, Remote):
        return Remote(answer._remote[0], answer._remote[2], judging=True)
    if isinstance(answer, int | float | complex):
        raise TypeError(f"an object of the code under test makes numbers ({name}) of those that it is given")
    return answer


_ANSWERS = {"__str__": str, "__repr__": str, "__bool__": bool, "__len__": int, "__int__": int, "__float__": float}
_TO_NUMBERS = frozenset(
    f"__{name}__" for name in ("bool", "int", "float", "index", "round", "neg", "pos", "abs", "invert")
)
for _name in remote._OPERATORS:
    if _name in remote._COMPARISONS:
        setattr(Remote, _name, _comparison(_name))
    elif _name in remote._ARITHMETIC:
        setattr(Remote, _name, _arithmetic(_name))
    elif _name not in ("__eq__", "__contains__"):
        setattr(Remote, _name, _forward(_name))


class _SetMethod(Remote):
    """What has the name of a method of sets, and would learn the set of the tests' that it is called with, as by
    `assertSetEqual`."""

    __slots__ = ("_owner",)

    def __init__(self, found: Remote, owner: Remote, name: str) -> None:
        super().__init__(found._remote[0], found._remote_handle())
        object.__setattr__(self, "_owner", (owner, name))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not any(isinstance(one, set | frozenset) for one in arguments):
            return super().__call__(*arguments, **named)
        owner, name = self._owner
        return getattr(_set_held_by(owner), name)(*arguments)


_SET_METHODS = frozenset(
    ("difference", "intersection", "symmetric_difference", "union", "isdisjoint", "issubset", "issuperset")
)


class Module(types.ModuleType):
    """What tests import. `import *` gives nothing: what tests use is lent to them before (see worker_tests.py), and
    their own `math` or `abs` stays theirs."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate.module)
        self.__dict__["_candidate"] = candidate
        self.__dict__["__all__"] = []

    def __getattr__(self, name: str) -> Any:
        candidate: Candidate = self.__dict__["_candidate"]
        if name.startswith("__"):
            raise AttributeError(name)
        found = candidate.ask("name", name)
        if isinstance(found, Remote):
            found._remote[3] = name
        return found
