"""The services as benchmarks start them: separate processes, the demo's model, and the tools of benchmarks/tools."""

from __future__ import annotations

import atexit
import contextlib
import tempfile
from pathlib import Path
from typing import Any

from rollout_service.config import EngineConfig, RolloutServiceConfig
from tool_service.config import PluginsConfig, PoolConfig, SandboxConfig, ToolServiceConfig
from trainer_service.config import TrainerServiceConfig
from turnwire.cli.launch import InterpretersConfig, ServicesConfig
from turnwire.cli.services import Services

MODEL = "examples/tiny_policy/model"
TOOLS = Path(__file__).parent / "tools"

_folders = contextlib.ExitStack()
"""Configs, logs and runs of what was started: gone when the benchmarks are over."""
atexit.register(_folders.close)


def services(
    *,
    sandboxes: int = 64,
    sandbox: SandboxConfig | None = None,
    tool: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    model: str = MODEL,
    interpreters: dict[str, str] | None = None,
) -> Services:
    """Not started yet: use `async with services()` for all three, or `.only_tools()`."""
    folder = Path(_folders.enter_context(tempfile.TemporaryDirectory(prefix="turnwire-bench-")))
    config = ServicesConfig(
        tool=ToolServiceConfig(
            tools={"search": {"top_k": 1}},
            plugins=PluginsConfig(directories=(str(TOOLS),)),
            sandbox=sandbox or SandboxConfig(pool=PoolConfig(ready=min(16, sandboxes), max=sandboxes)),
            **(tool or {}),
        ),
        rollout=RolloutServiceConfig(engine=EngineConfig(model=model, **(engine or {})), **(rollout or {})),
        trainer=TrainerServiceConfig(runs_folder=str(folder / "runs")),
        interpreters=InterpretersConfig(**(interpreters or {})),
    )
    return Services(config, folder, lambda _: None)
