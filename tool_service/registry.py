"""Finds tools, and refuses what is wrong with them, by name.

Tools come from directories (each `*_tool.py`) and from Python entry points (group `turnwire.tools`, naming a tool's
class or a module with tools). Invariant: every plugin is either registered, or excluded by the config, or a problem
that keeps the service from starting. Nothing fails silently, and no name is taken twice.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from tool_service import parsers
from tool_service.base import BaseTool, ToolConfig, schema_of
from tool_service.config import ToolServiceConfig
from turnwire.config import convert, nearest
from turnwire.errors import ConfigError, InvalidRequestError, NotFoundError, Problem

ENTRY_POINT_GROUP = "turnwire.tools"
BUILT_IN_DIRECTORY = Path(__file__).parent / "tools"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class RegisteredTool(msgspec.Struct, frozen=True):
    """A tool that trajectories may use, with its config and what clients are told of it."""

    tool: type[BaseTool]
    config: ToolConfig
    source: str
    """Where it was found: a file or an entry point."""
    arguments_schema: dict[str, Any]
    context_schema: dict[str, Any]
    stop_strings: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.tool.name

    def context(self, values: Mapping[str, Any]) -> msgspec.Struct:
        """A trajectory's context for this tool, from what a client sent. Raises InvalidRequestError."""
        known = _context_keys(self.tool.Context)
        for key in values:
            if key not in known:
                takes = ", ".join(known) or "nothing"
                raise InvalidRequestError(f"context of tool {self.name!r}: unknown key {key[:80]!r}; it takes {takes}")
        try:
            return msgspec.convert(values, self.tool.Context)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"context of tool {self.name!r}: {error}") from error

    def check_context(self, values: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError for a context that a trajectory with this tool would be refused for."""
        self.tool.check_context(self.config, self.context(values))


@functools.cache
def _context_keys(kind: type[msgspec.Struct]) -> list[str]:
    """What a context takes. msgspec works it out from the annotations anew each time, and each Open asks."""
    return [field.encode_name for field in msgspec.structs.fields(kind)]


class ToolRegistry:
    """Tools by name. `problems` collects all that is wrong; a service starts only when it is empty."""

    def __init__(self, exclude: Iterable[str] = (), configs: dict[str, dict[str, Any]] | None = None) -> None:
        self.problems: list[Problem] = []
        self._tools: dict[str, RegisteredTool] = {}
        self._configs = configs or {}
        self._exclude = frozenset(exclude)
        self._excluded: set[str] = set()
        self._seen: set[str] = set()
        """Names of all tool classes, those with problems too."""

    def register(self, tool: type[BaseTool], source: str) -> None:
        """Add a tool class. What is wrong with it goes to `problems`."""
        name = getattr(tool, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self._problem(source, f"{tool.__name__}.name is {name!r}; a name is {_NAME.pattern}")
            return
        if self._is_excluded(name):
            return
        self._seen.add(name)
        if name in self._tools:
            other = self._tools[name].source
            self._problem(source, f"the tool name {name!r} is taken by {other}; rename one, or exclude one by its file")
            return
        try:
            registered = self._registered(tool, source)
        except ConfigError as error:
            self.problems += error.problems
        except (TypeError, NameError, AttributeError, msgspec.MsgspecError) as error:
            self._problem(source, f"{tool.__name__}: {type(error).__name__}: {error}")
        else:
            self._tools[name] = registered

    def _registered(self, tool: type[BaseTool], source: str) -> RegisteredTool:
        if not isinstance(getattr(tool, "description", None), str) or not tool.description.strip():
            raise TypeError("`description` is missing: the agent needs to know what the tool does")
        if not issubclass(tool.Config, ToolConfig):
            raise TypeError("`Config` must derive from tool_service.base.ToolConfig")
        key = f"tools.{tool.name}"
        config = convert(self._configs.get(tool.name, {}), tool.Config, "config", prefix=key)
        found = tool.check_config(config)
        if found:
            raise ConfigError([Problem(f"{key}.{problem.key}".rstrip("."), problem.message) for problem in found])
        return RegisteredTool(
            tool=tool,
            config=config,
            source=source,
            arguments_schema=schema_of(tool.Arguments),
            context_schema=schema_of(tool.Context),
            stop_strings=tuple(parsers.stop_strings(tool.name, config.parsers)),
        )

    def discover_from_directory(self, directory: Path) -> None:
        """Load every `*_tool.py` of a folder, in order of name."""
        if not directory.is_dir():
            self.problems.append(Problem("plugins.directories", f"{directory} is not a directory"))
            return
        for file in sorted(directory.glob("*_tool.py")):
            if self._is_excluded(file.name, file.stem, file.stem.removesuffix("_tool"), str(file)):
                continue
            try:
                module = _import_file(file)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - plugins raise anything; all of it is told
                self._failed_to_load(str(file), file.stem, error)
            else:
                self._register_all(module, str(file))

    def discover_from_entry_points(self) -> None:
        """Load what installed packages offer in the group `turnwire.tools`."""
        for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
            if self._is_excluded(point.name):
                continue
            source = f"entry point {point.name} = {point.value}"
            try:
                loaded = point.load()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - plugins raise anything; all of it is told
                self._failed_to_load(source, point.name, error)
                continue
            if isinstance(loaded, ModuleType):
                self._register_all(loaded, source)
            elif isinstance(loaded, type) and issubclass(loaded, BaseTool):
                self.register(loaded, source)
            else:
                self._problem(source, f"is neither a module nor a BaseTool class, but {type(loaded).__name__}")

    def check_names(self) -> None:
        """Report config sections and exclusions that match nothing: a name that is misspelt has no effect otherwise."""
        for name in self._configs:
            if name not in self._seen and name not in self._exclude:
                self.problems.append(Problem(f"tools.{name}", f"unknown tool; {nearest(name, list(self._seen))}"))
        for name in sorted(self._exclude - self._excluded):
            names = [*self._seen, *self._excluded]
            self.problems.append(Problem("plugins.exclude", f"{name!r} matches nothing; {nearest(name, names)}"))

    def get_tool(self, name: str) -> RegisteredTool:
        """Raises NotFoundError with the nearest match."""
        try:
            return self._tools[name]
        except KeyError:
            raise NotFoundError(f"unknown tool {name[:80]!r}; {nearest(name[:80], list(self._tools))}") from None

    def list_tools(self) -> list[RegisteredTool]:
        """In order of name."""
        return [self._tools[name] for name in sorted(self._tools)]

    def _register_all(self, module: ModuleType, source: str) -> None:
        tools = list(_tools_of(module))
        if not tools:
            self._problem(source, "defines no subclass of tool_service.base.BaseTool")
        for tool in tools:
            self.register(tool, source)

    def _is_excluded(self, *names: str) -> bool:
        matched = self._exclude.intersection(names)
        self._excluded |= matched
        return bool(matched)

    def _failed_to_load(self, source: str, name: str, error: BaseException) -> None:
        place = _last_line_of(error, source)
        self._problem(
            source,
            f"failed to load: {type(error).__name__}: {error}{place}. Mend it, or leave it out: "
            f"plugins.exclude: [{name}]",
        )

    def _problem(self, source: str, message: str) -> None:
        self.problems.append(Problem("plugins", f"{source}: {message}"))


def load_registry(config: ToolServiceConfig) -> ToolRegistry:
    """All tools of a config. Raises ConfigError with everything that is wrong."""
    registry = ToolRegistry(config.plugins.exclude, config.tools)
    registry.discover_from_directory(BUILT_IN_DIRECTORY)
    for directory in config.plugins.directories:
        registry.discover_from_directory(Path(directory))
    if config.plugins.entry_points:
        registry.discover_from_entry_points()
    registry.check_names()
    if registry.problems:
        raise ConfigError(registry.problems, "tool service")
    return registry


def _import_file(file: Path) -> ModuleType:
    if file.parent == BUILT_IN_DIRECTORY:
        return importlib.import_module(f"tool_service.tools.{file.stem}")
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    name = f"turnwire_plugin_{digest}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where type hints are resolved
    try:
        spec.loader.exec_module(module)
    except BaseException:  # half a module must not stay importable, whatever stopped it
        del sys.modules[name]
        raise
    return module


def _tools_of(module: ModuleType) -> Iterator[type[BaseTool]]:
    """The concrete tool classes that a module itself defines."""
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, BaseTool)
            and value.__module__ == module.__name__
            and not inspect.isabstract(value)
        ):
            yield value


def _last_line_of(error: BaseException, source: str) -> str:
    """Where in the plugin it was raised."""
    line, place = None, error.__traceback__
    while place is not None:
        if place.tb_frame.f_code.co_filename == source:
            line = place.tb_lineno
        place = place.tb_next
    return f" (line {line})" if line is not None else ""
