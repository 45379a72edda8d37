"""Run benchmarks by name, or all: a table on the terminal, and JSON in a folder."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time
from pathlib import Path

from benchmarks.report import RESULTS, machine, show, write
from benchmarks.vllm_environment import NoVllmError
from tool_service.sandbox import SandboxUnavailable

NAMES = (
    *("turns", "sessions", "sandboxes", "python_turns", "docker_turns", "flood"),
    *("rollout", "asynchrony", "trainer", "generation", "weights", "overhead", "stack"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)}; none: all")
    parser.add_argument(
        "--quick", action="store_true", help="a short run that shows that it works; figures mean little"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help="default: benchmarks/results")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    missing = False
    for name in arguments.names or NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        start = time.monotonic()
        try:
            result = asyncio.run(module.run(quick=arguments.quick))
        except (SandboxUnavailable, NoVllmError) as error:
            print(f"{name} cannot run here: {error}\n", file=sys.stderr, flush=True)
            missing = True
            continue
        result.seconds = time.monotonic() - start
        show(result)
        print(
            f"{result.seconds:.0f} s, {machine()['cpus']} CPUs; JSON in {write(name, result, arguments.output)}\n",
            flush=True,
        )
    return 1 if missing and arguments.names else 0  # asked for all: all that this machine can do


if __name__ == "__main__":
    sys.exit(main())
