"""The runtimes that a supervisor can start: one module each, `worker_NAME`.

A runtime module has `encode(payload) -> bytes`, run by the supervisor (trusted; raises ValueError for a payload that
makes no sense), and `Session(context)` with `run(body, seconds) -> Reply`, run in the worker, next to untrusted code.
"""

import functools
import importlib
from typing import Any, NamedTuple, Protocol, cast

NAMES = ("bash", "python", "sql", "tests")

PROCESSES = {"bash": 2, "python": 1, "sql": 1, "tests": 1}
"""Of a worker between two turns, when nothing of a program's is left but what it keeps in mind: bash has its shell."""

OK, ERROR, MEMORY, TIMEOUT, EXHAUSTED, SIGNALED, LOST = range(7)
"""What a worker may say of a turn. It is believed no further than these words: see supervisor.py. `EXHAUSTED` is
`MEMORY` of a worker that holds so much that it cannot go on, and asks to be ended. `SIGNALED` (with the signal for an
exit code) and `LOST` are of a program that the worker runs, and that ended; the worker itself goes on."""

NO_EXIT_CODE = -1


class Reply(NamedTuple):
    tag: int
    exit_code: int = NO_EXIT_CODE
    body: bytes = b""
    """`OK`: the value as JSON, or empty. Otherwise what `failure` makes."""


def failure(text: str, value: bytes = b"") -> bytes:
    """The body of any other answer: a line for people, and the value as JSON where there is one."""
    return text.replace("\0", "").encode("utf-8", "replace")[:2000] + (b"\0" + value if value else b"")


class Context(NamedTuple):
    workspace: str
    value_bytes: int
    """Largest body that the supervisor accepts."""


class Session(Protocol):
    def run(self, body: bytes, seconds: float) -> Reply: ...


class Runtime(Protocol):
    def encode(self, payload: dict[str, Any]) -> bytes: ...

    @property
    def Session(self) -> Any: ...  # noqa: N802 - a class


@functools.cache
def find(name: str) -> Runtime:
    """One of `NAMES`. They are all imported before any program runs."""
    return cast(Runtime, importlib.import_module(f"{__package__}.worker_{name}"))
