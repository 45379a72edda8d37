"""The one tree of errors, and the one map between it and gRPC status codes.

Four mechanisms, each with its own place:

1. What an agent did wrong, or what happened to its code, is *data*: an `ErrorKind` in an observation, never an
   exception.
2. What a client did wrong, or what a service cannot do now, is a `TurnwireError`. It crosses the wire as a gRPC status
   and is raised again, as the same class, in the client.
3. What is wrong with a config is a `ConfigError`, which lists every problem at once.
4. A bug is any other exception: the server logs it under an opaque id and tells the client only that id.

To add an error: subclass the class whose status code fits. Each class is also the standard type that Python users would
expect (`ValueError`, `LookupError`, `TimeoutError` …).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc


class TurnwireError(Exception):
    """Root of all errors raised on purpose. `retry_after` (seconds) is set where trying again can help."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class InvalidRequestError(TurnwireError, ValueError):
    """The request is malformed, or holds a value that is not allowed."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class WrongOrderError(TurnwireError, RuntimeError):
    """The request is well formed but not possible in the present state, as a turn with the wrong number."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class NotFoundError(TurnwireError, LookupError):
    """There is no such tool, session or run."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(TurnwireError, ValueError):
    """The id is taken."""

    code = grpc.StatusCode.ALREADY_EXISTS


class UnauthenticatedError(TurnwireError, PermissionError):
    """The service asks for a token, and none was shown, or one that it does not know."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(TurnwireError, PermissionError):
    """The token's role is too small. The message names the role that is needed."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ExhaustedError(TurnwireError, RuntimeError):
    """A limit is reached: sessions, sandboxes, queue. Try again after `retry_after`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(TurnwireError, ConnectionError):
    """The service cannot be reached, is draining, or lost what it needs. Try again."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineError(TurnwireError, TimeoutError):
    """A deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class TakenOverError(TurnwireError, RuntimeError):
    """Another stream has taken over this session."""

    code = grpc.StatusCode.ABORTED


class CancelledByPeerError(TurnwireError, RuntimeError):
    """The other side cancelled."""

    code = grpc.StatusCode.CANCELLED


class InternalError(TurnwireError, RuntimeError):
    """A bug on the other side. The message holds the id under which its log tells more."""

    code = grpc.StatusCode.INTERNAL


class UnsupportedError(TurnwireError, NotImplementedError):
    """Refused, because it cannot work here; the message says why and what can."""

    code = grpc.StatusCode.UNIMPLEMENTED


class InfraError(TurnwireError, RuntimeError):
    """Our infrastructure failed (a sandbox died, an engine crashed). Retryable; never training data."""

    code = grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config: where, what, and what to do about it."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigError(TurnwireError, ValueError):
    """A config that cannot be used. `problems` has everything that is wrong with it."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, problems: Sequence[Problem], source: str = "config") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))


_CLASS_OF_CODE: dict[grpc.StatusCode, type[TurnwireError]] = {
    cls.code: cls
    for cls in (
        InvalidRequestError,
        WrongOrderError,
        NotFoundError,
        AlreadyExistsError,
        UnauthenticatedError,
        PermissionDeniedError,
        ExhaustedError,
        UnavailableError,
        DeadlineError,
        TakenOverError,
        CancelledByPeerError,
        InternalError,
        UnsupportedError,
    )
}


def error_class(code: grpc.StatusCode) -> type[TurnwireError]:
    """The class that a client raises for a status code."""
    return _CLASS_OF_CODE.get(code, InternalError)
