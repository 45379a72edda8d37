"""A die that the agent can roll, and that the task can load."""

import random
from typing import Annotated

import msgspec

from tool_service.base import BaseTool, ToolAction, ToolConfig, ToolObservation, TurnContext


class DiceTool(BaseTool):
    name = "dice"
    description = "Rolls a die with the given number of sides and says what came up."

    class Config(ToolConfig, frozen=True):  # what the operator sets, under `tools.dice`
        max_sides: int = 100

    class Context(msgspec.Struct):  # what one trajectory brings along
        seed: int = 0

    class Arguments(msgspec.Struct):  # what the agent passes in a call
        sides: Annotated[int, msgspec.Meta(ge=2, description="Number of sides.")]

    config: Config

    async def reset(self, context: Context) -> None:
        self.random = random.Random(context.seed)

    async def execute(self, action: ToolAction[Arguments], turn: TurnContext) -> ToolObservation:
        if action.arguments.sides > self.config.max_sides:
            return ToolObservation.failed(f"a die has at most {self.config.max_sides} sides")
        roll = self.random.randint(1, action.arguments.sides)
        return ToolObservation(str(roll), data={"roll": roll})
