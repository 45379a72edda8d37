"""`turnwire train` and `eval` from end to end: three real services as processes, small runs of the demo."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "training.steps=2",
    "training.prompts_per_step=2",
    "rollout.group_size=2",
    "evaluation.tasks=2",
    "services.tool.sandbox.pool.max=16",
)

pytestmark = pytest.mark.timeout(300)


def turnwire(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "turnwire.cli", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(turnwire(*arguments), capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)


def test_a_run_is_trained_evaluated_shown_and_its_checkpoint_evaluated_again(tmp_path: Path) -> None:
    result = run("train", "demo", *SMALL, "--runs-folder", tmp_path, "--run-id", "one", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["state"], document["step"], document["total_steps"]) == ("finished", 2, 2)
    assert document["before"].keys() == document["after"].keys() == {"demo/python", "demo/sql", "demo/search"}
    assert "step 2/2" in result.stderr
    assert (tmp_path / "one" / "learning_curves.png").is_file()

    shown = run("view", tmp_path / "one", "--eval")
    assert shown.returncode == 0, shown.stderr
    assert "evaluation after 2 updates" in shown.stdout
    assert "action" in shown.stdout

    evaluated = run("eval", tmp_path / "one", "evaluation.tasks=3", "--runs-folder", tmp_path, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["tasks"] == {"demo/python": 3, "demo/search": 3, "demo/sql": 3}


def test_ctrl_c_stops_with_a_checkpoint_and_the_run_goes_on_when_resumed(tmp_path: Path) -> None:
    steps = ("training.steps=60", "evaluation.before=false", "evaluation.after=false")
    command = turnwire("train", "demo", *SMALL, *steps, "--runs-folder", tmp_path, "--run-id", "two")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 2/"):
                process.send_signal(signal.SIGINT)
    output = "".join(lines)
    assert process.returncode == 130, output
    assert "go on with  turnwire train --resume" in output

    command = turnwire("train", "--resume", tmp_path / "two")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        first = next(line for line in process.stdout if line.startswith("step "))
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert int(first.removeprefix("step ").partition("/")[0]) > 2
    assert process.returncode == 130


def test_a_run_that_fails_says_why_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from trainer_service.rewards.base import Reward\n"
        "class Broken(Reward):\n"
        "    name = 'broken'\n"
        "    def score(self, task, attempt):\n"
        "        raise RuntimeError('the judge is asleep')\n"
    )
    result = run(
        "train",
        "demo",
        *SMALL,
        f"reward.folders=[{tmp_path}]",
        "reward.name=broken",
        "--runs-folder",
        tmp_path / "runs",
    )
    assert result.returncode == 1
    assert "the run failed: " in result.stderr
    assert "the judge is asleep" in result.stderr
    assert "Traceback" not in result.stderr
