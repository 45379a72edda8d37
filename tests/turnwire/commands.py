"""The `turnwire` command as users run it, from the repository's folder."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def turnwire(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "turnwire.cli", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(turnwire(*arguments), capture_output=True, text=True, timeout=550, check=False, cwd=ROOT)


def run_and_act(at: str, act: Callable[[subprocess.Popen[str]], None], *arguments: object) -> tuple[int, list[str]]:
    """Run it, and do something each time when a line begins so. Its status, and the lines that it wrote."""
    with subprocess.Popen(
        turnwire(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(at):
                act(process)
    return process.returncode, lines


def interrupt(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C does."""
    process.send_signal(signal.SIGINT)
