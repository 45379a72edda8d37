"""`turnwire train` and `eval` with `--target`: at services that `turnwire up` started, and that others use too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import interrupt, run, run_and_act
from running_services import running_services

ROOT = Path(__file__).parents[2]
SMALL = ("evaluation.before=false", "training.prompts_per_step=2", "rollout.group_size=2", "evaluation.tasks=1")

pytestmark = pytest.mark.needs("isolated-sandbox")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with running_services(tmp_path_factory.mktemp("up")) as started:
        yield started


def test_a_run_is_trained_there_stopped_resumed_and_evaluated(targets: dict[str, str]) -> None:
    there = ("--target", targets["trainer"])
    begun = ("train", "demo", *SMALL, "training.steps=8", "--run-id", "one", *there)
    status, lines = run_and_act("step 1/", interrupt, *begun)
    assert status == 130, "".join(lines)
    (hint,) = [line.partition("turnwire ")[2].split() for line in lines if line.startswith("go on with")]
    assert hint[:2] == ["train", "--resume"]
    assert hint[-2:] == list(there)

    resumed = run(*hint, "--json")
    assert resumed.returncode == 0, resumed.stderr
    document = json.loads(resumed.stdout)
    assert (document["state"], document["step"], document["run_id"]) == ("finished", 8, "one")
    assert document["after"].keys() == {"demo/python", "demo/sql", "demo/search"}
    assert document["failures"] == {"before": {}, "after": {}}

    evaluated = run("eval", document["folder"], "evaluation.tasks=2", *there, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    found = json.loads(evaluated.stdout)
    assert found["tasks"] == {"demo/python": 2, "demo/search": 2, "demo/sql": 2}
    assert Path(found["folder"]).parent == Path(document["folder"]).parent

    alone = run("eval", document["folder"])
    assert alone.returncode == 1
    assert "services: missing; name a running trainer with --target HOST:PORT" in alone.stderr


def test_what_the_trainer_there_refuses_is_said_by_its_key(targets: dict[str, str]) -> None:
    result = run("train", "demo", *SMALL, "training.steps=1", "--run-id", "no/id", "--target", targets["trainer"])
    assert result.returncode == 1
    assert "run_id 'no/id': up to 100 letters, digits, dots, dashes, underscores" in result.stderr
    assert "Traceback" not in result.stderr
