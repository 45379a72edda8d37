"""What the agent is told about a sandbox turn's end that the program's own output does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tool_service.action import ErrorName, ToolObservation, cut
from tool_service.sandbox.base import TurnResult, TurnStatus

RESTARTED = "[the session was restarted: earlier variables are lost]"
"""First line of the first observation after in-memory state was lost."""


def error_of(result: TurnResult) -> ErrorName | None:
    """The observation's error; None for an ordinary result."""
    return None if result.status is TurnStatus.OK else result.status.value  # type: ignore[return-value]


def note_of(result: TurnResult) -> str:
    """A line for the agent; empty when the output says it all."""
    if result.status is TurnStatus.OK:
        return ""
    exit_code = "" if result.exit_code is None else f"exit code {result.exit_code}"
    notes = {
        TurnStatus.TOOL_ERROR: exit_code or ("" if result.stderr else result.detail),
        TurnStatus.TIMEOUT: f"timeout: stopped after {max(result.wall_seconds, result.cpu_seconds):.3g} s",
        TurnStatus.MEMORY: "memory limit reached",
        TurnStatus.OUTPUT_LIMIT: f"output limit reached: stopped after {result.total_bytes} bytes",
        TurnStatus.SIGNALED: f"killed by signal {result.signal}",
        TurnStatus.SESSION_LOST: "session lost: the next call starts afresh",
        TurnStatus.INFRA: "the tool failed by no fault of yours",
    }
    return notes[result.status]


def value_of(result: TurnResult) -> Mapping[str, Any]:
    """The value of a turn whose runtime gives an object or nothing; what is no object was made up by the program."""
    return result.value if isinstance(result.value, dict) else {}


def data_of(result: TurnResult) -> dict[str, object]:
    """What programs may want to know of a turn; empty when there is nothing to know."""
    data: dict[str, object] = {}
    if result.exit_code is not None:
        data["exit_code"] = result.exit_code
    if result.signal is not None:
        data["signal"] = result.signal
    if result.restarted:
        data["restarted"] = True
    return data


def observation_of(
    result: TurnResult, limit: int, note: str | None = None, restarted: str = RESTARTED
) -> ToolObservation:
    """A turn's result as text: stdout, then stderr, then a note (`note_of` unless given) for an end that neither of
    them tells of. `restarted` comes first where state was lost.

    What is beyond `limit` bytes is cut from stdout first, so that a flood of prints does not hide the traceback.
    """
    stdout = result.stdout.decode("utf-8", "replace").rstrip("\n")
    stderr = result.stderr.decode("utf-8", "replace").rstrip("\n")
    tail = "\n".join(part for part in (stderr, note_of(result) if note is None else note) if part)
    size = max(result.total_bytes, len(stdout.encode()) + len(tail.encode()))
    truncated = result.truncated or size > limit
    if truncated:
        tail, tail_bytes = cut(tail, limit // 2 if stdout else limit)
        room = max(limit - tail_bytes, limit // 2)
        if len(result.stdout) > room or result.truncated:
            stdout, _ = cut(stdout, room, result.total_bytes - len(result.stderr)) if stdout else ("", 0)
    lines = [restarted] if result.restarted else []
    return ToolObservation(
        "\n".join([*lines, *(part for part in (stdout, tail) if part)]),
        error=error_of(result),
        detail=result.detail,
        data=data_of(result) or None,
        truncated=truncated,
        full_bytes=size if truncated else None,
    )


def failure_of(result: TurnResult, more: str = "") -> ToolObservation:
    """The observation of a turn that has no output of its own and did not end well; `more` is what else to say."""
    text = (note_of(result) or result.detail) + more
    return ToolObservation(f"error: {text}", error=error_of(result), detail=result.detail, data=data_of(result) or None)
