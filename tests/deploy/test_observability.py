"""What deploy/observability asks of the services: that they export it, and that a real Prometheus takes it."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml
from observed import OBSERVABILITY, Observed, expressions, names, observed

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
DASHBOARDS = sorted((OBSERVABILITY / "grafana" / "dashboards").glob("*.json"))

ABSENT = {
    "turnwire_gpu_utilization_ratio": "no GPU here",
    "turnwire_gpu_memory_used_bytes": "no GPU here",
    "turnwire_gpu_memory_size_bytes": "no GPU here",
    "turnwire_gpu_power_watts": "no GPU here",
    "turnwire_trainer_kl_reference": "the run has no reference model",
    "turnwire_trainer_tool_error_ratio": "there may have been no error",
}
"""Metrics without a series in the observed run, and why; that they are declared is asked of all."""


@pytest.fixture(scope="module")
def seen() -> Observed:
    return observed()


def families(text: str) -> set[str]:
    """The names of a scrape, as they are queried."""
    declared = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    return {
        f"{name}{suffix}"
        for name, kind in declared
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }


@pytest.mark.needs("isolated-sandbox")
def test_every_metric_that_a_dashboard_or_an_alert_names_is_exported(seen: Observed) -> None:
    exported = set().union(*(families(text) for text in seen.metrics.values()))
    wanted = {name: place for place, text in expressions().items() for name in names(text)}
    assert {name: place for name, place in wanted.items() if name not in exported} == {}


@pytest.mark.needs("isolated-sandbox")
def test_every_metric_of_ours_says_what_it_is_and_is_on_a_dashboard_or_in_the_docs(seen: Observed) -> None:
    documented = set(re.findall(r"`(turnwire_[a-z_]+)", PAGE.read_text()))
    used = {name for text in expressions().values() for name in names(text)} | documented
    declared = set()
    for text in seen.metrics.values():
        for name, help_text in re.findall(r"^# HELP (turnwire_\S+) ?(.*)$", text, re.MULTILINE):
            assert help_text.endswith("."), name
            assert {name, *(f"{name}{suffix}" for suffix in ("_bucket", "_sum", "_count"))} & used, f"{name} is nowhere"
            declared.add(name)
    assert documented <= declared


@pytest.mark.needs("isolated-sandbox", "prometheus")
def test_a_real_prometheus_reads_all_three_services(seen: Observed) -> None:
    assert seen.targets == {"tool": "up", "rollout": "up", "trainer": "up"}


@pytest.mark.needs("isolated-sandbox", "prometheus")
def test_a_real_prometheus_has_what_dashboards_and_alerts_name_and_understands_what_they_ask(seen: Observed) -> None:
    assert seen.prometheus is not None
    wrong = {place: text for place, text in expressions().items() if seen.prometheus[text] is None}
    assert wrong == {}
    missing = {name for text in expressions().values() for name in names(text) if not seen.prometheus[name]}
    assert missing <= set(ABSENT)
    firing = [place for place, text in expressions().items() if place.startswith("alerts: ") and seen.prometheus[text]]
    assert firing == []


@pytest.mark.needs("isolated-sandbox")
def test_labels_are_bounded_and_hold_no_trajectory(seen: Observed) -> None:
    ours = [line for text in seen.metrics.values() for line in text.splitlines() if line.startswith("turnwire_")]
    labels = {label for line in ours for label in re.findall(r'[{,](\w+)="', line)}
    assert labels == {
        *("le", "service", "method", "code", "tool", "error", "state", "resumed", "stop_reason", "run", "source"),
        "version",
    }
    most = Counter(re.match(r"\w+", line)[0] for line in ours if "_bucket" not in line)  # type: ignore[index]
    assert max(most.values()) < 64


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_explains_itself_and_nothing_overlaps(path: Path) -> None:
    board = json.loads(path.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.needs("prometheus")
@pytest.mark.parametrize("arguments", [("config", "prometheus.yml"), ("rules", "alerts.yml")])
def test_promtool_accepts_the_files(arguments: tuple[str, str]) -> None:
    kind, name = arguments
    subprocess.run(["promtool", "check", kind, str(OBSERVABILITY / name)], check=True, timeout=60)


@pytest.mark.needs("prometheus")
def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    """By promtool's own tests of rules: the cases are in alerts_test.yml beside this file."""
    cases = yaml.safe_load(Path(__file__).with_name("alerts_test.yml").read_text())
    rules = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())
    tested = {case["alertname"] for test in cases["tests"] for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert tested == {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    cases["rule_files"] = [str(OBSERVABILITY / "alerts.yml")]
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "cases.yml")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
