"""Tasks from verl's files unchanged, from JSON lines, from generators; and the order in which a run draws them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from trainer_service.data.dataset import Source, TrainingStream, evaluation_tasks, load_sources
from trainer_service.data.files import load_tasks
from trainer_service.data.task import Message
from trainer_service.tasks_config import DataConfig, SourceConfig
from turnwire.config import convert
from turnwire.errors import ConfigError

ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 6 times 7?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 0},
}


def source(**values: Any) -> SourceConfig:
    return convert(values, SourceConfig)


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def problems(config: SourceConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_tasks(config, "data.train.0")
    return [str(problem) for problem in caught.value.problems]


def test_a_verl_parquet_is_read_unchanged(tmp_path: Path) -> None:
    tool_row = {
        **ROW,
        "data_source": "searchR1_nq",
        "reward_model": {"style": "rule", "ground_truth": "Paris"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": {"documents": ["Paris is the capital."]}}},
        },
    }
    path = parquet(tmp_path / "train.parquet", [ROW, tool_row])
    first, second = load_tasks(source(kind="parquet", path=str(path)), "data.train.0")
    assert first.messages == (Message("user", "What is 6 times 7?"),)
    assert (first.data_source, first.ground_truth, first.task_id) == ("openai/gsm8k", "42", "train-0")
    assert first.tools == {}
    assert second.tools == {"search": {"documents": ["Paris is the capital."]}}
    assert second.extra["split"] == "train"


def test_a_search_datasets_ground_truth_keeps_its_list_of_targets(tmp_path: Path) -> None:
    row = {**ROW, "reward_model": {"ground_truth": {"target": ["Paris", "paris"]}}}
    (task,) = load_tasks(source(kind="parquet", path=str(parquet(tmp_path / "a.parquet", [row]))), "x")
    assert task.ground_truth == {"target": ["Paris", "paris"]}


def test_tools_of_the_rows_can_be_renamed_dropped_and_taken_without_their_context(tmp_path: Path) -> None:
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}, "code": {"create_kwargs": {"x": 1}}}
    path = str(jsonl(tmp_path / "a.jsonl", [{**ROW, "extra_info": {"tools_kwargs": kwargs}}]))
    names = {"calc_gsm8k_reward": "", "code": "python"}
    (task,) = load_tasks(source(kind="jsonl", path=path, tool_names=names), "x")
    assert task.tools == {"python": {"x": 1}}
    (task,) = load_tasks(source(kind="jsonl", path=path, tool_names=names, tools_kwargs="names"), "x")
    assert task.tools == {"python": {}}
    (task,) = load_tasks(source(kind="jsonl", path=path, tools_kwargs="ignore"), "x")
    assert task.tools == {}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{not json", "row 1, column (all): is not JSON"),
        ("[1]", "row 1, column (all): is list, not an object"),
        ({**ROW, "prompt": "text"}, 'row 1, column prompt: is text; write chat messages: [{"role": "user"'),
        ({**ROW, "prompt": []}, "row 1, column prompt: is missing"),
        ({**ROW, "prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "only text is supported"),
        ({**ROW, "prompt": [{"role": "human", "content": "x"}]}, "role 'human' is not one of system, user"),
        ({**ROW, "reward_model": None}, "column reward_model.ground_truth: is missing"),
        ({**ROW, "data_source": None}, "column data_source: is missing; set `data_source` of the source"),
        ({**ROW, "extra_info": {"tools_kwargs": ["python"]}}, "column extra_info.tools_kwargs: is list"),
        ({**ROW, "extra_info": {"tools_kwargs": {"python": 3}}}, "column extra_info.tools_kwargs.python: is int"),
    ],
)
def test_a_malformed_row_is_named_with_its_number_its_column_and_the_fix(
    row: Any, expected: str, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [ROW, row])
    (problem,) = problems(source(kind="jsonl", path=str(path)))
    assert f"{path} " in problem
    assert expected in problem


def test_all_malformed_rows_are_reported_at_once_up_to_a_limit(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{**ROW, "prompt": None}] * 50)
    found = problems(source(kind="jsonl", path=str(path)))
    assert len(found) == 21
    assert "perhaps more" in found[-1]


def test_a_file_that_is_not_there_or_not_parquet_says_so(tmp_path: Path) -> None:
    (problem,) = problems(source(kind="parquet", path=str(tmp_path / "none.parquet")))
    assert "there is no file" in problem
    (tmp_path / "bad.parquet").write_text("not a parquet file, but long enough to look at")
    (problem,) = problems(source(kind="parquet", path=str(tmp_path / "bad.parquet")))
    assert "is not a parquet file" in problem


def test_start_and_size_cut_a_file_into_training_and_held_out_rows(tmp_path: Path) -> None:
    path = str(jsonl(tmp_path / "a.jsonl", [ROW] * 10))
    train = load_tasks(source(kind="jsonl", path=path, size=7), "x")
    held_out = load_tasks(source(kind="jsonl", path=path, start=7), "x")
    assert [task.task_id for task in train] == [f"a-{n}" for n in range(7)]
    assert [task.task_id for task in held_out] == ["a-7", "a-8", "a-9"]
    assert "has no row from 10 on" in problems(source(kind="jsonl", path=path, start=10))[0]


def test_tasks_without_tools_get_the_runs_and_the_system_prompt(tmp_path: Path) -> None:
    path = str(jsonl(tmp_path / "a.jsonl", [ROW]))
    config = convert({"train": [{"kind": "jsonl", "path": path}], "system_prompt": "Use tools."}, DataConfig)
    task = load_sources(config, "train", ["python"])[0].task(0)
    assert task.tools == {"python": {}}
    assert task.messages[0] == Message("system", "Use tools.")


def test_reasoning_gym_makes_tasks_that_its_own_reward_judges() -> None:
    config = source(kind="procedural", generator="reasoning_gym", arguments={"dataset": "chain_sum", "seed": 3}, size=5)
    made = Source(config, "x", (), None)
    assert made.task(2) == made.task(2)
    assert made.task(2).data_source == "reasoning_gym/chain_sum"
    assert made.task(2).messages[0].content


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"generator": "dmo"}, "unknown generator 'dmo'; did you mean 'demo'?"),
        ({"generator": "demo", "arguments": {"domian": "sql", "split": "train"}}, "did you mean 'domain'?"),
        ({"generator": "demo", "arguments": {"domain": "sqll", "split": "train"}}, "did you mean 'sql'?"),
        ({"generator": "reasoning_gym", "arguments": {"dataset": "chain_sun"}}, "did you mean 'chain_sum'?"),
    ],
)
def test_an_unknown_generator_argument_or_dataset_is_named_with_the_nearest_match(
    values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Source(source(kind="procedural", size=1, **values), "data.train.0", (), None)
    assert expected in str(caught.value)


def demo(domain: str, size: int) -> Source:
    arguments = {"domain": domain, "split": "train"}
    return Source(source(kind="procedural", generator="demo", arguments=arguments, size=size), "x", (), None)


def test_draws_depend_on_the_seed_alone_and_cover_each_epoch_once() -> None:
    sources = [demo("python", 7), demo("sql", 5)]
    stream, again = TrainingStream(sources, seed=3), TrainingStream(sources, seed=3)
    ids = [stream.draw(number).task_id for number in range(24)]
    assert len(set(ids[:12])) == 12
    assert set(ids[:12]) == set(ids[12:])
    assert ids[:12] != ids[12:]
    assert [again.draw(number).task_id for number in reversed(range(24))] == ids[::-1]
    assert [TrainingStream(sources, seed=4).draw(number).task_id for number in range(12)] != ids[:12]


def test_evaluation_takes_the_first_tasks_of_each_source() -> None:
    tasks = evaluation_tasks([demo("python", 7), demo("sql", 5)], 2)
    assert [task.data_source for task in tasks] == ["demo/python"] * 2 + ["demo/sql"] * 2
    assert len(evaluation_tasks([demo("python", 7)], None)) == 7


def test_numpy_values_of_a_parquet_do_not_reach_a_task(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([ROW]).append_column("score", pyarrow.array(np.array([1.5])))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (task,) = load_tasks(source(kind="parquet", path=str(tmp_path / "a.parquet")), "x")
    assert json.loads(json.dumps(task.extra)) == task.extra
