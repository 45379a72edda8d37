"""Finds rewards: the files beside this one, folders named in the config, and entry points of the group
`turnwire.rewards`.

A file that cannot be loaded, a name that is taken, options that a reward does not have: a ConfigError that says where.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer_service.rewards.base import Reward
from trainer_service.tasks_config import RewardConfig
from turnwire.config import convert, nearest
from turnwire.errors import ConfigError, Problem
from turnwire.security.config import ConnectionSecurity

GROUP = "turnwire.rewards"
_NOT_REWARDS = {"base", "registry"}


class RewardRegistry:
    """Rewards by name. Entry points are loaded when they are used."""

    def __init__(self, folders: list[str] | None = None) -> None:
        """Discover. Raises ConfigError with everything that cannot be loaded."""
        self._found: dict[str, tuple[type[Reward] | EntryPoint, str]] = {}
        self._problems: list[Problem] = []
        here = Path(__file__).parent
        for path in _files(here):
            if path.stem not in _NOT_REWARDS:
                module = importlib.import_module(f"trainer_service.rewards.{path.stem}")
                self._add_module(module, str(path))
        for folder in folders or []:
            self._add_folder(Path(folder))
        for point in entry_points(group=GROUP):
            self._add(point.name, point, f"entry point {point.value}")
        if self._problems:
            raise ConfigError(self._problems, "rewards")

    def _add_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self._problems.append(Problem("reward.folders", f"{folder} is not a folder"))
            return
        for path in _files(folder):
            name = f"turnwire_reward_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - a .py file has both
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # where Python looks up the annotations of its classes
            try:
                spec.loader.exec_module(module)
            except Exception as error:  # noqa: BLE001 - a plugin may raise anything; it is reported by file
                del sys.modules[name]
                self._problems.append(Problem("reward.folders", f"{path} cannot be loaded: {error!r}"))
                continue
            if not self._add_module(module, str(path)):
                self._problems.append(Problem("reward.folders", f"{path} defines no Reward"))

    def _add_module(self, module: ModuleType, source: str) -> int:
        classes = [
            item
            for item in vars(module).values()
            if inspect.isclass(item) and issubclass(item, Reward) and item.__module__ == module.__name__
        ]
        concrete = [item for item in classes if not inspect.isabstract(item)]
        for item in concrete:
            self._add(getattr(item, "name", ""), item, source)
        return len(concrete)

    def _add(self, name: str, item: type[Reward] | EntryPoint, source: str) -> None:
        if not name:
            self._problems.append(Problem("reward", f"the reward in {source} has no `name`"))
        elif name in self._found:
            self._problems.append(Problem("reward", f"{name!r} is in {self._found[name][1]} and in {source}"))
        else:
            self._found[name] = (item, source)

    def names(self) -> list[str]:
        """All that can be named in a config."""
        return sorted(self._found)

    def source(self, name: str) -> str:
        """The file or entry point that a reward comes from."""
        return self._found[name][1]

    def create(self, name: str, options: dict[str, Any], key: str = "reward") -> Reward:
        """A reward with its options. Raises ConfigError."""
        if name not in self._found:
            raise ConfigError(
                [Problem(f"{key}.name", f"unknown reward {name!r}; {nearest(name, self.names())}")], "run"
            )
        item, source = self._found[name]
        kind: Any = item
        if isinstance(item, EntryPoint):
            try:
                kind = item.load()
            except Exception as error:
                raise ConfigError([Problem(f"{key}.name", f"{source} cannot be loaded: {error!r}")], "run") from error
            if not (inspect.isclass(kind) and issubclass(kind, Reward)):
                raise ConfigError([Problem(f"{key}.name", f"{source} is not a subclass of Reward")], "run")
        reward: Reward = kind(convert(options, kind.options_type, "run", f"{key}.options"))
        return reward


class Judges:
    """The rewards of a run, by data source."""

    def __init__(self, config: RewardConfig) -> None:
        """Create them all. Raises ConfigError with everything that is wrong."""
        registry = RewardRegistry(config.folders)
        problems: list[Problem] = []
        self._patterns: list[tuple[str, Reward]] = []
        wanted = [(p, c.name, c.options, f"reward.by_source.{p}") for p, c in config.by_source.items()]
        for pattern, name, options, key in [*wanted, ("*", config.name, config.options, "reward")]:
            try:
                self._patterns.append((pattern, registry.create(name, options, key)))
            except ConfigError as error:
                problems += error.problems
        if problems:
            self.close()
            raise ConfigError(problems, "run")

    def of(self, data_source: str) -> Reward:
        """The reward of a data source."""
        return next(reward for pattern, reward in self._patterns if fnmatch.fnmatchcase(data_source, pattern))

    def needed_tools(self) -> dict[str, str]:
        """The tools that rewards call, each with the name of such a reward."""
        return {reward.needs_tool: reward.name for _, reward in self._patterns if reward.needs_tool}

    def connect(self, tool_target: str, security: ConnectionSecurity) -> None:
        """Let every reward that calls a tool reach the tool service."""
        for _, reward in self._patterns:
            if reward.needs_tool:
                reward.connect(tool_target, security)

    def close(self) -> None:
        """Close every reward."""
        for _, reward in self._patterns:
            reward.close()


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_"))
