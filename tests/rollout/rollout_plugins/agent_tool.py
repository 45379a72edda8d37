"""Tools for the agent loop's tests: each does one thing that the loop must cope with."""

# ruff: noqa: ASYNC110 - the test opens the gate by making a file

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from tool_service.base import BaseTool, Media, ToolAction, ToolObservation, TurnContext


class EchoTool(BaseTool):
    name = "echo"
    description = "Gives the text back."

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        return ToolObservation(action.arguments.text, data={"length": len(action.arguments.text)})


class GateTool(BaseTool):
    name = "gate"
    description = "Waits until the file named in the text exists."

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        while not await asyncio.to_thread(Path(action.arguments.text).exists):
            await asyncio.sleep(0.005)
        return ToolObservation("open")


class EndTool(BaseTool):
    name = "end"
    description = "Says that the task is over."

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        return ToolObservation("over", done=True)


class BrokenTool(BaseTool):
    name = "broken"
    description = "Fails in a way that is not the agent's doing."

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        raise RuntimeError("out of order")


class PictureTool(BaseTool):
    name = "picture"
    description = "Shows an image."
    modalities = ("text", "image")

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        return ToolObservation([Media(b"1234", "image/png")])


class SlowTool(BaseTool):
    name = "slow"
    description = "Is not ready until the file of its context exists."

    class Context(msgspec.Struct):
        file: str

    async def reset(self, context: Context) -> None:
        Path(context.file).with_suffix(".asked").touch()
        while not await asyncio.to_thread(Path(context.file).exists):
            await asyncio.sleep(0.005)

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        return ToolObservation("ready")
