"""The tool service's config: what `python -m tool_service --config FILE` reads.

Every field has a default: an empty file serves the built-in tools on loopback.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tool_service.sandbox.base import SandboxLimits
from tool_service.sandbox.docker_config import DockerConfig
from turnwire.errors import ConfigError, Problem
from turnwire.security.check import check_server
from turnwire.serving import ServerConfig

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

_MESSAGE_OVERHEAD = 65536
"""Bytes of an answer beside texts, data and media."""


class PluginsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where tools are looked for, beside the built-in ones.

    directories: folders whose `*_tool.py` files are loaded. Relative ones are relative to the working directory.
    entry_points: whether installed packages' tools are loaded (entry point group `turnwire.tools`).
    exclude: names of tools, files or entry points that are left out, built-in ones too.
    """

    directories: tuple[str, ...] = ()
    entry_points: bool = True
    exclude: tuple[str, ...] = ()


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How many sandboxes there are.

    ready: kept warm, so that a trajectory's first call need not wait for one.
    max: at once, those in use and those kept warm together.
    max_waiting: trajectories that may wait for one; beyond them the answer is RESOURCE_EXHAUSTED at once.
    wait_seconds: how long one waits before its turn is answered RESOURCE_EXHAUSTED. It may be sent again.
    policy: what becomes of a sandbox whose trajectory is over. `discard`: it is ended, and another made. `recycle`: a
        container is emptied, and serves again with a new supervisor, once it is verified that nothing is left in it;
        the process backend, whose sandboxes are made as quickly, makes another.
    """

    ready: Annotated[int, msgspec.Meta(ge=0)] = 4
    max: Count = 512
    max_waiting: Annotated[int, msgspec.Meta(ge=0)] = 1024
    wait_seconds: Seconds = 20.0
    policy: Literal["discard", "recycle"] = "discard"

    def __post_init__(self) -> None:
        if self.ready > self.max:
            raise ValueError(f"ready ({self.ready}) is above max ({self.max})")


class ProcessSandboxConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the backend `process`.

    interpreter: path of the Python 3.11+ that runs inside; empty: the one that runs the service.
    read_only_paths: files and folders of this host that every sandbox shows at the same path, read-only.
    """

    interpreter: str = ""
    read_only_paths: tuple[str, ...] = ()


class SandboxConfig(msgspec.Struct, frozen=True, kw_only=True):
    """In what the agents' code runs.

    backend: `process`, forks behind namespaces on this machine, or `docker`, containers of an engine.
    process, docker: settings of the one that is chosen.
    minimum_tier: the service refuses to start where the backend gives less.
    limits: of each sandbox, all its processes together.
    owner: under which leftovers are found and removed. Services that share an engine and do not share a host need one
        each. Empty: the host's name with a mark of its network namespace.
    sweep_seconds: between two searches for leftovers; there is one at start, too.
    """

    backend: Literal["process", "docker"] = "process"
    process: ProcessSandboxConfig = ProcessSandboxConfig()
    docker: DockerConfig = DockerConfig()
    minimum_tier: Literal["isolated", "restricted"] = "isolated"
    pool: PoolConfig = PoolConfig()
    limits: SandboxLimits = SandboxLimits()
    owner: str = ""
    sweep_seconds: Seconds = 60.0


class SessionsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories.

    max_sessions: live ones at once, those on a lease among them.
    lease_seconds: how long a session waits for a reconnection after a stream that ended without Close.
    open_timeout_seconds: how long a stream may be silent before its Open.
    idle_timeout_seconds: how long a stream may be silent between turns; then it ends with DEADLINE_EXCEEDED and its
        session is released. The policy writes its next action in this time, so it is long.
    """

    max_sessions: Count = 1024
    lease_seconds: Seconds = 30.0
    open_timeout_seconds: Seconds = 10.0
    idle_timeout_seconds: Seconds = 1800.0


class TurnLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of turns. A trajectory may ask for less, never for more. With the defaults an answer fits into the 4 MiB
    that gRPC's clients take unless told otherwise.

    turn_timeout_seconds: of a turn that names none.
    max_turn_timeout_seconds: a turn that asks for longer gets this.
    observation_bytes: of one observation's text (UTF-8); what is beyond is cut, and the text says so.
    data_bytes: of one turn's structured data together; an observation's that does not fit is left out, and its
        `error_detail` says so.
    media_bytes: of one turn's images and videos together; what does not fit is left out, and the text says so.
    action_bytes: a longer action is answered INVALID_ACTION.
    calls_per_turn: further calls of a turn are answered INVALID_ACTION.
    """

    turn_timeout_seconds: Seconds = 30.0
    max_turn_timeout_seconds: Seconds = 600.0
    observation_bytes: Annotated[int, msgspec.Meta(ge=16, le=16 * 2**20)] = 64 * 1024
    data_bytes: Annotated[int, msgspec.Meta(ge=0)] = 2**20
    media_bytes: Annotated[int, msgspec.Meta(ge=0)] = 2 * 2**20
    action_bytes: Count = 256 * 1024
    calls_per_turn: Count = 8

    def __post_init__(self) -> None:
        if self.turn_timeout_seconds > self.max_turn_timeout_seconds:
            raise ValueError(
                f"turn_timeout_seconds ({self.turn_timeout_seconds:g}) is above max_turn_timeout_seconds "
                f"({self.max_turn_timeout_seconds:g})"
            )


class ToolServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole service.

    tools: by tool name, what the tool's own `Config` takes. A tool without a section runs with its defaults.
    """

    server: ServerConfig = ServerConfig()
    tools: dict[str, dict[str, Any]] = {}
    plugins: PluginsConfig = PluginsConfig()
    sandbox: SandboxConfig = SandboxConfig()
    sessions: SessionsConfig = SessionsConfig()
    limits: TurnLimits = TurnLimits()


def check(config: ToolServiceConfig) -> list[Problem]:
    """Everything that is wrong with a config beyond its types. Loads the plugins, as the service would."""
    from tool_service.registry import load_registry  # noqa: PLC0415 - the registry builds on this module

    problems = [*check_limits(config), *_check_import_paths(config)]
    problems += check_server(config.server.tls, config.server.tokens)
    try:
        load_registry(config)
    except ConfigError as error:
        problems += error.problems
    return problems


def _check_import_paths(config: ToolServiceConfig) -> list[Problem]:
    """Packages of this host that Python code is to import must be shown to it, too."""
    if config.sandbox.backend != "process":
        return []  # the folders are the image's own
    shown = ("/usr", *config.sandbox.process.read_only_paths)
    return [
        Problem("tools.python.import_paths", f"{path} is not in sandboxes; add it to sandbox.process.read_only_paths")
        for path in config.tools.get("python", {}).get("import_paths", ())
        if not any(Path(path).is_relative_to(folder) for folder in shown)
    ]


def check_limits(config: ToolServiceConfig) -> list[Problem]:
    """Whether the limits fit each other."""
    problems = []
    limits, message_bytes = config.limits, config.server.max_message_bytes
    answer = limits.calls_per_turn * limits.observation_bytes + limits.data_bytes + limits.media_bytes
    if answer > message_bytes - _MESSAGE_OVERHEAD:
        message = (
            f"an answer of calls_per_turn * observation_bytes + data_bytes + media_bytes = {answer} bytes does not "
            f"fit into server.max_message_bytes ({message_bytes}) less {_MESSAGE_OVERHEAD}; lower one, raise the other"
        )
        problems.append(Problem("limits", message))
    if limits.action_bytes > message_bytes - _MESSAGE_OVERHEAD:
        message = (
            f"does not fit into server.max_message_bytes ({message_bytes}) less {_MESSAGE_OVERHEAD}: "
            "a longer action would be a transport error, not an INVALID_ACTION"
        )
        problems.append(Problem("limits.action_bytes", message))
    quotas, calls = config.server.quotas, config.server.max_concurrent_rpcs
    if config.sessions.max_sessions >= (calls if quotas.streams else quotas.streams_of(calls)):
        message = (
            f"{config.sessions.max_sessions} sessions, a stream each, do not fit into server.max_concurrent_rpcs "
            f"({calls}, a sixteenth of it for other clients); raise that above it, with room for other calls"
        )
        problems.append(Problem("sessions.max_sessions", message))
    return problems
