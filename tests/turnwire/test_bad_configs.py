"""What `turnwire check` says of bad configs: the key, what is allowed, the nearest match; never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from waiting import PROGRAM

from turnwire import cli
from turnwire.cli import launch
from turnwire.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def found(config: str, *overrides: str) -> list[str]:
    """Problems as they are printed, whether the config could be read or not."""
    try:
        return [str(problem) for problem in launch.examine(config, overrides).problems]
    except ConfigError as error:
        return [str(problem) for problem in error.problems]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty; it must hold `key: value` lines"),
        (b"# only a comment\n", "is empty; it must hold `key: value` lines"),
        (b"- a\n- b\n", "holds ['a', 'b']; it must hold `key: value` lines"),
        (b"just text\n", "holds 'just text'; it must hold `key: value` lines"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"run:\n\tname: x\n", "found character '\\t' that cannot start any token"),
        (b"run:\n  name: x\n  name: y\n", "the key 'name' is there twice"),
        (b"run: {name: x\n", "expected ',' or '}'"),
        (b"run: {name: &a [*a]}\n", "recursive"),
        (b"run: {1: x}\n", "keys are strings, not 1"),
        (b"run: {}\n---\nrun: {}\n", "expected a single document"),
        (b"run: {name: !!python/object:os.system x}\n", "could not determine a constructor"),
        (b"run: {seed: " + b"9" * 5000 + b"}\n", "the number is too long"),
        (b"[" * 5000, "is nested too deeply"),
        (b"run: 3\n", "run: expected `key: value` lines, got 3"),
        (b"runn: {name: x}\n", "runn: unknown key; did you mean 'run'? Allowed: run, services"),
        (b"run: {name: x, model: null}\n", "run.model: expected `key: value` lines, got null"),
        (b"run: {name: x}\n", "run.training: missing"),
    ],
)
def test_a_file_that_is_no_config_says_what_it_is(content: bytes, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(content)
    assert any(expected in problem for problem in found(str(file))), found(str(file))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # the key
        ("rollout.grup_size=3", "run.rollout.grup_size: unknown key; did you mean 'group_size'? Allowed: final_answer"),
        ("seeed=3", "run.seeed: unknown key; did you mean 'seed'?"),
        ("rollout.retry.atempts=3", "run.rollout.retry.atempts: unknown key; did you mean 'attempts'?"),
        ("data.train.0.siz=3", "run.data.train.0.siz: unknown key; did you mean 'size'?"),
        (
            "services.tol=3",
            "services.tol: unknown key; did you mean 'tool'? Allowed: interpreters, rollout, tool, trainer",
        ),
        ("services.tool.sandbox.pool.maxx=3", "services.tool.sandbox.pool.maxx: unknown key; did you mean 'max'?"),
        ("training", "training: an override is written key=value"),
        ("=3", "an override is written key=value"),
        ("training..steps=3", "an override is written key=value"),
        ("a.b.c=[", "run.a.b.c: while parsing a flow node"),
        ("training.steps.x=3", "run.training.steps.x: there is no such place: run.training.steps is the plain value"),
        ("data.train.9.size=3", "run.data.train is a list of 3, named by position from 0; not '9'"),
        ("data.train.-1.size=3", "run.data.train is a list of 3, named by position from 0; not '-1'"),
        ("data.train.x.size=3", "run.data.train is a list of 3, named by position from 0; not 'x'"),
        ("run=3", "run: expected `key: value` lines, got 3"),
        ("services=3", "services: expected `key: value` lines, got 3"),
        # the type
        ("training.steps=", "run.training.steps: expected `int`, got null"),
        ("training.steps=none", "run.training.steps: expected `int`, got 'none'"),
        ("training.steps=3.5", "run.training.steps: expected `int`, got 3.5"),
        ("training.steps=true", "run.training.steps: expected `int`, got true"),
        ("name=3", "run.name: expected `str`, got 3"),
        ("tools=python", "run.tools: expected `array`, got 'python'"),
        ("optimizer.betas=[1]", "run.optimizer.betas: expected `array` of length 2, got [1]"),
        # the range
        ("training.steps=-1", "run.training.steps: expected `int` >= 0, got -1"),
        ("training.steps=99999999999999999999", "run.training.steps: expected `int` <= 2147483647"),
        ("seed=99999999999999999999", "run.seed: expected `int` <= 9223372036854775807"),
        ("rollout.retry.patience_seconds=1e300", "expected `float` <= 100000000.0, got 1e+300"),
        ("training.steps=1e400", "run.training.steps: must be a finite number, not inf"),
        ("optimizer.learning_rate=.nan", "run.optimizer.learning_rate: must be a finite number, not nan"),
        ("optimizer.learning_rate=nan", "run.optimizer.learning_rate: expected `float`, got 'nan'"),
        ("optimizer.betas=[0.9, .inf]", "run.optimizer.betas.1: must be a finite number, not inf"),
        ("optimizer.betas=[0.9, 2]", "run.optimizer.betas.1: expected `float` <= 1.0, got 2"),
        ("algorithm.loss_options={tau_pos: .nan}", "run.algorithm.loss_options.tau_pos: must be a finite number"),
        ("data.train=[]", "run.data.train: expected `array` of length >= 1, got []"),
        ("services.tool.server.port=99999", "services.tool.server.port: expected `int` <= 65535, got 99999"),
        # the name of something
        ("optimizer.schedule=cosin", "did you mean 'cosine'? Allowed: constant, cosine, linear"),
        ("reward.name=exact_mtch", "run.reward.name: unknown reward 'exact_mtch'; did you mean 'exact_match'?"),
        (
            "reward.options={ignore_cas: true}",
            "run.reward.options.ignore_cas: unknown key; did you mean 'ignore_case'?",
        ),
        ("algorithm.policy_loss=vanila", "run.algorithm.policy_loss: unknown: 'vanila'; did you mean 'vanilla'?"),
        ("algorithm.advantage_estimator=gae", "'gae' cannot run here: it needs the values of a trained critic"),
        ("tools=[pythn]", "run.tools: no tool 'pythn' is served; did you mean 'python'?"),
        ("data.train=[{kind: procedural, generator: dmo, size: 3}]", "unknown generator 'dmo'; did you mean 'demo'?"),
        ("data.train=[{kind: jsonl, path: nothing.jsonl}]", "run.data.train.0.path: there is no file"),
        ("model.path=configs/model", "there is no folder configs/model; it is looked for from"),
        ("services.interpreters.rollout=elsewhere/.venv-vllm/bin/python", "`make vllm` makes .venv-vllm"),
        # a path that the shell did not expand
        ("model.path=$HOME/model", "config.json is missing; ~ and $ are taken as they are: write the path out"),
        ("model.path=~/model", "config.json is missing; ~ and $ are taken as they are: write the path out"),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_what_is_allowed(override: str, expected: str) -> None:
    problems = found("demo", override)
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize("name", ["", "no/such.yaml", "x" * 5000])
def test_a_config_that_is_not_there_exits_with_1_and_no_traceback(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "turnwire.cli", "check", name],
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_wrong_command_line_exits_with_2() -> None:
    for arguments in (["check"], ["frobnicate"], ["check", "demo", "--jsn"], ["train"], ["view", "x", "--step", "y"]):
        result = CliRunner().invoke(cli.cli, arguments)
        assert result.exit_code == 2, arguments
        assert "Usage:" in result.stderr


def test_a_config_may_come_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = (ROOT / "configs" / "demo.yaml").read_text()
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    assert found(str(pipe), "training.steps=x") == ["run.training.steps: expected `int`, got 'x'"]
    writer.join()


def test_texts_in_brackets_are_shown_as_they_are() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "turnwire.cli", "check", "demo", "rollout.x[/foo]=3"],
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
        env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "40"},
    )
    assert result.returncode == 1
    assert "rollout.x[/foo]" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "demo", "--run-id", "a/b"], "run_id 'a/b': up to 100 letters, digits, dots, dashes, underscores"),
        (["eval", "demo", "--run-id", ""], "run_id '': up to 100 letters"),
        (["train", "demo", "--resume", "nope"], "there is no run in runs/nope"),
        (["train", "--resume", "nope"], "there is no run in runs/nope"),
        (["train", "--resume", "nope", "--target", "127.0.0.1:1"], "name its CONFIG too"),
        (["train", "demo", "--target", "nonsense"], "'nonsense' is not an address; write host:port"),
        (["eval", "demo", "data.eval=[]"], "run.data.eval: is empty: there is nothing to evaluate on"),
        (["eval", "nope"], "there is no such file"),
        (["tools", "nope"], "there is no such file"),
        (["up", "nope"], "there is no such file"),
        (["view", "nope"], "there is no run with trajectories in nope or runs/nope"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["turnwire", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    output = capsys.readouterr()
    assert expected in output.err
    assert output.out == ""


@pytest.mark.parametrize("name", ["demo", "ünïcode/and more", "-_", "x" * 200])
def test_a_fresh_run_id_is_one_that_the_trainer_takes(name: str) -> None:
    taken = {launch.fresh_run_id(name, lambda _: False)}
    for run_id in (*taken, launch.fresh_run_id(name, taken.__contains__)):
        launch.check_run_id(run_id)
