"""What a reward is: one small file with one class. docs/rewards.md shows how to write one.

A reward sees the task (with its ground truth) and the whole trajectory, and returns a number, or a `Score` with named
parts. It is called in a worker thread, for several trajectories at once, so it keeps no state between calls without a
lock.

What it raises is the failure of that trajectory, with its name and reason in the ledger. It is never a reward of 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from trainer_service.data.task import Task
from turnwire.security.config import ConnectionSecurity


class ToolOutcome(msgspec.Struct, frozen=True):
    """One tool call's result. `error` is the name of an ErrorKind (`TOOL_ERROR`, `TIMEOUT` …), empty for a success.
    `data` is the tool's structured result."""

    tool: str
    error: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class TurnText(msgspec.Struct, frozen=True):
    """One turn: what the policy wrote, what came back, and the calls in between."""

    action: str
    observation: str = ""
    outcomes: tuple[ToolOutcome, ...] = ()


class Attempt(msgspec.Struct, frozen=True):
    """A finished trajectory, as rewards see it. `stop_reason` is a StopReason's name, as `FINAL_ANSWER`."""

    turns: tuple[TurnText, ...]
    final_answer: str | None
    stop_reason: str = "FINAL_ANSWER"

    def outcomes(self, tool: str | None = None) -> list[ToolOutcome]:
        """All tool calls, in order; of one tool if it is named."""
        return [outcome for turn in self.turns for outcome in turn.outcomes if tool in (None, outcome.tool)]


class Score(msgspec.Struct, frozen=True):
    """A reward, and what it is made of (shown in metrics; `gdpo` normalises parts one by one)."""

    value: float
    parts: dict[str, float] = msgspec.field(default_factory=dict)


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reward without settings."""


class Reward(ABC):
    """Judges a trajectory.

    name: what configs call it. options_type: a frozen msgspec struct of its settings, from `reward.options`.
    needs_tool: the tool that it calls at the tool service, where it calls one; `turnwire check` asks for it.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[msgspec.Struct]] = NoOptions
    needs_tool: ClassVar[str] = ""

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def score(self, task: Task, attempt: Attempt) -> float | Score:
        """The reward of `attempt` at `task`. Raises for a ground truth that it cannot use."""

    def connect(self, tool_target: str, security: ConnectionSecurity) -> None:  # noqa: B027 - most call no service
        """Prepare to call the tool service at this `host:port`, known by `security`. Called once, before `score`.
        Raises TurnwireError where there is none, or not the tool."""

    def check_task(self, task: Task) -> None:  # noqa: B027 - most rewards take any answer
        """Raise ValueError for a ground truth that `score` cannot use. `turnwire check` asks it of the first tasks."""

    def close(self) -> None:  # noqa: B027 - most rewards hold nothing
        """Release what `__init__` or `score` took. Called once, at the end of a run."""


def accepted(ground_truth: Any) -> list[str]:
    """The answers that a ground truth accepts: a value, a list of values, or `{"target": …}` as in search datasets.

    Raises ValueError for one that holds none.
    """
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target", ground_truth.get("answers"))
    values = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not values or any(value is None or isinstance(value, dict | list) for value in values):
        raise ValueError(f"the ground truth must be an answer or a list of answers, not {ground_truth!r}")
    return [_text(value) for value in values]


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
