"""The config loader: everything that is wrong is said at once, with key, allowed values and nearest match."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from turnwire.config import apply_overrides, convert, dump, load, parse_yaml
from turnwire.errors import ConfigError


class Source(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["parquet", "jsonl"]
    size: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    learning_rate: Annotated[float, msgspec.Meta(gt=0)] = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sources: Annotated[list[Source], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: [Source(kind="jsonl")]
    )
    by_name: dict[str, Source] = {}
    optimizer: Optimizer = Optimizer()
    schedule: Literal["constant", "cosine"] | None = None
    options: dict[str, Any] = {}
    low: int = 0
    high: int = 1

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")


def problems(value: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        convert(value, Config)
    return {problem.key: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize("text", ["1e5", "0o7", "010", "1_000", "1:30", "2026-01-31", "no", "true", ".5", "null", "~"])
def test_a_dumped_string_is_read_back_as_that_string(text: str) -> None:
    assert convert(parse_yaml(dump(Config(name=text))), Config).name == text


def test_every_problem_is_reported_under_its_dotted_key() -> None:
    found = problems(
        {
            "sources": [{"kind": "parket"}, {"kind": "jsonl", "size": 0}, {"kind": "jsonl", "seize": 1}],
            "optimizer": {"learning_rate": -1.0, "lerning_rate": 1},
            "by_name": {"a": {"size": "many", "kind": "jsonl"}},
        }
    )
    assert set(found) == {
        "name",
        "sources.0.kind",
        "sources.1.size",
        "sources.2.seize",
        "optimizer.learning_rate",
        "optimizer.lerning_rate",
        "by_name.a.size",
    }
    assert found["name"] == "missing"
    assert "did you mean 'parquet'? Allowed: jsonl, parquet" in found["sources.0.kind"]
    assert "did you mean 'size'?" in found["sources.2.seize"]
    assert "got -1.0" in found["optimizer.learning_rate"]
    assert "did you mean 'learning_rate'?" in found["optimizer.lerning_rate"]


def test_a_check_across_fields_names_the_section() -> None:
    assert problems({"name": "x", "low": 3}) == {"": "low (3) is above high (1)"}


def test_a_literal_or_nothing_says_what_is_allowed() -> None:
    assert "'cosine'" in problems({"name": "x", "schedule": "cosin"})["schedule"]
    assert convert({"name": "x", "schedule": None}, Config).schedule is None


def test_integers_are_not_taken_for_text_nor_text_for_numbers() -> None:
    assert set(problems({"name": 3, "low": "1"})) == {"name", "low"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3.0e-4", 3e-4),
        ("no", "no"),
        ("true", True),
        ("0x10", 16),
        ("0o10", 8),
        ("010", 10),
        ("-7", -7),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-31", "2026-01-31"),
        ("1.", 1.0),
    ],
)
def test_yaml_numbers_are_numbers_and_no_is_a_word(text: str, value: Any) -> None:
    assert parse_yaml(text) == value


def test_a_key_twice_and_bad_yaml_say_where() -> None:
    with pytest.raises(ConfigError, match=r"'a' is there twice(.|\n)*line 2"):
        parse_yaml("a: 1\na: 2")
    with pytest.raises(ConfigError, match=r"my.yaml(.|\n)*line 1"):
        parse_yaml("a: [1", "my.yaml")


def test_overrides_set_nested_values_on_a_copy() -> None:
    before = {"a": {"b": 1}, "items": [{"size": 1}, {"size": 2}]}
    after = apply_overrides(before, ["a.c.d=1e-3", "items.1.size=5", "e=[1, 2]"])
    assert after == {"a": {"b": 1, "c": {"d": 1e-3}}, "items": [{"size": 1}, {"size": 5}], "e": [1, 2]}
    assert before == {"a": {"b": 1}, "items": [{"size": 1}, {"size": 2}]}


def test_overrides_that_fit_nowhere_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"a": 1, "items": []}, ["a.b=1", "items.3=1", "items.x=1", "nonsense", "=1"])
    assert [problem.key for problem in caught.value.problems] == ["a.b", "items.3", "items.x", "nonsense", "=1"]


def test_files_are_read_with_overrides_and_dumped_so_that_they_read_back(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("name: ünï\nsources:\n- {kind: parquet, size: 3}\noptions: {deep: {x: [1, null]}}\n")
    config = load(file, Config, ["optimizer.learning_rate=2e-4"])
    assert (config.name, config.optimizer.learning_rate, config.sources[0].size) == ("ünï", 2e-4, 3)
    file.write_text(dump(config))
    assert load(file, Config) == config


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    with pytest.raises(ConfigError, match=r"x.yaml: 1 problem\n  cannot be read: No such file"):
        load(file, Config)
    file.write_text("- a list")
    with pytest.raises(ConfigError, match="key: value"):
        load(file, Config)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(file, Config)
