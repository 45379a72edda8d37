"""What the agent is told about a sandbox turn's end that the program's own output does not tell."""

from __future__ import annotations

from tool_service.action import ErrorName, ToolObservation
from tool_service.sandbox.base import TurnResult, TurnStatus

RESTARTED = "[the session was restarted: earlier variables are lost]"
"""First line of the first observation after in-memory state was lost."""


def error_of(result: TurnResult) -> ErrorName | None:
    """The observation's error; None for an ordinary result."""
    return None if result.status is TurnStatus.OK else result.status.value  # type: ignore[return-value]


def note_of(result: TurnResult) -> str:
    """A line for the agent; empty when the output says it all."""
    exit_code = "" if result.exit_code is None else f"exit code {result.exit_code}"
    notes = {
        TurnStatus.OK: "",
        TurnStatus.TOOL_ERROR: exit_code,
        TurnStatus.TIMEOUT: f"timeout: stopped after {max(result.wall_seconds, result.cpu_seconds):.3g} s",
        TurnStatus.MEMORY: "memory limit reached",
        TurnStatus.OUTPUT_LIMIT: f"output limit reached: stopped after {result.total_bytes} bytes",
        TurnStatus.SIGNALED: f"killed by signal {result.signal}",
        TurnStatus.SESSION_LOST: "session lost: the next call starts afresh",
        TurnStatus.INFRA: "the tool failed by no fault of yours",
    }
    return notes[result.status]


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


def failure_of(result: TurnResult) -> ToolObservation:
    """The observation of a turn that has no output of its own and did not end well."""
    text = note_of(result) or result.detail
    return ToolObservation(f"error: {text}", error=error_of(result), detail=result.detail, data=data_of(result) or None)
