"""What `turnwire up`, `train`, `eval` and `check` read: a run, and the services that it needs here.

A file holds `run:` (what the trainer's StartRun takes) and `services:` with `tool`, `rollout` and `trainer` (what each
service reads). The launcher fills in the ports, the targets between the services, and `services.rollout.engine.model`
from `run.model.path` where it is not given. Relative paths start at the directory in which `turnwire` is called, in
files as on the command line.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import rollout_service.config
import tool_service.config
import trainer_service.config
import turnwire
from rollout_service.config import RolloutServiceConfig
from tool_service.config import ToolServiceConfig
from tool_service.registry import RegisteredTool, load_registry
from trainer_service.config import RunConfig, TrainerServiceConfig
from trainer_service.files import RUN_ID
from turnwire import config as config_files
from turnwire.config import nearest
from turnwire.errors import ConfigError, InvalidRequestError, Problem

RESOLVED_NAME = "launch.yaml"
"""In a run's folder: the config as resolved, with the services it was started with."""
_RUN_NAME, _RUN_MARK = "config.yaml", "run.json"
"""In every run's folder: the trainer wrote them. The first is the run's config alone, without services."""


class InterpretersConfig(msgspec.Struct, frozen=True, kw_only=True):
    """By which Python each service runs; empty: the one that runs `turnwire`. vLLM cannot be installed beside verl, so
    a rollout service with it has an environment of its own."""

    tool: str = ""
    rollout: str = ""
    trainer: str = ""


class ServicesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The services to start on this machine: each as its own `--config` file would say."""

    rollout: RolloutServiceConfig
    tool: ToolServiceConfig = ToolServiceConfig()
    trainer: TrainerServiceConfig = TrainerServiceConfig()
    interpreters: InterpretersConfig = InterpretersConfig()


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A run, and the services it is to be started with here; without `services` it needs `--target`."""

    run: RunConfig
    services: ServicesConfig | None = None


@dataclass
class Findings:
    """What is wrong with a config, and what is only doubtful. `config` is there when its types are right."""

    source: str
    config: LaunchConfig | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def usable(self) -> LaunchConfig:
        """The config. Raises ConfigError with all problems."""
        if self.problems or self.config is None:
            raise ConfigError(self.problems, self.source)
        return self.config


def find_config(name: str) -> Path:
    """A config by path, a preset by name (`demo` is configs/demo.yaml), or a run's folder. Raises ConfigError."""
    path = Path(name)
    if (of_run := config_of_run(path)) is not None:
        return of_run
    if _exists(path) and not path.is_dir():  # a file, or a pipe
        return path
    folders = [Path("configs"), Path(turnwire.__file__).parents[1] / "configs"]
    presets = {file.stem: file for folder in reversed(folders) for file in sorted(folder.glob("*.yaml"))}
    if name in presets:
        return presets[name]
    if name and _exists(path):
        raise ConfigError([Problem("", f"is a folder, but not of a run: it has no {_RUN_MARK}")], name)
    where = f" (looked in {Path.cwd()})" if not path.is_absolute() else ""
    hint = nearest(name, list(presets)).replace("Allowed:", "Presets:")
    raise ConfigError([Problem("", f"there is no such file{where}, nor a preset of that name; {hint}")], name or "''")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # too long, or not to be looked at
        raise ConfigError([Problem("", f"cannot be read: {error.strerror}")], str(path)) from error


def config_of_run(folder: Path) -> Path | None:
    """The config in a run's folder: with its services, where they were started for it."""
    if not _exists(folder / _RUN_MARK):
        return None
    return next((folder / name for name in (RESOLVED_NAME, _RUN_NAME) if (folder / name).is_file()), None)


