"""A tool that takes as long as it is told, to stand for tools with heavy-tailed latencies."""

import asyncio
from typing import Annotated

import msgspec

from tool_service.base import BaseTool, ToolAction, ToolObservation, TurnContext


class WaitTool(BaseTool):
    name = "wait"
    description = "Waits for the given number of seconds, then answers `done`."

    class Arguments(msgspec.Struct):
        seconds: Annotated[float, msgspec.Meta(ge=0, description="How long.")]

    async def execute(self, action: ToolAction[Arguments], turn: TurnContext) -> ToolObservation:
        await asyncio.sleep(action.arguments.seconds)
        return ToolObservation("done")
