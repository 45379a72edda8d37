"""A package of one's own, as pip would install it: its tools, tasks and rewards are found by their entry points."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PROGRAM

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = """
[turnwire.tools]
dice = my_package.dice:DiceTool

[turnwire.tasks]
doubling = my_package.tasks:doubling

[turnwire.rewards]
brief_answer = my_package.rewards:BriefAnswer
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder for sys.path with an installed package: the pages' examples, in one distribution."""
    package, metadata = tmp_path / "site" / "my_package", tmp_path / "site" / "my_package-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (tasks,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/data.md").read_text(), re.DOTALL | re.MULTILINE)
    (package / "__init__.py").touch()
    (package / "tasks.py").write_text(tasks.replace('{"python": {}}', '{"dice": {"seed": 7}}'))
    (package / "dice.py").write_text((ROOT / "examples/tools/dice_tool.py").read_text())
    (package / "rewards.py").write_text((ROOT / "examples/rewards/brief_answer.py").read_text())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path / "site"


def turnwire(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "turnwire.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(site)},
    )


TASKS = "data.train=[{kind: procedural, generator: doubling, size: 4, arguments: {highest: 50}}]"
CHOSEN = (TASKS, "data.eval=[]", "reward.name=brief_answer", "reward.options={bonus: 0.5}")


@pytest.mark.needs("isolated-sandbox")
def test_a_run_uses_tools_tasks_and_a_reward_of_a_package(site: Path, tmp_path: Path) -> None:
    small = ("training.steps=1", "training.prompts_per_step=4", "rollout.group_size=2")
    result = turnwire(site, "train", "demo", *CHOSEN, *small, "--runs-folder", tmp_path, "--run-id", "one", "--json")
    assert result.returncode == 0, result.stderr
    metrics = json.loads(result.stdout)["metrics"]
    assert {"reward/doubling", "reward_part/right", "reward_part/brief"} <= metrics.keys()
    records = [json.loads(line) for line in (tmp_path / "one/trajectories/train.jsonl").read_text().splitlines()]
    assert len(records) == 8
    assert {record["task_id"] for record in records} == {f"doubling-{index}" for index in range(4)}
    assert {tuple(record["tools"]) for record in records} == {("dice",)}


def test_its_options_and_arguments_are_checked_as_those_that_are_built_in(site: Path) -> None:
    wrong = [
        TASKS.replace("highest", "higest"),
        "reward.name=brief_answer",
        "reward.options={bonus: -1}",
        "tools=[dise]",
    ]
    result = turnwire(site, "check", "demo", "--json", "data.eval=[]", *wrong)
    found = {item["key"]: item["message"] for item in json.loads(result.stdout)["problems"]}
    assert found.keys() == {"run.data.train.0.arguments.higest", "run.reward.options.bonus", "run.tools"}
    assert "did you mean 'highest'?" in found["run.data.train.0.arguments.higest"]
    assert "got -1" in found["run.reward.options.bonus"]
    assert "did you mean 'dice'?" in found["run.tools"]


def test_without_the_package_its_names_are_unknown(tmp_path: Path) -> None:
    found = {
        item["key"] for item in json.loads(turnwire(tmp_path, "check", "demo", "--json", *CHOSEN).stdout)["problems"]
    }
    assert found == {"run.data.train.0.generator", "run.reward.name"}
