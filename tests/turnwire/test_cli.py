"""The `turnwire` command, as a user's shell runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from waiting import PATIENCE, PROGRAM

from turnwire import cli as turnwire_cli
from turnwire.cli import check, launch
from turnwire.errors import ConfigError

ROOT = Path(__file__).parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
MADE_FIRST = {"smollm2_tools": ["model.path=examples/tiny_policy/model", "services.interpreters.rollout=''"]}
"""By preset, what stands here for a model and an environment that its user makes first."""


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def turnwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "turnwire.cli", *arguments], capture_output=True, text=True, timeout=PROGRAM, check=False
    )


def test_help_loads_no_command_and_lists_all() -> None:
    code = "import sys, turnwire.cli; turnwire.cli.cli(['--help'], standalone_mode=False); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("up", "train", "eval", "check", "tools", "view"):
        assert f"  {name} " in output
    assert not {"rich", "torch", "numpy", "trainer_service"} & set(output.split())


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_is_wrong_with_a_preset(name: str) -> None:
    result = CliRunner().invoke(check.command, [name, *MADE_FIRST.get(name, ()), "--json"])
    assert json.loads(result.stdout) == {
        "config": f"configs/{name}.yaml",
        "ok": True,
        "problems": [],
        "warnings": [],
    }
    assert result.exit_code == 0


def test_a_model_that_is_yet_to_be_made_is_missed_with_the_command_that_makes_it() -> None:
    result = CliRunner().invoke(check.command, ["smollm2_tools", "--json", "model.path=./not/there"])
    found = {item["key"]: item["message"] for item in json.loads(result.stdout)["problems"]}
    assert found["run.model.path"].endswith("config.json is missing; make it with: make examples/smollm2/model")
    assert "examples/smollm2/model:" in (ROOT / "Makefile").read_text()


def test_check_finds_all_mistakes_of_all_services_at_once() -> None:
    result = CliRunner().invoke(
        check.command,
        [
            "demo",
            "--json",
            "algorithm.advantage_estimator=grp",
            "rollout.grup_size=3",
            "tools=[sqll]",
            "model.path=./nowhere",
            "reward.name=exact",
            "services.rollout.engine.max_sequences=0",
            "services.tool.sandbox.pool.ready=many",
        ],
    )
    found = {item["key"]: item["message"] for item in json.loads(result.stdout)["problems"]}
    assert found.keys() == {
        "run.algorithm.advantage_estimator",
        "run.rollout.grup_size",
        "run.tools",
        "run.model.path",
        "run.reward.name",
        "services.rollout.engine.model",
        "services.rollout.engine.max_sequences",
        "services.tool.sandbox.pool.ready",
    }
    assert "did you mean 'grpo'?" in found["run.algorithm.advantage_estimator"]
    assert "did you mean 'group_size'?" in found["run.rollout.grup_size"]
    assert "did you mean 'sql'?" in found["run.tools"]
    assert result.exit_code == 1


def test_check_prints_problems_and_warnings_for_people() -> None:
    result = turnwire("check", "demo", "rollout.grup_size=3", "rollout.max_in_flight=8")
    assert result.returncode == 1
    assert "demo.yaml: 1 problem\n  run.rollout.grup_size: unknown key; did you mean 'group_size'?" in result.stderr
    assert "worth a look\n  run.rollout.max_in_flight: 8 trajectories at once" in result.stderr


def test_a_config_that_is_not_there_is_told_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    result = turnwire("check", "deno")
    assert result.returncode == 1
    assert "no such file" in result.stderr
    assert "did you mean 'demo'?" in result.stderr
    assert "Traceback" not in result.stderr
    result = turnwire("check", "deno", "--json")
    assert result.returncode == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert "did you mean 'demo'?" in document["problems"][0]["message"]
    result = turnwire("check", str(tmp_path))
    assert "but not of a run" in result.stderr
    assert "services: missing" in turnwire("up", "demo", "services=null").stderr


def test_overrides_name_the_run_with_or_without_its_prefix() -> None:
    found = launch.examine("demo", ["training.steps=7", "run.seed=3", "services.trainer.runs_folder=elsewhere"])
    config = found.usable()
    assert (config.run.training.steps, config.run.seed) == (7, 3)
    assert config.services is not None
    assert config.services.trainer.runs_folder == "elsewhere"
    assert config.services.rollout.engine.model == config.run.model.path


def test_a_file_without_services_needs_a_target(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = (ROOT / "configs/demo.yaml").read_text()
    file.write_text(text[: text.index("services:")])
    assert launch.examine(str(file)).usable().services is None
    with pytest.raises(ConfigError, match=r"services\.rollout: missing"):
        launch.examine(str(file), ["services.trainer.runs_folder=x"]).usable()
    result = turnwire("train", str(file))
    assert result.returncode == 1
    assert "--target" in result.stderr


def test_tools_are_listed_from_a_service_started_for_the_question() -> None:
    result = turnwire("tools", "--json")
    assert result.returncode == 0, result.stderr
    tools = {tool["name"]: tool for tool in json.loads(result.stdout)}
    assert tools.keys() == {"bash", "python", "sql", "search", "unit_tests"}
    assert tools["python"]["healthy"] is True
    assert tools["python"]["stop_strings"] == ["</python>"]
    assert "query" in tools["sql"]["arguments_schema"]["properties"]


def test_an_unreachable_target_is_named_without_a_traceback() -> None:
    result = turnwire("tools", "--target", "127.0.0.1:1")
    assert result.returncode == 1
    assert "no tool service answers at 127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.stderr


def test_check_finds_tasks_that_a_tool_or_the_reward_would_refuse(tmp_path: Path) -> None:
    row = {
        "data_source": "mine/sums",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
    }
    texts = {**row, "reward_model": {"ground_truth": "two"}, "extra_info": {"tools_kwargs": {"python": {}}}}
    file = tmp_path / "mine.jsonl"
    file.write_text(f"{json.dumps(row)}\n{json.dumps(texts)}\n")
    source = f"[{{kind: jsonl, path: {file}, size: 1}}]"

    def problems(*overrides: str) -> list[str]:
        return [str(problem) for problem in launch.examine("demo", overrides).problems]

    found = problems(f"data.train={source}", "data.eval=[]")
    assert len(found) == 1
    assert found[0].startswith(f"run.data.train.0: {file} row 0, context of tool 'search': no documents")
    assert "set `tools` to those that these tasks need" in found[0]
    assert problems(f"data.train={source}", "data.eval=[]", "tools=[python]", "reward.name=numeric") == []

    found = problems(f"data.train={source}", "tools=[python]", "reward.name=numeric")
    assert any("run.data.eval.2: task demo-search-" in problem and "is not a number" in problem for problem in found)

    rest = f"data.train=[{{kind: jsonl, path: {file}, start: 1}}]"
    (problem,) = problems(rest, "data.eval=[]", "reward.name=numeric")
    assert f"{file} row 1, reward 'numeric': the ground truth 'two' is not a number" in problem

    with_context = {**row, "extra_info": {"tools_kwargs": {"python": {"create_kwargs": {"depth": 1}}}}}
    file.write_text(json.dumps(with_context))
    (problem,) = problems(f"data.train={source}", "data.eval=[]")
    assert "context of tool 'python': unknown key 'depth'" in problem


def commands_on_pages() -> list[str]:
    found = []
    for page in ("README.md", "docs/cli.md", "docs/data.md"):
        text = (ROOT / page).read_text()
        for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line.partition(" #")[0].strip() for line in lines if line.startswith("turnwire ")]
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        found += [" ".join(item.replace("\\|", "|").split()) for item in re.findall(r"`(turnwire\s[^`]+)`", prose)]
    return sorted(set(found))


def test_commands_are_found_on_the_pages() -> None:
    found = " ".join(commands_on_pages())
    assert "train configs/demo.yaml 'data.train=" in found
    assert "train python_math reward.name=numeric 'data.train=" in found


@pytest.mark.parametrize("line", commands_on_pages())
def test_a_command_on_a_page_is_one_and_its_config_is_good(line: str, tmp_path: Path) -> None:
    line = re.sub(r"\[[^\[\]]*…\]|\[CONFIG\]", "", line)  # what may be left out
    _, name, *words = shlex.split(line)
    command = turnwire_cli.cli.get_command(click.Context(turnwire_cli.cli), name)
    assert command is not None, f"there is no turnwire {name}"
    if isinstance(command, click.Group):
        name, *words = words
        assert name in command.commands, f"there is no {command.name} {name}"
        command = command.commands[name]
    given = command.make_context(name, list(words), resilient_parsing=True).params  # options that exist
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known
    config = given.get("config")
    without_one = given.get("resume") or (command.name == "check" and "backend" in given)
    if config is None or without_one or config.split("|")[0] in ("CONFIG", "RUN"):
        return
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Compute {number}*17."}],
            "reward_model": {"ground_truth": str(number * 17)},
        }
        for number in range(3)
    ]
    overrides = []
    for item in given.get("overrides") or ():
        for file in re.findall(r"path: (\w+\.parquet)", item):
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / file)
        overrides.append(item.replace("path: ", f"path: {tmp_path}/") if ".parquet" in item else item)
    found = launch.examine(config, overrides)
    assert (found.problems, found.warnings) == ([], [])


def wait_for(condition: object, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def up(tmp_path: Path) -> object:
    command = [sys.executable, "-m", "turnwire.cli", "up", "demo", "--json", "--logs", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)


def announced(process: subprocess.Popen[str]) -> dict[str, dict[str, str]]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    document: dict[str, dict[str, str]] = json.loads(line)
    return document


def test_up_starts_three_services_and_ctrl_c_stops_them(up: subprocess.Popen[str]) -> None:
    document = announced(up)
    assert document["targets"].keys() == {"tool", "rollout", "trainer"}
    assert turnwire("tools", "--target", document["targets"]["tool"]).returncode == 0
    pids = [int(pid) for pid in document["pids"].values()]
    up.send_signal(signal.SIGINT)
    assert up.wait(PATIENCE) == 0
    assert not any(alive(pid) for pid in pids)


def test_a_service_that_dies_is_reported_with_the_tail_of_its_log(up: subprocess.Popen[str]) -> None:
    document = announced(up)
    os.kill(int(document["pids"]["rollout"]), signal.SIGKILL)
    assert up.wait(PATIENCE) == 1
    assert up.stderr is not None
    message = up.stderr.read()
    assert "the rollout service was killed by SIGKILL" in message
    assert "listening on" in message
    wait_for(lambda: not any(alive(int(pid)) for pid in document["pids"].values()))


def test_services_end_when_the_command_is_killed(up: subprocess.Popen[str]) -> None:
    document = announced(up)
    up.kill()
    wait_for(lambda: not any(alive(int(pid)) for pid in document["pids"].values()))
