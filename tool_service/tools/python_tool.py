"""The `python` tool: a Python session that lives as long as its trajectory, in the trajectory's sandbox."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tool_service.base import ToolAction, ToolObservation, TurnContext
from tool_service.tools.files import WorkspaceConfig, WorkspaceTool
from tool_service.tools.outcome import observation_of


class PythonTool(WorkspaceTool):
    """Observations read like a notebook's cell: what was printed, then the value of the last expression, then figures
    and files."""

    name = "python"
    description = (
        "Runs Python code in a session that keeps its variables from call to call. Answers with what the code prints, "
        "then with the value of its last expression, or with a traceback. There is no network; files live in the "
        "working directory. Open matplotlib figures and files written to outputs/ are shown."
    )

    class Config(WorkspaceConfig, frozen=True):
        """
        import_paths: folders inside the sandbox that are added to `sys.path`. To let the code import packages of this
            host, name their folder here and in `sandbox.process.read_only_paths`.
        """

        import_paths: tuple[str, ...] = ()

    class Arguments(msgspec.Struct):
        code: Annotated[str, msgspec.Meta(description="Python source. The value of a last expression is shown.")]

    config: Config

    async def execute(self, action: ToolAction[Arguments], turn: TurnContext) -> ToolObservation:
        # Around the code only line breaks are dropped: the indentation of its first line is the program's business,
        # unless there is but one line (`<python> 1 + 1 </python>`).
        code = action.arguments.code.strip("\r\n")
        result = await turn.run(
            "python",
            {
                "code": code if "\n" in code else code.strip(),
                "figures": self.config.max_output_files > 0,
                "paths": list(self.config.import_paths),
            },
            self.config.cpu_seconds,
        )
        return await self.with_outputs(observation_of(result, turn.observation_bytes), result, turn)
