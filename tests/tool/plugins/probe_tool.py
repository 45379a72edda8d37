"""Tools that tests look through: they do nothing, count, wait, fail, in ways that can be told apart from outside."""

import asyncio
from typing import Annotated, Any, ClassVar

import msgspec

from tool_service.base import BaseTool, Media, ToolAction, ToolConfig, ToolObservation, TurnContext
from turnwire.errors import ExhaustedError, InvalidRequestError


class NoopTool(BaseTool):
    name = "noop"
    description = "Does nothing."

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        return ToolObservation("ok")


class CountTool(BaseTool):
    """Its state is a number of the trajectory's own; `executed` counts for all, as a test sees it."""

    name = "count"
    description = "Counts the calls of this trajectory."
    executed: ClassVar[int] = 0
    alive: ClassVar[int] = 0

    class Config(ToolConfig, frozen=True):
        step: Annotated[int, msgspec.Meta(ge=1)] = 1

    class Context(msgspec.Struct):
        start: Annotated[int, msgspec.Meta(ge=0)] = 0
        nested: dict[str, list[int]] = msgspec.field(default_factory=dict)

    class Arguments(msgspec.Struct):
        by: int
        note: str = ""

    config: Config

    async def reset(self, context: Context) -> None:
        CountTool.alive += 1
        self.number = context.start

    async def execute(self, action: ToolAction[Arguments], turn: TurnContext) -> ToolObservation:
        CountTool.executed += 1
        self.number += action.arguments.by * self.config.step
        return ToolObservation(str(self.number), data={"number": self.number})

    async def close(self) -> None:
        CountTool.alive -= 1


class SleepTool(BaseTool):
    """Waits for the seconds that its text says, then answers them."""

    name = "sleep"
    description = "Waits."
    executed: ClassVar[int] = 0

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        await asyncio.sleep(float(action.arguments.text))
        SleepTool.executed += 1
        return ToolObservation(action.arguments.text)


class HoldTool(BaseTool):
    """Waits until a test lets go; `executed` counts for all."""

    name = "hold"
    description = "Waits until it is let go."
    let_go: ClassVar[asyncio.Event] = asyncio.Event()
    executed: ClassVar[int] = 0

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        await HoldTool.let_go.wait()
        HoldTool.executed += 1
        return ToolObservation("let go")


class TroubleTool(BaseTool):
    """Fails, or exaggerates, as its text says."""

    name = "trouble"
    description = "Makes trouble."
    modalities = ("text", "image", "video")

    class Context(msgspec.Struct):
        bad: str = ""

    async def reset(self, context: Context) -> None:
        if context.bad == "refuse":
            raise InvalidRequestError("context of tool 'trouble': refused")
        if context.bad == "crash":
            raise RuntimeError("a secret of the service")

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        what = action.arguments.text
        if what == "crash":
            raise ValueError("a secret of the service")
        if what == "exhausted":
            raise ExhaustedError("the far end is busy")
        if what == "nothing":
            return None  # type: ignore[return-value]
        observations = {
            "done": ToolObservation("bye", done=True),
            "long": ToolObservation("é" * 30_000),
            "surrogate": ToolObservation("half \ud800 a pair", data={"\ud800": "\ud800"}),
            "data": ToolObservation("data", data={"big": 2**70, "inf": float("inf"), "list": [1, 1.5, None, True, {}]}),
            "bad data": ToolObservation("bad data", data={"object": object()}),
            "deep data": ToolObservation("deep", data=_nested(200)),
            "much data": ToolObservation("much", data={"x": "y" * 2_000_000}),
            "pictures": ToolObservation(
                ["see ", Media(b"1234", "image/png"), " and ", Media(b"56789012345", "video/mp4"), "!" * 40]
            ),
        }
        return observations[what]


def _nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"in": value}
    return value
