"""`turnwire train` and `eval` from end to end: three real services as processes, small runs of the demo."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import ROOT, interrupt, run, run_and_act, turnwire

SMALL = (
    "training.steps=2",
    "training.prompts_per_step=2",
    "rollout.group_size=2",
    "evaluation.tasks=2",
    "services.tool.sandbox.pool.max=16",
)

pytestmark = [pytest.mark.timeout(1200), pytest.mark.needs("isolated-sandbox")]


def kill_vllm(process: subprocess.Popen[str]) -> None:
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.name().startswith("VLLM"):
            child.kill()


def kill_tool_service(process: subprocess.Popen[str]) -> None:
    next(child for child in psutil.Process(process.pid).children() if "tool_service" in child.cmdline()).kill()


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


@pytest.mark.needs("vllm")
def test_a_run_generates_with_vllm_in_an_environment_of_its_own_and_outlives_its_death(tmp_path: Path) -> None:
    engine = (
        "services.interpreters.rollout=.venv-vllm/bin/python",
        "services.rollout.engine={kind: vllm, max_sequences: 16, vllm: {eager: true, kv_cache_gib: 1}}",
    )
    steps = ("training.steps=4", "evaluation.before=false", "evaluation.after=false", "weights.transport=shm")
    command = ("train", "demo", *SMALL, *engine, *steps, "--runs-folder", tmp_path, "--run-id", "vllm")
    status, lines = run_and_act("step 2/", kill_vllm, *command)
    output = "".join(lines)
    assert status == 0, output
    assert "they are tried again: InfraError: vLLM's engine process has died" in output
    ledger = json.loads((tmp_path / "vllm" / "summary.json").read_text())["ledger"]
    assert (ledger["trained"] + ledger["filtered"], ledger["failed"]) == (4 * 2 * 2, 0)
    metrics = [json.loads(line) for line in (tmp_path / "vllm" / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["canary/mean_gap"] for step in metrics if "canary/mean_gap" in step]
    assert len(gaps) == 4
    assert max(gaps) < 1e-3
    assert not list(Path("/dev/shm").glob("vllm-*-weights-*"))


def test_ctrl_c_stops_with_a_checkpoint_and_the_run_goes_on_when_resumed(tmp_path: Path) -> None:
    steps = ("training.steps=60", "evaluation.before=false", "evaluation.after=false")
    command = ("train", "demo", *SMALL, *steps, "--runs-folder", tmp_path, "--run-id", "two")
    status, lines = run_and_act("step 2/", interrupt, *command)
    output = "".join(lines)
    assert status == 130, output
    assert "go on with  turnwire train --resume" in output

    command = turnwire("train", "--resume", tmp_path / "two")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        first = next(line for line in process.stdout if line.startswith("step "))
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert int(first.removeprefix("step ").partition("/")[0]) > 2
    assert process.returncode == 130


def test_a_run_outlives_a_tool_service_that_is_killed(tmp_path: Path) -> None:
    steps = ("training.steps=12", "evaluation.before=false", "evaluation.after=false", "rollout.max_staleness=0")
    command = ("train", "demo", *SMALL, *steps, "--runs-folder", tmp_path, "--run-id", "three")
    status, lines = run_and_act("step 3/", kill_tool_service, *command)
    output = "".join(lines)
    assert status == 0, output
    assert "the tool service was killed by SIGKILL" in output
    assert "It is started again" in output
    ledger = json.loads((tmp_path / "three" / "summary.json").read_text())["ledger"]
    assert ledger["failed"] == 0
    assert ledger["trained"] + ledger["filtered"] == 12 * 2 * 2


def test_a_verl_parquet_is_trained_on_as_it_is_with_a_reward_named_on_the_command_line(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Compute {number}*17."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number * 17)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(101, 133)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    (line,) = re.findall(r"`turnwire (train [^`]*kind: parquet[^`]*)`", (ROOT / "README.md").read_text())
    command = shlex.split(line.replace("path: tasks.parquet", f"path: {tmp_path}/tasks.parquet"))
    assert f"{tmp_path}/" in " ".join(command)
    result = run(*command, *SMALL, "--runs-folder", tmp_path, "--run-id", "four", "--json")
    assert result.returncode == 0, result.stderr
    metrics = json.loads(result.stdout)["metrics"]
    assert 0 <= metrics["reward/openai/gsm8k"] <= 1


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
