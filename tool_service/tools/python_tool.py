"""The `python` tool: a Python session that lives as long as its trajectory, in the trajectory's sandbox."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tool_service.action import cut
from tool_service.base import BaseTool, NoContext, ToolAction, ToolObservation, TurnContext
from tool_service.sandbox.base import TurnResult
from tool_service.tools.outcome import RESTARTED, data_of, error_of, note_of


class PythonTool(BaseTool):
    """Observations read like a notebook's cell: what was printed, then the value of the last expression."""

    name = "python"
    description = (
        "Runs Python code in a session that keeps its variables from call to call. Answers with what the code prints, "
        "then with the value of its last expression, or with a traceback. There is no network; files live in the "
        "working directory."
    )
    needs_sandbox = True
    Context = NoContext

    class Arguments(msgspec.Struct):
        code: Annotated[str, msgspec.Meta(description="Python source. The value of a last expression is shown.")]

    async def execute(self, action: ToolAction[Arguments], turn: TurnContext) -> ToolObservation:
        # Around the code only line breaks are dropped: the indentation of its first line is the program's business,
        # unless there is but one line (`<python> 1 + 1 </python>`).
        code = action.arguments.code.strip("\r\n")
        result = await turn.run("python", {"code": code if "\n" in code else code.strip()})
        return observation_of(result, turn.observation_bytes)


def observation_of(result: TurnResult, limit: int) -> ToolObservation:
    """A turn's result as text: stdout, then stderr, then a note for an end that neither of them tells of.

    What is beyond `limit` bytes is cut from stdout first, so that a flood of prints does not hide the traceback.
    """
    stdout = result.stdout.decode("utf-8", "replace").rstrip("\n")
    stderr = result.stderr.decode("utf-8", "replace").rstrip("\n")
    tail = "\n".join(part for part in (stderr, note_of(result)) if part)
    size = max(result.total_bytes, len(stdout.encode()) + len(tail.encode()))
    truncated = result.truncated or size > limit
    if truncated:
        tail, tail_bytes = cut(tail, limit // 2 if stdout else limit)
        room = max(limit - tail_bytes, limit // 2)
        if len(result.stdout) > room or result.truncated:
            stdout, _ = cut(stdout, room, result.total_bytes - len(result.stderr)) if stdout else ("", 0)
    lines = [RESTARTED] if result.restarted else []
    return ToolObservation(
        "\n".join([*lines, *(part for part in (stdout, tail) if part)]),
        error=error_of(result),
        detail=result.detail,
        data=data_of(result) or None,
        truncated=truncated,
        full_bytes=size if truncated else None,
    )
