"""Services that `turnwire up` started, for tests of what uses them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def running_services(folder: Path, *overrides: str) -> Iterator[dict[str, str]]:
    """`host:port` by service: tool, rollout, trainer. Runs and logs are kept in `folder`."""
    settings = [f"services.trainer.runs_folder={folder}/runs", *overrides]
    command = [sys.executable, "-m", "turnwire.cli", "up", "demo", *settings, "--json", "--logs", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["targets"]
        process.send_signal(signal.SIGINT)
