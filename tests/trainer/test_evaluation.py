"""Evaluations whose trajectories fail in part: what an accuracy is then, and where the failures show."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from services import all_services, finished, last_state, letters_run, notices
from trainer_harness import DEMO, HELD_OUT, judged, sequences, task

from trainer_service.accuracy import Failures, accuracies
from trainer_service.groups import Failed, Judged, Member

FLAKY = """
from trainer_service.rewards.base import Reward

class Flaky(Reward):
    '''Share of small letters; no answer for any search task, nor for the first sql task.'''
    name = "flaky"

    def score(self, task, attempt):
        if task.data_source == "demo/search" or task.data_source == "demo/sql" and task.task_id.endswith("-0"):
            raise RuntimeError("the judge is asleep")
        text = "".join(turn.action for turn in attempt.turns)
        return sum(letter.islower() for letter in text) / max(1, len(text))
"""


def judged_member(source: str, task_id: str, reward: float) -> Judged:
    member = judged(sequences(1)[0], reward)
    return Judged(member.key, task(data_source=source, task_id=task_id), member.sampled, member.score)


def failed_member(source: str, task_id: str, reason: str) -> Failed:
    return Failed("key", task(data_source=source, task_id=task_id), reason)


def test_an_accuracy_is_the_mean_over_tasks_of_what_could_be_judged_of_each() -> None:
    members: list[Member] = [
        *(judged_member("whole", "1", reward) for reward in (0.0, 1.0)),
        judged_member("whole", "2", 1.0),
        judged_member("some", "1", 1.0),
        failed_member("some", "1", "away"),  # the other sample of task 1 counts for it
        failed_member("some", "2", "late"),
        judged_member("some", "3", 0.0),
        failed_member("none", "1", "gone"),
    ]
    found = accuracies(members)
    assert found.accuracy == {"whole": 0.75, "some": 0.5, "none": None}
    assert found.tasks == {"whole": 2, "some": 2, "none": 0}
    assert found.failures == {
        "some": Failures(trajectories=2, tasks=1, reason="away"),
        "none": Failures(trajectories=1, tasks=1, reason="gone"),
    }


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.needs("isolated-sandbox")
async def test_failures_of_an_evaluation_show_in_events_metrics_and_summary(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    values = letters_run(
        model_path,
        data={"train": [DEMO[0]], "eval": HELD_OUT},
        reward={"name": "flaky", "folders": [str(tmp_path)]},
        evaluation={"samples": 2},
        training={"steps": 12},
    )
    async with all_services(model_path, tmp_path / "runs") as (client, _):
        await client.start_run("run", yaml.safe_dump(values))
        async for event in client.watch_run("run"):
            if event.WhichOneof("event") == "step":
                break
        await client.stop_run("run")
        events = await finished(client, "run", values)  # it goes on, and still knows what failed before
    assert last_state(events) == ("FINISHED", "")
    folder = tmp_path / "runs" / "run"
    reason = "reward flaky: RuntimeError: the judge is asleep"
    failures = {
        "demo/search": {"trajectories": 8, "tasks": 4, "reason": reason},
        "demo/sql": {"trajectories": 2, "tasks": 1, "reason": reason},
    }

    evaluated = lines(folder / "trajectories" / "eval.jsonl")
    assert len(evaluated) == 2 * (8 + 6)
    rewards: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in evaluated:
        if record["step"] == 0:
            rewards[record["data_source"]][record["task_id"]].append(record["reward"])
    assert all(len(samples) == 2 for tasks in rewards.values() for samples in tasks.values())
    expected = {
        source: pytest.approx(sum(sum(samples) / 2 for samples in tasks.values()) / len(tasks))
        for source, tasks in rewards.items()
    }

    before, after = [event.evaluation for event in events if event.WhichOneof("event") == "evaluation"]
    assert dict(before.accuracy) == expected
    assert expected.keys() == {"demo/python", "demo/sql"}
    assert dict(before.tasks) == {"demo/python": 4, "demo/sql": 3, "demo/search": 0}
    told = {
        source: {"trajectories": item.trajectories, "tasks": item.tasks, "reason": item.reason}
        for source, item in before.failures.items()
    }
    assert told == failures
    assert dict(after.failures) == dict(before.failures)
    texts = notices(events)
    assert (
        f"evaluation before training, demo/search: all 8 trajectories failed: there is no accuracy; the first: {reason}"
    ) in texts
    assert (
        "evaluation after step 12, demo/sql: 2 trajectories failed, and are not in the accuracy, which is over 3 of 4 "
        f"tasks; the first: {reason}"
    ) in texts

    entry = lines(folder / "metrics.jsonl")[0]
    assert entry["failures"] == failures
    assert {name: value for name, value in entry.items() if name.startswith(("accuracy/", "tasks/", "failed/"))} == {
        **{f"accuracy/{source}": value for source, value in expected.items()},
        **{"tasks/demo/python": 4, "tasks/demo/sql": 3, "tasks/demo/search": 0},
        **{"failed/demo/python": 0, "failed/demo/sql": 2, "failed/demo/search": 8},
    }

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy"]["demo/search"] == {"before": None, "after": None}
    assert summary["evaluations"]["0"] == {**expected, "demo/search": None}
    assert summary["evaluation_failures"] == {"0": failures, "12": failures}
    assert summary["ledger"]["failed"] == 20
