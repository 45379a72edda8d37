"""`python -m rollout_service --config FILE [key=value …]`: serve until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_service.config import RolloutServiceConfig, check
from turnwire.config import load
from turnwire.errors import ConfigError
from turnwire.telemetry.logs import configure_logging


def checked(path: Path, overrides: Sequence[str] = ()) -> RolloutServiceConfig:
    """The config of a file. Raises ConfigError with everything that is wrong with it."""
    config = load(path, RolloutServiceConfig, overrides)
    if problems := check(config):
        raise ConfigError(problems, str(path))
    return config


async def serve_rollouts(config: RolloutServiceConfig) -> None:
    """Build everything, serve, drain."""
    from rollout_service.build import build_service  # noqa: PLC0415 - torch loads after the config is known to be good
    from turnwire.serving import Server, serve  # noqa: PLC0415
    from turnwire.v1 import rollout_pb2_grpc  # noqa: PLC0415

    service = build_service(config)
    server = Server(config.server, ["turnwire.v1.RolloutService"])
    await service.start(server.metrics)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server.grpc)
    following = asyncio.create_task(server.follow(lambda: service.trouble))
    try:
        await serve(server, on_drain=service.drain)
    finally:
        following.cancel()
        await service.close()


def main() -> int:
    """The command. Exit code 2: the config cannot be used; stderr says why."""
    parser = argparse.ArgumentParser(prog="python -m rollout_service", description="Turnwire's rollout service.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of RolloutServiceConfig")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        config = checked(arguments.config, arguments.overrides)
        configure_logging(config.server.logging)
        asyncio.run(serve_rollouts(config))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
