"""Accuracies as `turnwire train` and `eval` print them: one over fewer tasks never looks like one over all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from turnwire.cli import output, summary
from turnwire.cli.progress import LiveView, LogView, RunState
from turnwire.v1 import trainer_pb2

BEFORE = trainer_pb2.Evaluation(
    step=0,
    accuracy={"[a]/whole": 0.25, "some": 0.5},
    tasks={"[a]/whole": 4, "some": 3, "none": 0},
    failures={
        "some": trainer_pb2.EvaluationFailures(trajectories=2, tasks=1, reason="[/tmp/x] is away"),
        "none": trainer_pb2.EvaluationFailures(trajectories=4, tasks=4, reason="too late"),
    },
)
AFTER = trainer_pb2.Evaluation(
    step=5, accuracy={"[a]/whole": 0.75, "some": 0.25, "none": 1.0}, tasks={"[a]/whole": 4, "some": 4, "none": 4}
)


def event(**what: Any) -> trainer_pb2.WatchRunResponse:
    message = trainer_pb2.WatchRunResponse(**what)
    message.time.GetCurrentTime()
    return message


@pytest.fixture
def state() -> RunState:
    state = RunState("run", 5)
    for evaluation in (BEFORE, AFTER):
        state.update(event(evaluation=evaluation))
    return state


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    screen = Console(record=True, width=100, markup=False, highlight=False)
    monkeypatch.setattr(output, "console", screen)
    return screen


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def test_the_table_of_before_and_after_marks_what_failed_and_says_why(state: RunState, screen: Console) -> None:
    summary.print_summary(state)
    text = screen.export_text()
    table = rows(text.partition("\n* ")[0])
    assert table["[a]/whole"] == ["0.250", "0.750", "+0.500", "4"]
    assert table["some"] == ["0.500*", "0.250", "-0.250", "4"]
    assert table["none"] == ["none*", "1.000", "4"]
    assert "* some before training: 2 trajectories failed, over 3 of 4 tasks; the first: [/tmp/x] is away" in text
    assert "* none before training: 4 trajectories failed, no accuracy; the first: too late" in text


def test_the_table_of_one_evaluation_does_as_well(screen: Console) -> None:
    summary.print_evaluation(BEFORE)
    text = screen.export_text()
    table = rows(text.partition("\n* ")[0])
    assert table["some"] == ["0.500*", "3", "of", "4"]
    assert table["none"] == ["none*", "0", "of", "4"]
    assert "too late" in text
    summary.print_evaluation(AFTER)
    assert "*" not in screen.export_text()


def test_programs_get_null_and_the_failures(state: RunState) -> None:
    document = json.loads(json.dumps(summary.summary_json(state)))
    assert document["before"] == {"[a]/whole": 0.25, "none": None, "some": 0.5}
    assert document["failures"] == {
        "before": {
            "none": {"trajectories": 4, "tasks": 4, "reason": "too late"},
            "some": {"trajectories": 2, "tasks": 1, "reason": "[/tmp/x] is away"},
        },
        "after": {},
    }
    state.evaluations.pop()
    evaluated = summary.evaluation_json(state)
    assert evaluated["accuracy"] == document["before"]
    assert evaluated["failures"] == document["failures"]["before"]
    assert evaluated["tasks"]["none"] == 0


def test_progress_marks_them_too(screen: Console) -> None:
    state = RunState("run", 5)
    for view in (LogView(state, screen), LiveView(state, screen)):
        for message in (
            event(evaluation=BEFORE),
            event(step=trainer_pb2.StepFinished(step=1, metrics={"reward/some": 0})),
        ):
            state.update(message)
            view.updated(message)
    assert "evaluated before training: [a]/whole 0.250  none none*  some 0.500*" in screen.export_text()
    with LiveView(state, screen):
        pass
    assert "before training 0.500*" in screen.export_text()
