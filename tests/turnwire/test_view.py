"""`turnwire view` on a run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from records_of_a_run import write_run
from rich.console import Console
from waiting import PROGRAM

from turnwire.cli import trajectory_view, view
from turnwire.cli.records import Choice, find_run, select
from turnwire.errors import InvalidRequestError, NotFoundError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "demo-1")


def show(*arguments: object) -> Result:
    return CliRunner().invoke(view.command, [str(argument) for argument in arguments])


def test_the_latest_step_is_shown_with_every_part_labelled(run: Path) -> None:
    text = show(run).stdout
    for part in (
        "training after 1 updates",
        "reward 1.00",
        "advantage +0.70",
        "prompt   <|user|>Compute 17*23.",
        "action   <python>17*23</python>",
        "python   <|end|><|tool|>391",
        "python 3.1 ms",
        "round trip 4.2 ms",
        "ended by stop string",
        "answer '391'  truth '391'  ended by FINAL_ANSWER",
        "mask 1 at 42 of",
    ):
        assert part in text, text


def test_action_and_observation_tokens_have_different_colours(run: Path) -> None:
    console = Console(record=True, width=120, force_terminal=True, color_system="truecolor")
    console.print(trajectory_view.show(select(run, Choice())[0]))
    colours = {}
    for segment in console._record_buffer:
        if segment.style and segment.style.color and segment.text.strip():
            colours[segment.text.strip()] = segment.style.color.name
    assert colours["391"] == "#5fafff"
    assert colours["y"] == "#5fd787"
    assert colours["<|end|><|assistant|>"] == "#767676"


def test_a_table_of_tokens_has_the_mask_and_the_logprobs(run: Path) -> None:
    lines = show(run, "--tokens").stdout.splitlines()
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    rows = [row for row in rows if row[1].isdigit()]
    assert len(rows) == 66
    assert sum(row.count("1") > 0 and "action" in row for row in rows) == 42
    assert rows[17][:2] == ["17", "60"]
    assert rows[17][-2:] == ["-0.020", "1"]


def test_what_is_shown_can_be_chosen(run: Path) -> None:
    chosen = json.loads(show(run, "--json", "--step", 0, "--all").stdout)
    assert [record["trajectory_id"] for record in chosen] == ["demo/0/0/1", "demo/1/0/1"]
    assert [r["trajectory_id"] for r in json.loads(show(run, "--json", "--failed").stdout)] == ["demo/1/0/1"]
    assert [r["data_source"] for r in json.loads(show(run, "--json", "--source", "demo/sql").stdout)] == ["demo/sql"]
    assert [r["kind"] for r in json.loads(show(run, "--json", "--eval").stdout)] == ["eval"]
    assert json.loads(show(run, "--json", "--index", 1).stdout)[0]["trajectory_id"] == "demo/3/0/1"
    assert "from 0 to 1" in show(run, "--index", 2).stderr


def test_what_is_not_there_is_said_with_what_is(run: Path) -> None:
    with pytest.raises(NotFoundError, match="there is step 0 to 1, and the sources demo/python, demo/sql"):
        select(run, Choice(step=7))
    with pytest.raises(NotFoundError, match=r"did you mean 'demo-1'"):
        find_run("demo-2", run.parent)
    assert find_run("demo-1", run.parent) == run
    (run / "trajectories" / "eval.jsonl").unlink()
    with pytest.raises(NotFoundError, match="leave --eval out"):
        select(run, Choice(evaluation=True))


def test_pictures_are_written(run: Path, tmp_path: Path) -> None:
    assert show(run, "--html", tmp_path / "a.html", "--svg", tmp_path / "a.svg").exit_code == 0
    assert "5fafff" in (tmp_path / "a.html").read_text()
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"a": \n', "truncated"),
        (b"[1, 2]\n", "Expected `object`, got `array`"),
        (b'{"step": 1}\n', "missing required field"),
        (b"\xff\xfe\n", "malformed"),
        (b'{"kind": "train", "step": "1"}\n', "Expected `int`"),
    ],
)
def test_a_damaged_line_is_named_and_one_that_is_being_written_is_not_there_yet(
    run: Path, line: bytes, why: str
) -> None:
    path = run / "trajectories" / "train.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] + b"\n"
    path.write_bytes(whole + line.rstrip(b"\n"))
    assert len(select(run, Choice())) == 2
    path.write_bytes(line + whole)
    with pytest.raises(InvalidRequestError, match=rf"train.jsonl, line 1, is not a trajectory: .*{why}"):
        select(run, Choice())


def shell(command: str, run: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a user's shell does it; `turnwire` is this command, $RUN the run."""
    return subprocess.run(
        ["bash", "-c", f'turnwire() {{ "{sys.executable}" -m turnwire.cli "$@"; }}; {command}'],
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
        cwd=Path(__file__).parents[2],
        env={
            **{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")},
            "RUN": str(run),
            **environment,
        },
    )


def test_a_reader_that_leaves_early_is_no_error_to_show(run: Path) -> None:
    for options in ("--all --tokens", "--all --json"):
        result = shell(f'turnwire view "$RUN" {options} | head -n 1', run)
        assert len(result.stdout.splitlines()) == 1
        assert "Traceback" not in result.stderr
        assert "BrokenPipe" not in result.stderr


def test_a_device_that_is_full_and_a_folder_that_is_not_there_are_named_without_a_traceback(run: Path) -> None:
    full = shell('turnwire view "$RUN" > /dev/full', run)
    assert full.returncode != 0
    assert "error: [Errno 28] No space left on device" in full.stderr
    nowhere = shell('turnwire view "$RUN" --html /no/such/folder/x.html', run)
    assert nowhere.returncode == 1
    assert "error: [Errno 2] No such file or directory: '/no/such/folder/x.html'" in nowhere.stderr
    assert "Traceback" not in full.stderr + nowhere.stderr


def test_a_narrow_terminal_and_a_pipe_get_what_fits_them(run: Path) -> None:
    narrow = shell('turnwire view "$RUN"', run, COLUMNS="40").stdout
    assert max(map(len, narrow.splitlines())) <= 40
    assert "17*23" in narrow
    assert shell('turnwire view "$RUN" --tokens', run, COLUMNS="10").returncode == 0
    assert "\x1b[" not in shell('turnwire view "$RUN"', run).stdout
    coloured = shell('turnwire view "$RUN"', run, FORCE_COLOR="1").stdout
    assert "\x1b[38;" in coloured or "\x1b[3" in coloured
    assert "\x1b[3" not in shell('turnwire view "$RUN"', run, FORCE_COLOR="1", NO_COLOR="1").stdout
