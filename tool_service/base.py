'''What a tool is: one small Python file with one class. This module is all that a tool needs to import.

A complete tool (examples/tools/dice_tool.py; docs/tools.md says how to serve and test it):

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

That is all: `<dice>{"sides": 6}</dice>`, a fenced block or a JSON tool call reach `execute` as checked, typed
arguments; schemas, syntax errors, deadlines, the cut of long text and the release of everything are the service's
business.

Invariants: one instance serves one trajectory, reset before use and never used again; `execute` calls of a trajectory
never overlap. What trajectories share (an index, a client) is made once, by `setup`, and is only read after that.
'''

# ruff: noqa: B027 - hooks do nothing unless a tool wants them

from __future__ import annotations

import abc
import time
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec

from tool_service import parsers
from tool_service.action import ErrorName, Media, ToolAction, ToolObservation
from tool_service.parsers import ParserName
from tool_service.sandbox.base import JSON, Sandbox, Turn, TurnResult
from turnwire.errors import Problem

Modality = Literal["text", "image", "video"]


class ToolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every tool's config has; a tool's own `Config` derives from it (`class Config(ToolConfig, frozen=True)`).

    parsers: the action syntaxes in which calls of this tool are looked for.
    timeout_seconds: the longest that one call of this tool may take; unset: as long as its turn.
    """

    parsers: Annotated[tuple[ParserName, ...], msgspec.Meta(min_length=1)] = ("tags",)
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None


class NoContext(msgspec.Struct, forbid_unknown_fields=True):
    """The context of a tool that takes none."""


class TextArguments(msgspec.Struct):
    """The arguments of a tool that takes plain text."""

    text: str


class SandboxAccess(Protocol):
    """The trajectory's sandbox, as a tool sees it."""

    async def run(self, turn: Turn) -> TurnResult:
        """Run one piece of work; a sandbox that is gone answers with a status, never with an exception."""

    async def put_file(self, path: str, data: bytes) -> None:
        """Write a file below the workspace."""

    async def get_file(self, path: str, max_bytes: int) -> bytes:
        """Read a file below the workspace."""


class TurnContext(msgspec.Struct):
    """What `execute` may know and use of the turn that it belongs to."""

    trajectory_id: str
    turn: int
    deadline: float
    """On the clock of `time.monotonic`. The service ends a call that goes past it."""
    observation_bytes: int
    """The observation's text past this many bytes is cut: no need to make more."""
    sandbox: SandboxAccess | None = None
    """Set for tools that say `needs_sandbox`."""

    def remaining(self) -> float:
        """Seconds until the deadline, never below a millisecond."""
        return max(self.deadline - time.monotonic(), 0.001)

    async def run(self, runtime: str, payload: dict[str, JSON], cpu_seconds: float | None = None) -> TurnResult:
        """Run something in the trajectory's sandbox, within what is left of the turn's time. `cpu_seconds`: less than
        the sandbox's own limit."""
        if self.sandbox is None:
            raise RuntimeError("only a tool with needs_sandbox = True has a sandbox")
        return await self.sandbox.run(Turn(runtime, payload, self.remaining(), self.observation_bytes, cpu_seconds))


class BaseTool(abc.ABC):
    """A tool. Class attributes and class methods are of the service, an instance is of one trajectory.

    `config` is the tool's config, `shared` what `setup` returned. A subclass that reads its own config annotates it
    (`config: Config`) for the type checker.
    """

    name: ClassVar[str]
    """As it stands in tags and calls: lower-case letters, digits, underscores."""
    description: ClassVar[str]
    """For the agent: what it does, what it takes, what it answers."""
    modalities: ClassVar[tuple[Modality, ...]] = ("text",)
    """What its observations may hold."""
    needs_sandbox: bool = False
    """Whether `TurnContext.sandbox` is wanted. A sandbox is taken at the first such call of a trajectory. An instance
    may say that its trajectory needs none."""
    grace_seconds: float = 0.0
    """How long past its deadline a call may take to end what it does outside, before it is cancelled."""

    Config: ClassVar[type[ToolConfig]] = ToolConfig
    Context: ClassVar[type[msgspec.Struct]] = NoContext
    Arguments: ClassVar[type[msgspec.Struct]] = TextArguments

    def __init__(self, config: Any, shared: Any = None) -> None:
        self.config = config
        self.shared = shared

    # Of the service

    @classmethod
    def check_config(cls, config: Any) -> list[Problem]:
        """What is wrong with a config beyond its types, as a missing file. Keys are relative to the tool's section."""
        return []

    @classmethod
    def check_context(cls, config: Any, context: Any) -> None:
        """Raise InvalidRequestError for a context that cannot be used, as far as that shows without a trajectory.

        `turnwire check` asks it of a run's first tasks, before anything starts.
        """

    @classmethod
    async def setup(cls, config: Any) -> Any:
        """Make what all trajectories share, once, at the service's start."""
        return None

    @classmethod
    async def health(cls, config: Any, shared: Any) -> str:
        """Why the tool cannot work now; empty when it can. (The service itself checks for sandboxes.)"""
        return ""

    @classmethod
    async def teardown(cls, shared: Any) -> None:
        """Free what `setup` made, when the service ends."""

    @classmethod
    def arguments_from_text(cls, text: str) -> msgspec.Struct:
        """Arguments from what stands between tags or fences.

        When the first field of `Arguments` is a plain `str` and is the only one required, the text is that field;
        otherwise the text is `Arguments` as a JSON object. Raises msgspec.ValidationError or DecodeError.
        """
        field = parsers.text_field(cls.Arguments)
        if field is None:
            return msgspec.json.decode(text, type=cls.Arguments)
        return cls.Arguments(**{field: text})

    # Of one trajectory

    async def reset(self, context: Any) -> None:
        """Begin a trajectory with its `Context`. Raise InvalidRequestError for a context that cannot be used."""

    def parse_action(self, text: str) -> list[ToolAction[Any]]:
        """The calls of this tool in what the policy wrote, in order, malformed ones with `error` set."""
        return parsers.parse(text, self.name, type(self), self.config.parsers)

    async def prepare_sandbox(self, sandbox: Sandbox) -> None:
        """Bring a new sandbox into the state that the tool expects, before any call there: put files, set up.

        Happens again when a trajectory's sandbox was lost and replaced. Raise InvalidRequestError if the context
        turns out to be unusable.
        """

    async def prepare(self) -> None:
        """Have ready what a call needs beside a sandbox, as a connection, within a minute. Called before each turn that
        calls the tool. Raise InvalidRequestError for an unusable context, ExhaustedError or UnavailableError for what
        is ours: no call of the turn has run then, and it may be sent again.
        """

    @abc.abstractmethod
    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        """Do what the action asks. What the agent did wrong is an observation with an error, never an exception.

        An exception is a bug or our failure: the observation is INFRA then, and never becomes training data.
        """

    def update_state(self, action: ToolAction[Any], observation: ToolObservation) -> None:
        """Called after each executed action with what the agent will see of it: count, remember, decide."""

    async def close(self) -> None:
        """Free what this trajectory holds beyond its sandbox."""


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of a type: whole, with nested types under `$defs`, the type itself at the top."""
    (top,), definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    if "$ref" in top:
        top = definitions.pop(top["$ref"].rsplit("/", 1)[1])
    return {**top, "$defs": definitions} if definitions else top


__all__ = [
    "BaseTool",
    "ErrorName",
    "Media",
    "Modality",
    "NoContext",
    "TextArguments",
    "ToolAction",
    "ToolConfig",
    "ToolObservation",
    "TurnContext",
    "schema_of",
]
