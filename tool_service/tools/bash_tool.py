"""The `bash` tool: a shell that lives as long as its trajectory, in the trajectory's sandbox."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tool_service.base import ToolAction, ToolObservation, TurnContext
from tool_service.tools.files import WorkspaceTool
from tool_service.tools.outcome import note_of, observation_of, value_of

RESTARTED = "[the shell was restarted: its directory, variables and jobs are lost]"
ENDED = "[the shell has ended: the next call starts another]"


class BashTool(WorkspaceTool):
    """Observations read like a terminal: stdout and stderr as they came, then `[exit code N]` unless it is 0."""

    name = "bash"
    description = (
        "Runs a bash script in a shell that keeps its directory, variables, functions and background jobs from call to "
        "call. Answers with what it prints, and with the exit code if that is not 0. There is no network and no "
        "terminal: commands read an empty stdin. Files written to outputs/ are shown."
    )

    class Arguments(msgspec.Struct):
        command: Annotated[str, msgspec.Meta(description="One command, or a script of several lines.")]

    async def execute(self, action: ToolAction[Arguments], turn: TurnContext) -> ToolObservation:
        script = action.arguments.command.strip("\r\n")
        if "\0" in script:
            return ToolObservation.failed("invalid action: a bash script cannot hold NUL characters", "INVALID_ACTION")
        result = await turn.run("bash", {"script": script}, self.config.cpu_seconds)
        value = value_of(result)
        if missing := value.get("missing"):
            detail = f"{missing}: choose an image with bash, or leave the tool out: plugins.exclude: [bash]"
            return ToolObservation.failed("the tool is not available now", "INFRA", detail)
        if value.get("restarted"):
            result = msgspec.structs.replace(result, restarted=True)
        note = note_of(result) or result.detail
        notes = [f"[{note}]"] if note else []
        if value.get("ended"):
            notes.append(ENDED)
        observation = observation_of(result, turn.observation_bytes, "\n".join(notes), RESTARTED)
        return await self.with_outputs(observation, result, turn)