def read(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A file's plain values with overrides applied. Keys of overrides are the run's, or begin with `services.`."""
    full = [
        item if item.startswith(("run.", "run=", "services.", "services=")) else f"run.{item}" for item in overrides
    ]
    values = config_files.read_yaml(path)
    if path == config_of_run(path.parent) and path.name == _RUN_NAME:
        values = {"run": values}
    values = config_files.apply_overrides(values, full)
    _share_model(values)
    return values


def _share_model(values: dict[str, Any]) -> None:
    """The engine holds the model that is trained, unless the file says otherwise."""
    match values:
        case {"run": {"model": {"path": path}}, "services": {"rollout": dict() as rollout}}:
            engine = rollout.setdefault("engine", {})
            if isinstance(engine, dict):
                engine.setdefault("model", path)


def examine(name: str, overrides: Sequence[str] = (), *, services: bool = True) -> Findings:
    """Everything that is wrong with a config: its types and, part by part where they are right, what services check.

    `services=False` leaves the services out: they run elsewhere. Raises ConfigError only for an unreadable file.
    """
    path = find_config(name)
    values = read(path, overrides)
    if not services:
        values.pop("services", None)
    found = Findings(str(path))
    run = _part(values, ("run",), RunConfig, found)
    parts: dict[str, Any] = {}
    if values.get("services") is not None:
        for service, kind in (
            ("tool", ToolServiceConfig),
            ("rollout", RolloutServiceConfig),
            ("trainer", TrainerServiceConfig),
        ):
            parts[service] = _part(values, ("services", service), kind, found)
    try:
        found.config = config_files.convert(values, LaunchConfig, found.source)
    except ConfigError as error:
        seen = {problem.key for problem in found.problems}
        found.problems += [problem for problem in error.problems if problem.key not in seen]
    tools = _check_tool_service(parts.get("tool"), found)
    served, check_context = None, None
    if tools is not None:
        served, check_context = list(tools), lambda tool, context: tools[tool].check_context(context)
    _check_interpreters(values, found)
    if parts.get("rollout") is not None:
        _extend(found.problems, "services.rollout", rollout_service.config.check(parts["rollout"]))
    if parts.get("trainer") is not None:
        _extend(found.problems, "services.trainer", trainer_service.config.check_service(parts["trainer"]))
    if run is not None:
        _extend(found.problems, "run", trainer_service.config.check(run, served, check_context))
        _extend(found.warnings, "run", trainer_service.config.warnings(run))
    return found


def _part(values: dict[str, Any], place: tuple[str, ...], kind: type[Any], found: Findings) -> Any:
    value: Any = values
    for key in place:
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:  # missing: reported with the whole, or defaults
        return kind() if place == ("services", "tool") else None
    prefix = ".".join(place)
    try:
        return config_files.convert(value, kind, found.source, prefix=prefix)
    except ConfigError as error:
        found.problems += error.problems
        keys = [problem.key.removeprefix(prefix).removeprefix(".") for problem in error.problems]
    try:  # what else is wrong can be found without the values that are not even of their type
        return config_files.convert(_without(value, keys), kind, found.source)
    except ConfigError:
        return None


def _without(value: Any, keys: Sequence[str]) -> Any:
    """A copy without the places that dotted keys name."""
    result = msgspec.to_builtins(value)
    for key in keys:
        *path, last = key.split(".")
        inner = result
        for name in path:
            inner = inner[int(name)] if isinstance(inner, list) else inner.get(name, {})
        if isinstance(inner, dict):
            inner.pop(last, None)
    return result


def _check_tool_service(config: ToolServiceConfig | None, found: Findings) -> dict[str, RegisteredTool] | None:
    """Check it; the tools it would serve, where it is known."""
    if config is None:
        return None
    problems = tool_service.config.check(config)
    _extend(found.problems, "services.tool", problems)
    return None if problems else {tool.name: tool for tool in load_registry(config).list_tools()}


def _check_interpreters(values: dict[str, Any], found: Findings) -> None:
    config = _part(values, ("services", "interpreters"), InterpretersConfig, found)
    for name, path in msgspec.structs.asdict(config or InterpretersConfig()).items():
        if path and not os.access(path, os.X_OK):
            message = f"{path} is no program; it is looked for from {Path.cwd()}"
            if ".venv-vllm" in Path(path).parts:
                message += "; `make vllm` makes .venv-vllm"
            found.problems.append(Problem(f"services.interpreters.{name}", message))


def _extend(to: list[Problem], prefix: str, problems: Sequence[Problem]) -> None:
    """Add problems of a part under its place in the file, unless something of that key is known to be wrong."""
    known = {item.key for item in to}
    found = [Problem(f"{prefix}.{item.key}" if item.key else prefix, item.message) for item in problems]
    to += [item for item in found if item.key not in known]


def check_run_id(run_id: str) -> None:
    """As the trainer will. Raises InvalidRequestError."""
    if not re.fullmatch(RUN_ID, run_id):
        raise InvalidRequestError(f"run_id {run_id!r}: up to 100 letters, digits, dots, dashes, underscores")


def fresh_run_id(name: str, taken: Callable[[str], bool]) -> str:
    """The run's name and the time, as `demo-20260131-142530`."""
    stamp = datetime.datetime.now(datetime.UTC).astimezone().strftime("%Y%m%d-%H%M%S")
    base = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:60].lstrip("-_") or "run"
    run_id, number = f"{base}-{stamp}", 2
    while taken(run_id):
        run_id, number = f"{base}-{stamp}-{number}", number + 1
    return run_id
