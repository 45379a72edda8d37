"""What goes into a tool and what comes out: one call of an agent, and what the agent sees of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

ErrorName = Literal[
    "INVALID_ACTION", "TOOL_ERROR", "TIMEOUT", "MEMORY", "OUTPUT_LIMIT", "SIGNALED", "SESSION_LOST", "INFRA"
]
"""The names of the wire's `ErrorKind` (protos/turnwire/v1/common.proto says what each means)."""

ArgumentsT = TypeVar("ArgumentsT")


class Media(msgspec.Struct, frozen=True):
    """An image or a video in an observation."""

    data: bytes
    """Encoded."""
    media_type: str
    """IANA media type, as "image/png"."""


class ToolAction(msgspec.Struct, Generic[ArgumentsT]):
    """One call that the agent made."""

    tool: str
    arguments: ArgumentsT
    """Checked by the tool's `Arguments`. Meaningless when `error` is set; `execute` never sees such an action."""
    text: str = ""
    """What stood between the tags or fences; empty for structured calls."""
    start: int = 0
    """Where the call begins in the action's text."""
    end: int = 0
    """Where it ends."""
    call_id: str = ""
    error: str = ""
    """Why this is not a call that can be executed, in words that help the agent to mend it."""


class ToolObservation(msgspec.Struct):
    """What came of one action."""

    content: str | Sequence[str | Media] = ""
    """What the agent sees: text, or texts and media in order."""
    error: ErrorName | None = None
    """None for an ordinary result."""
    detail: str = ""
    """For operators and logs; the agent does not see it."""
    data: Mapping[str, Any] | None = None
    """Structured result for programs (rewards, harnesses): JSON values."""
    done: bool = False
    """The task is over: the trajectory ends after this turn."""
    truncated: bool = False
    """The tool itself has cut the text. What is too long after that, the service cuts."""
    full_bytes: int | None = None
    """How long the text would have been, in bytes, when the tool has cut it."""

    @classmethod
    def failed(cls, text: str, error: ErrorName = "TOOL_ERROR", detail: str = "") -> ToolObservation:
        """An observation of something that went wrong, with what the agent should read about it."""
        return cls(text, error=error, detail=detail)


def cut(text: str, limit: int, full_bytes: int | None = None) -> tuple[str, int]:
    """Keep the head of a text that is longer than `limit` bytes of UTF-8, with a note of how long it was.

    Returns the text and the bytes that it had. `full_bytes` says how long it was before an earlier cut. The note comes
    on top of the limit.
    """
    if full_bytes is None and text.isascii() and len(text) <= limit:
        return text, len(text)
    data = text.encode("utf-8", "replace")
    full = len(data) if full_bytes is None else max(full_bytes, len(data))
    if full <= limit:
        return data.decode("utf-8"), full
    head = data[:limit].decode("utf-8", "ignore")
    return f"{head}\n[cut: first {len(head.encode())} of {full} bytes shown]", full
