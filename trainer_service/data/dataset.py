"""Sources mixed into one sequence of draws, in an order that depends on the seed alone.

Invariant: draw number n is the same task in every process and after every resume. So a run's position in its data is
one number, and a checkpoint needs no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from trainer_service.data import files, generators
from trainer_service.data.task import Message, Task
from trainer_service.tasks_config import DataConfig, SourceConfig
from turnwire.errors import ConfigError, Problem


class Source:
    """One source: a number of tasks, each by its index."""

    def __init__(self, config: SourceConfig, key: str, tools: Sequence[str], system_prompt: str | None) -> None:
        """Load (or prepare to generate). Raises ConfigError."""
        self.config = config
        self.key = key
        self._tools = tuple(tools if config.tools is None else config.tools)
        self._system_prompt = system_prompt
        if config.kind == "procedural":
            self._make: Callable[[int], Task] = generators.create(config.generator, config.arguments, key)
            self.size = config.size or 0
        else:
            self._make = files.load_tasks(config, key).__getitem__
            self.size = len(self._make.__self__)  # type: ignore[attr-defined]

    def task(self, index: int) -> Task:
        """Task number `index` of this source, with the run's tools and system prompt where it has none."""
        if not 0 <= index < self.size:
            raise IndexError(f"{self.key} has {self.size} tasks, not one of number {index}")
        offset = self.config.start if self.config.kind == "procedural" else 0
        task = self._make(index + offset)
        if not task.tools and self._tools:
            task = msgspec.structs.replace(task, tools={name: {} for name in self._tools})
        if self.config.data_source:
            task = msgspec.structs.replace(task, data_source=self.config.data_source)
        if self._system_prompt and all(message.role != "system" for message in task.messages):
            task = msgspec.structs.replace(task, messages=(Message("system", self._system_prompt), *task.messages))
        return task


def load_sources(config: DataConfig, which: str, tools: Sequence[str]) -> list[Source]:
    """The `train` or `eval` sources. Raises ConfigError with everything that is wrong with any of them."""
    sources: list[Source] = []
    problems: list[Problem] = []
    for number, source in enumerate(config.train if which == "train" else config.eval):
        try:
            sources.append(Source(source, f"data.{which}.{number}", tools, config.system_prompt))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems, "data")
    return sources


class TrainingStream:
    """Draws without end: all tasks of all sources, shuffled anew each epoch."""

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        self._sources = tuple(sources)
        self._seed = seed
        self._starts = np.cumsum([0, *(source.size for source in sources)])
        self.size = int(self._starts[-1])

    def draw(self, number: int) -> Task:
        """Task of draw `number`, from 0."""
        epoch, place = divmod(number, self.size)
        position = int(self._order(epoch)[place])
        which = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._sources[which].task(position - int(self._starts[which]))

    @lru_cache(maxsize=2)  # noqa: B019 - two epochs meet at a boundary; the stream lives as long as its run
    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self.size)


def evaluation_tasks(sources: Sequence[Source], per_source: int | None) -> list[Task]:
    """The first `per_source` tasks of each source, or all."""
    return [
        source.task(index)
        for source in sources
        for index in range(source.size if per_source is None else min(per_source, source.size))
    ]
