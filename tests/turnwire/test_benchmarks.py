"""`python -m benchmarks`: a short run measures something and says it as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PROGRAM

ROOT = Path(__file__).parents[2]


def benchmarks(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    variables = {**os.environ, **environment}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PROGRAM, check=False, cwd=ROOT, env=variables
    )


def results() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (ROOT / "benchmarks" / "results").glob("*.json")}


@pytest.mark.needs("isolated-sandbox")
def test_a_quick_run_shows_a_table_and_writes_json_into_the_folder_that_it_is_given(tmp_path: Path) -> None:
    before = results()
    result = benchmarks("turns", "--quick", "--output", tmp_path / "new")
    assert result.returncode == 0, result.stderr
    assert "turns/s" in result.stdout
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["turns.json"]
    document = json.loads((tmp_path / "new" / "turns.json").read_text())
    assert (document["name"], document["quick"]) == ("turns", True)
    assert document["machine"]["cpus"] >= 1
    assert len(document["rows"]) > 1
    assert all(row["turns/s"] > 0 and row["p99 ms"] >= row["p50 ms"] > 0 for row in document["rows"])
    assert results() == before


@pytest.mark.needs("isolated-sandbox")
def test_a_quick_run_with_sandboxes_has_both_sides_and_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    result = benchmarks("sandboxes", "--quick", "--output", tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert result.returncode == 0, result.stderr
    rows = {row["figure"]: row["value"] for row in json.loads((tmp_path / "sandboxes.json").read_text())["rows"]}
    assert rows["open + first observation, warm pool, p50 ms"] <= rows["open + first observation, warm pool, p99 ms"]
    ours, theirs = rows["an isolated sandbox from the warm interpreter, p50 ms"], rows["`unshare ... true`, p50 ms"]
    assert rows["ours against unshare"] == pytest.approx(ours / theirs)
    assert not list((tmp_path / "tmp").iterdir())


def test_an_unknown_benchmark_is_named_with_those_that_are_there() -> None:
    result = benchmarks("turn")
    assert result.returncode == 2
    assert "unknown: turn; there are turns, " in result.stderr
