"""Traces and logs of the three services, as they are when a run trains: see tests/observed.py."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest
from observed import TRAJECTORIES, Observed, Span, observed

pytestmark = pytest.mark.needs("isolated-sandbox")


@pytest.fixture(scope="module")
def seen() -> Observed:
    return observed()


@pytest.fixture(scope="module")
def traces(seen: Observed) -> dict[str, list[Span]]:
    """By trace, those of trajectories."""
    found = defaultdict(list)
    for span in seen.spans:
        found[span.trace].append(span)
    return {trace: spans for trace, spans in found.items() if any(span.name == "sample" for span in spans)}


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def test_one_trajectory_is_one_trace_across_the_three_services(traces: dict[str, list[Span]]) -> None:
    assert len(traces) == TRAJECTORIES
    for spans in traces.values():
        (sample,), (trajectory,) = named(spans, "sample"), named(spans, "trajectory")
        assert (sample.service, sample.parent) == ("turnwire-trainer", "")
        assert (trajectory.service, trajectory.parent) == ("turnwire-rollout", sample.id)
        (session,) = named(spans, "session")
        assert (session.service, session.parent) == ("turnwire-tool", trajectory.id)


def test_each_turn_is_a_span_under_its_trajectory_with_the_tools_work_below(traces: dict[str, list[Span]]) -> None:
    executed = 0
    for spans in traces.values():
        (trajectory,) = named(spans, "trajectory")
        turns = {span.id: span for span in named(spans, "turn")}
        assert {span.parent for span in turns.values()} == {trajectory.id}
        numbers = sorted(span.attributes["turnwire.turn"] for span in turns.values())
        assert numbers == list(range(trajectory.attributes["turnwire.turns"]))
        for execute in named(spans, "execute"):
            turn = turns[execute.parent]
            assert execute.service == "turnwire-tool"
            assert execute.attributes["turnwire.turn"] <= turn.attributes["turnwire.turn"]
            for key in ("turnwire.tools", "turnwire.errors"):
                assert execute.attributes.get(key, []) == turn.attributes.get(key, [])
            executed += len(execute.attributes["turnwire.tools"])
    assert executed, "the policy called no tool, so this test has shown nothing"


def test_a_step_names_the_trajectories_it_trains_on(seen: Observed, traces: dict[str, list[Span]]) -> None:
    steps = named(seen.spans, "step")
    assert sorted(step.attributes["turnwire.step"] for step in steps) == [1, 2]
    for step in steps:
        assert len(set(step.links)) == 16
        assert set(step.links) <= set(traces)
        phases = [span.name for span in seen.spans if span.parent == step.id]
        assert sorted(phases) == ["canary", "learn", "push", "wait"]
        inside = [span for span in seen.spans if span.trace == step.trace and span.service == "turnwire-rollout"]
        assert sorted(span.name for span in inside) == [
            "turnwire.v1.RolloutService/Score",
            "turnwire.v1.RolloutService/UpdateWeights",
        ]


def test_spans_hold_names_numbers_and_ids_alone(seen: Observed) -> None:
    keys = Counter(key for span in seen.spans for key in span.attributes)
    assert set(keys) | {"turnwire.errors"} == {  # there may have been none
        f"turnwire.{name}"
        for name in (
            *("run_id", "step", "key", "task_id", "tries", "stop_reason", "reward", "trajectory_id", "turn", "turns"),
            *("tools", "errors", "action_tokens", "generate_stop", "prompt_tokens"),
            *("tokens", "sampled_tokens", "weight_versions"),
        )
    }


def test_every_line_of_the_logs_is_json_with_the_run_it_is_about(seen: Observed) -> None:
    for service, lines in seen.logs.items():
        told = [line for line in lines if not line.startswith("listening on ")]  # for the parent process, on stdout
        assert told, service
        entries = [json.loads(line) for line in told]
        assert all({"time", "level", "logger", "message"} <= set(entry) for entry in entries)
