"""A tool that does nothing, to measure what a turn costs around it."""

from tool_service.base import BaseTool, TextArguments, ToolAction, ToolObservation, TurnContext


class NothingTool(BaseTool):
    name = "nothing"
    description = "Answers `ok`."

    async def execute(self, action: ToolAction[TextArguments], turn: TurnContext) -> ToolObservation:
        return ToolObservation("ok")
