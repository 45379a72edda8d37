"""The examples of examples/, as their docstrings say: against `turnwire up`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_services import running_services
from waiting import PROGRAM

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.needs("isolated-sandbox")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with running_services(tmp_path_factory.mktemp("up")) as started:
        yield started


def example(name: str, *arguments: str) -> str:
    command = [sys.executable, f"examples/{name}.py", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PROGRAM, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_call_a_tool(targets: dict[str, str]) -> None:
    output = example("call_a_tool", targets["tool"])
    assert "python says 5050" in output
    assert "python says '21'" in output
    assert "sql says 'max(price)\\n3'" in output
    assert "a mistake is answered: error: no such column: colour" in output


def test_stream_a_rollout(targets: dict[str, str]) -> None:
    output = example("stream_a_rollout", targets["rollout"])
    for number in range(3):
        assert f"question-{number} turn 0: " in output
        assert f"question-{number} ended: STOP_REASON_" in output


def test_start_and_watch_a_run(targets: dict[str, str]) -> None:
    small = ("training.prompts_per_step=2", "rollout.group_size=2", "evaluation.tasks=2")
    output = example("start_and_watch_a_run", targets["trainer"], *small)
    assert "after step 0: accuracy" in output
    assert "step 3: " in output
    assert "RUN_STATE_FINISHED" in output
