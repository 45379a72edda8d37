"""The examples of docs/rewards.md and docs/data.md run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainer_harness import REPOSITORY, attempt, run_config, run_values, task

from trainer_service.config import RunConfig, check
from trainer_service.data.dataset import load_sources
from trainer_service.rewards.base import Score, ToolOutcome
from trainer_service.rewards.registry import Judges, RewardRegistry
from turnwire.config import convert

REWARDS, DATA = REPOSITORY / "docs" / "rewards.md", REPOSITORY / "docs" / "data.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def test_the_reward_on_the_page_is_the_file_and_judges() -> None:
    (code,) = blocks(REWARDS, "python")
    assert code == (REPOSITORY / "examples" / "rewards" / "brief_answer.py").read_text()
    values = yaml.safe_load(blocks(REWARDS, "yaml")[0])["reward"]
    reward = Judges(run_config(reward=values).reward).of("any")
    calls = (ToolOutcome("python"), ToolOutcome("python"))
    assert reward.score(task("42"), attempt("42", *calls)) == Score(1.05, {"right": 1.0, "brief": 0.5})
    assert reward.score(task("42"), attempt(None)) == Score(0.0, {"right": 0.0, "brief": 0.0})


def test_every_reward_in_the_table_is_there_and_the_other_way_round() -> None:
    table = REWARDS.read_text().partition("## What is there")[2]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == RewardRegistry().names()


@pytest.mark.parametrize("text", [*blocks(REWARDS, "yaml"), *blocks(DATA, "yaml")])
def test_every_config_on_the_pages_is_one(text: str, model_path: Path) -> None:
    values: dict[str, Any] = {**run_values(model_path), **yaml.safe_load(text)}
    missing = [problem for problem in check(convert(values, RunConfig)) if "there is no file" not in problem.message]
    assert missing == []


def test_the_example_data_is_read() -> None:
    config = run_config(data=yaml.safe_load(blocks(DATA, "yaml")[0])["data"])
    (train,), (held_out,) = (load_sources(config.data, which, ["python"]) for which in ("train", "eval"))
    assert [list(train.task(index).tools) for index in range(train.size)] == [["sql"], ["python"]]
    assert held_out.task(0).tools["search"]["documents"][0]["title"] == "Vopa"


def test_the_generator_on_the_page_makes_tasks() -> None:
    scope: dict[str, Any] = {}
    exec(compile(blocks(DATA, "python")[0], str(DATA), "exec"), scope)
    made = scope["doubling"](10)(13)
    assert (made.messages[0].content, made.ground_truth) == ("Compute 3+3.", "6")
