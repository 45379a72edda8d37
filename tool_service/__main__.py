"""`python -m tool_service --config FILE [key=value …]`: serve tools until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from tool_service.config import ToolServiceConfig, check_limits
from tool_service.sandbox.base import SandboxError
from tool_service.server import ToolServer
from turnwire.config import apply_overrides, convert, load
from turnwire.errors import ConfigError, TurnwireError
from turnwire.security.check import check_server
from turnwire.serving import serve
from turnwire.telemetry.logs import configure_logging

logger = logging.getLogger("tool_service")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 after a clean stop, 2 for a config or a machine that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tool_service", description="Serves tools to trajectories.")
    parser.add_argument("--config", type=Path, help="YAML of tool_service.config.ToolServiceConfig; none: its defaults")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as sessions.max_sessions=64")
    options = parser.parse_args(arguments)
    try:
        if options.config is None:
            config = convert(apply_overrides({}, options.overrides), ToolServiceConfig, "command line")
        else:
            config = load(options.config, ToolServiceConfig, options.overrides)
        problems = [*check_limits(config), *check_server(config.server.tls, config.server.tokens)]
        if problems:
            raise ConfigError(problems, str(options.config))
        configure_logging(config.server.logging)
        asyncio.run(run(config))
    except (TurnwireError, SandboxError, RuntimeError) as error:
        logger.debug("refused", exc_info=error)
        sys.stderr.write(f"tool service: {error}\n")
        if error.__cause__ is not None:
            sys.stderr.write(f"  because of {type(error.__cause__).__name__}: {error.__cause__}\n")
        return 2
    return 0


async def run(config: ToolServiceConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain and release everything."""
    service = ToolServer(config)
    try:
        await serve(await service.prepare(), on_drain=service.drain)
    finally:
        await service.close()


if __name__ == "__main__":
    sys.exit(main())
