"""`python -m trainer_service --config FILE`: serve until SIGTERM or SIGINT, which stop a live run with a checkpoint.

`torchrun --nproc-per-node N -m trainer_service --config FILE`: the same with a policy that is sharded over N processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_service.config import TrainerServiceConfig, check_service
from trainer_service.runs import load_loop
from trainer_service.server import create_server
from turnwire.config import load
from turnwire.errors import ConfigError, TurnwireError
from turnwire.serving import serve
from turnwire.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from trainer_service.ranks import Ranks


async def run(config: TrainerServiceConfig, ranks: Ranks | None = None) -> None:
    """Serve."""
    server, runs = create_server(config, ranks)
    # torch and verl take seconds to load: now, beside everything else that starts, and not when the first run does.
    loading = asyncio.create_task(asyncio.to_thread(load_loop))
    await serve(server, on_drain=runs.close)
    await loading


def run_ranks(config: TrainerServiceConfig) -> int:
    """As one of torchrun's processes: rank 0 serves, the others work for it. Returns the exit code."""
    from trainer_service import learner, ranks  # noqa: PLC0415 - they take seconds to load: before anyone waits for us

    all_ranks = ranks.join(config.rank_timeout_seconds)
    if all_ranks.rank:
        all_ranks.follow(lambda run, path: learner.build(run, path, all_ranks))
        return 0
    try:
        asyncio.run(run(config, all_ranks))
    finally:
        all_ranks.end()
    return int(all_ranks.broken)


def main() -> int:
    """Returns the process's exit code: 2 for a config that cannot be used, 1 where ranks no longer work together."""
    parser = argparse.ArgumentParser(prog="trainer_service", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML of TrainerServiceConfig")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    arguments = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars are for terminals, not for logs
    try:
        config = load(arguments.config, TrainerServiceConfig, arguments.overrides)
        if problems := check_service(config):
            raise ConfigError(problems, str(arguments.config))
        configure_logging(config.server.logging)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return run_ranks(config)
        asyncio.run(run(config))
    except TurnwireError as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
