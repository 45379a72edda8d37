"""Rewards: a table of answers for each, and how they are found."""

from __future__ import annotations

import asyncio
import signal
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from trainer_harness import attempt, task

from trainer_service import judging
from trainer_service.data import generators
from trainer_service.judging import Judge, RewardError
from trainer_service.rewards import math as math_reward
from trainer_service.rewards import registry
from trainer_service.rewards.base import Score, ToolOutcome
from trainer_service.rewards.math import Math
from trainer_service.rewards.numeric import parse_number
from trainer_service.rewards.registry import Judges, RewardRegistry
from trainer_service.tasks_config import RewardConfig
from turnwire.config import convert
from turnwire.errors import ConfigError

REGISTRY = RewardRegistry()


def score(name: str, ground_truth: Any, answer: str | None, **options: Any) -> float:
    reward = REGISTRY.create(name, options)
    try:
        result = reward.score(task(ground_truth), attempt(answer))
        return result.value if isinstance(result, Score) else result
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("name", "ground_truth", "answer", "expected"),
    [
        ("exact_match", "391", "391", 1),
        ("exact_match", "391", " 391\n", 1),
        ("exact_match", "391", "392", 0),
        ("exact_match", "391", None, 0),
        ("exact_match", "Bado", "bado", 0),
        ("exact_match", 391, "391", 1),
        ("exact_match", 391.0, "391", 1),
        ("exact_match", ["a", "b"], "b", 1),
        ("numeric", "1234.5", "1,234.50", 1),
        ("numeric", "1234.5", "$1,234.50", 1),
        ("numeric", 0.5, "1/2", 1),
        ("numeric", "1/3", "0.33333333", 1),
        ("numeric", "0.5", "50%", 1),
        ("numeric", "-3", "\N{MINUS SIGN}3", 1),
        ("numeric", "1e6", "1000000", 1),
        ("numeric", "3", "4", 0),
        ("numeric", "3", "three", 0),
        ("numeric", "3", "1/0", 0),
        ("numeric", "3", "", 0),
        ("numeric", "3", None, 0),
        ("numeric", "3", "9" * 5000, 0),
        ("numeric", "1e999", "1e998", 0),
        ("numeric", "3", "NaN", 0),
        ("qa_exact_match", "The Eiffel Tower", "eiffel tower.", 1),
        ("qa_exact_match", {"target": ["Paris", "Lutetia"]}, "paris", 1),
        ("qa_exact_match", "Paris", "London", 0),
        ("qa_exact_match", "Paris", None, 0),
        ("qa_f1", "the big red house", "red house", 0.8),
        ("qa_f1", ["x", "red house"], "red house", 1),
        ("qa_f1", "Paris", "London", 0),
        ("qa_f1", "Paris", None, 0),
    ],
)
def test_an_answer_gets_its_reward(name: str, ground_truth: Any, answer: str | None, expected: float) -> None:
    assert score(name, ground_truth, answer) == pytest.approx(expected)


def test_options_change_what_counts() -> None:
    assert score("exact_match", "Bado", "bado", ignore_case=True) == 1
    assert score("numeric", "10", "10.4", relative=0.05) == 1
    assert score("numeric", "10", "10.4", absolute=0.3) == 0
    assert score("numeric", "1234.5", "so it is $1,234.50.", read="last") == 1
    assert score("numeric", "7", "first 3, then 7", read="last") == 1


def test_numbers_are_read_exactly() -> None:
    assert parse_number("0.1") == parse_number("1/10")
    assert parse_number("1,23") is None
    assert parse_number("1.2.3") is None


@pytest.mark.parametrize(
    ("ground_truth", "answer", "expected"),
    [
        (r"\frac{1}{2}", "0.5", 1),
        (r"\frac{1}{2}", r"\frac{2}{4}", 1),
        ("x^2 + 2x + 1", "$(x+1)^2$", 1),
        ("3", "4", 0),
        ("3", None, 0),
        ("3", "no idea", 0),
    ],
)
def test_mathematics_is_compared_as_mathematics(ground_truth: str, answer: str | None, expected: float) -> None:
    assert score("math", ground_truth, answer) == expected


def test_an_expression_that_never_ends_is_killed_and_wrong_and_the_next_one_works() -> None:
    reward = REGISTRY.create("math", {"seconds": 1})
    assert reward.score(task("3"), attempt("9**9**9**9")) == 0  # comes back at all
    assert reward.score(task("3"), attempt("3")) == 1
    reward.close()


