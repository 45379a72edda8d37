"""Procedural tasks: a registered name makes a function from an index to a task.

A generator is a factory: called with the config's `arguments`, it returns a pure function of an index. Out-of-tree ones
register as entry points of the group `turnwire.tasks`:

    def spelling(letters: int = 5, seed: int = 0) -> Callable[[int], Task]: ...

    [project.entry-points."turnwire.tasks"]
    spelling = "my_package.tasks:spelling"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from trainer_service.data import calculations as calculation_tasks
from trainer_service.data import demo_tasks
from trainer_service.data.task import Message, Task
from turnwire.config import nearest
from turnwire.errors import ConfigError, Problem

GROUP = "turnwire.tasks"

TaskMaker = Callable[[int], Task]
Generator = Callable[..., TaskMaker]


def demo(domain: str, split: str, seed: int = 0) -> TaskMaker:
    """The demo's tasks. domain: python, sql or search. split: train or heldout."""
    if domain not in demo_tasks.DOMAINS:
        raise ValueError(f"domain {domain!r}: {nearest(domain, demo_tasks.DOMAINS)}")
    if split not in demo_tasks.SPLITS:
        raise ValueError(f"split {split!r}: {nearest(split, demo_tasks.SPLITS)}")
    return lambda index: demo_tasks.generate(domain, split, index, seed)


def calculations(domain: str, split: str, seed: int = 0, kinds: Sequence[str] = ()) -> TaskMaker:
    """Calculations for a language model. domain: arithmetic or word_problems. kinds: only these of the domain's."""
    calculation_tasks.check(domain, split, kinds)
    return lambda index: calculation_tasks.generate(domain, split, index, seed, kinds)


def reasoning_gym(
    dataset: str, seed: int = 0, size: int = 1_000_000, options: dict[str, Any] | None = None
) -> TaskMaker:
    """A dataset of `reasoning-gym`, judged by the reward of the same name. options: the dataset's own settings."""
    import reasoning_gym as gym  # noqa: PLC0415 - heavy, and only for its tasks

    if dataset not in gym.factory.DATASETS:
        raise ValueError(f"dataset {dataset!r}: {nearest(dataset, list(gym.factory.DATASETS))}")
    source = gym.create_dataset(dataset, seed=seed, size=size, **(options or {}))

    def make(index: int) -> Task:
        entry = source[index]
        return Task(
            task_id=f"{dataset}-{seed}-{index}",
            messages=(Message("user", entry["question"]),),
            data_source=f"reasoning_gym/{dataset}",
            ground_truth=entry["answer"],
            extra={"reasoning_gym": entry},
        )

    return make


_BUILT_IN: dict[str, Generator] = {"calculations": calculations, "demo": demo, "reasoning_gym": reasoning_gym}


def generator_names() -> list[str]:
    """All that `generator` of a procedural source can name."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def create(name: str, arguments: dict[str, Any], key: str) -> TaskMaker:
    """The function behind a procedural source. Raises ConfigError: unknown name, wrong arguments, a plugin that
    fails.
    """
    generator = _BUILT_IN.get(name)
    if generator is None:
        points = {point.name: point for point in entry_points(group=GROUP)}
        if name not in points:
            message = f"unknown generator {name!r}; {nearest(name, generator_names())}"
            raise ConfigError([Problem(f"{key}.generator", message)], "data")
        try:
            generator = points[name].load()
        except Exception as error:
            message = f"entry point {points[name].value} cannot be loaded: {error!r}"
            raise ConfigError([Problem(f"{key}.generator", message)], "data") from error
    allowed = list(inspect.signature(generator).parameters)
    unknown = [argument for argument in arguments if argument not in allowed]
    if unknown:
        problems = [
            Problem(f"{key}.arguments.{item}", f"unknown argument; {nearest(item, allowed)}") for item in unknown
        ]
        raise ConfigError(problems, "data")
    try:
        return generator(**arguments)
    except (TypeError, ValueError, AssertionError, ImportError) as error:
        raise ConfigError([Problem(f"{key}.arguments", f"{name}: {error}")], "data") from error
