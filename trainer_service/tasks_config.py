"""What can be set of a run's tasks: where they come from, and how their answers are judged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trainer_service.ranges import Count, Positive, Seconds


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One source of tasks; docs/data.md shows each kind.

    kind: `parquet` and `jsonl` hold verl's columns (prompt, data_source, reward_model.ground_truth, extra_info);
        `procedural` calls a registered generator.
    path: the file, for `parquet` and `jsonl`.
    generator, arguments: the generator's name and what it takes, for `procedural`.
    start, size: rows (or indices) from `start` on, `size` of them; a file without `size` is used to its end.
    data_source: replaces the rows' own `data_source`, by which rewards are chosen and metrics grouped.
    tools: tools of the tasks that name none themselves; unset: the run's `tools`.
    tools_kwargs: what verl's `extra_info.tools_kwargs` means: `contexts` takes each tool's `create_kwargs` as its
        context, `names` takes the names alone, `ignore` nothing.
    tool_names: what a tool is called here, by its name in the rows; an empty name drops it.
    """

    kind: Literal["parquet", "jsonl", "procedural"]
    path: str = ""
    generator: str = ""
    arguments: dict[str, Any] = {}
    start: Count = 0
    size: Positive | None = None
    data_source: str | None = None
    tools: list[str] | None = None
    tools_kwargs: Literal["contexts", "names", "ignore"] = "contexts"
    tool_names: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.kind == "procedural":
            if not self.generator:
                raise ValueError("a procedural source needs `generator`")
            if self.size is None:
                raise ValueError("a procedural source needs `size`, the number of tasks to draw")
            if self.path:
                raise ValueError("a procedural source reads no `path`")
        elif not self.path:
            raise ValueError(f"a {self.kind} source needs `path`")
        elif self.generator or self.arguments:
            raise ValueError(f"a {self.kind} source reads no `generator` or `arguments`")


class DataConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks to train and to evaluate on. Sources are mixed by size and shuffled anew each epoch.

    train, eval: the sources. They share no task: evaluation says what was learned, not what was remembered.
    system_prompt: put before prompts that have no system message.
    """

    train: Annotated[list[SourceConfig], Meta(min_length=1)]
    eval: list[SourceConfig] = []
    system_prompt: str | None = None


class RewardChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A reward and its options (docs/rewards.md)."""

    name: str
    options: dict[str, Any] = {}


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How answers are judged.

    name, options: the reward of every data source that `by_source` does not match.
    by_source: rewards by data source; keys may be patterns as `demo/*`, the first that matches counts.
    folders: folders of your own with reward files.
    timeout_seconds: a reward that takes longer fails its trajectory.
    """

    name: str
    options: dict[str, Any] = {}
    by_source: dict[str, RewardChoice] = {}
    folders: list[str] = []
    timeout_seconds: Seconds = 30.0