def test_a_process_that_says_nothing_and_uses_no_time_is_a_failure_and_not_a_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine that is crowded, or stands still."""
    reward = REGISTRY.create("math", {"seconds": 0.5})
    assert isinstance(reward, Math)
    reward._start().send_signal(signal.SIGSTOP)
    monkeypatch.setattr(math_reward, "_SILENT_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match="said nothing"):
        reward.score(task("3"), attempt("3"))
    monkeypatch.undo()
    assert reward.score(task("3"), attempt("3")) == 1
    reward.close()


def sql(rows: list[Any], *, error: str = "", truncated: bool = False) -> ToolOutcome:
    return ToolOutcome("sql", error, {"columns": ["a", "b"], "rows": rows, "truncated": truncated})


@pytest.mark.parametrize(
    ("ground_truth", "outcomes", "expected"),
    [
        ([[1, "x"], [2, "y"]], [sql([[1, "x"], [2, "y"]])], 1),
        ([[1, "x"], [2, "y"]], [sql([[2, "y"], [1, "x"]])], 1),
        ({"rows": [[1], [2]], "ordered": True}, [sql([[2], [1]])], 0),
        ({"rows": [[1], [2]], "ordered": True}, [sql([[1], [2]])], 1),
        ("[[1.0]]", [sql([[1]])], 1),
        (7, [sql([[7]])], 1),
        ([[0.1]], [sql([[0.1 + 1e-9]])], 1),
        ([[None]], [sql([[None]])], 1),
        ([[1]], [sql([["1"]])], 0),
        ([[1], [1]], [sql([[1]])], 0),
        ([[1, 2]], [sql([[1]])], 0),
        ([[1]], [sql([[9]]), sql([[1]])], 1),
        ([[1]], [sql([[1]]), sql([[9]])], 0),
        ([[1]], [sql([[1]]), sql([], error="TOOL_ERROR")], 1),
        ([[1]], [sql([[1]], truncated=True)], 0),
        ([[1]], [], 0),
        ([], [sql([])], 1),
    ],
)
def test_the_last_result_is_compared_with_the_right_rows(
    ground_truth: Any, outcomes: list[ToolOutcome], expected: float
) -> None:
    assert REGISTRY.create("sql_result", {}).score(task(ground_truth), attempt("x", *outcomes)) == expected


def test_reasoning_gym_judges_its_own_tasks() -> None:
    made = generators.create("reasoning_gym", {"dataset": "chain_sum", "seed": 1}, "x")(0)
    reward = REGISTRY.create("reasoning_gym", {})
    assert reward.score(made, attempt(made.ground_truth)) == 1
    assert reward.score(made, attempt("nonsense")) < 0.5


def judge(**values: Any) -> Judge:
    return Judge(convert({"name": "exact_match", **values}, RewardConfig))


async def test_a_reward_that_raises_is_a_failure_and_not_a_zero() -> None:
    with pytest.raises(RewardError, match=r"reward numeric: ValueError: the ground truth 'x' is not a number"):
        await judge(name="numeric").score(task("x"), attempt("3"))


SLOW = """
import time
from trainer_service.rewards.base import Reward, Score
class Slow(Reward):
    name = "slow"
    def score(self, task, attempt):
        time.sleep(float(task.ground_truth))
        return 1.0
class Odd(Reward):
    name = "odd"
    def score(self, task, attempt):
        return float("nan")
"""


async def test_a_reward_that_hangs_or_is_not_a_number_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    folders = [str(tmp_path)]
    with pytest.raises(RewardError, match=r"reward slow: no answer in 0\.05 s"):
        await judge(name="slow", folders=folders, timeout_seconds=0.05).score(task("1"), attempt("x"))
    with pytest.raises(RewardError, match="not a finite number"):
        await judge(name="odd", folders=folders).score(task(), attempt("x"))


async def test_a_trajectory_that_waits_until_others_are_judged_is_not_late(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    slow = judge(name="slow", folders=[str(tmp_path)], timeout_seconds=1.5)
    count = 10 * judging._THREADS
    scores = await asyncio.gather(*(slow.score(task("0.2"), attempt("x")) for _ in range(count)))
    assert scores == [Score(1.0)] * count


def test_rewards_are_chosen_by_data_source() -> None:
    by_source = {"math/*": {"name": "numeric"}, "nq": {"name": "qa_f1"}}
    judges = Judges(convert({"name": "exact_match", "by_source": by_source}, RewardConfig))
    assert [judges.of(source).name for source in ("math/algebra", "nq", "other")] == ["numeric", "qa_f1", "exact_match"]


def test_everything_wrong_with_the_rewards_of_a_config_is_said_at_once() -> None:
    config = convert(
        {
            "name": "exact_mach",
            "by_source": {"a": {"name": "numeric", "options": {"relativ": 1}}, "b": {"name": "qa"}},
        },
        RewardConfig,
    )
    with pytest.raises(ConfigError) as caught:
        Judges(config)
    text = str(caught.value)
    assert "reward.name: unknown reward 'exact_mach'; did you mean 'exact_match'?" in text
    assert "reward.by_source.a.options.relativ: unknown key; did you mean 'relative'?" in text
    assert "reward.by_source.b.name: unknown reward 'qa'" in text


def test_a_reward_file_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_like_this")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "taken.py").write_text(SLOW.replace('"slow"', '"numeric"'))
    with pytest.raises(ConfigError) as caught:
        RewardRegistry([str(tmp_path), str(tmp_path / "none")])
    text = str(caught.value)
    assert "broken.py cannot be loaded: ModuleNotFoundError" in text
    assert "empty.py defines no Reward" in text
    assert "'numeric' is in" in text
    assert "none is not a folder" in text


def test_rewards_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("mine", "trainer_service.rewards.qa_f1:QaF1", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    found = RewardRegistry()
    assert "mine" in found.names()
    assert found.create("mine", {}).score(task("a b"), attempt("a b")) == 1
