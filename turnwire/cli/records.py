"""The trajectories of a run: find and choose. trainer_service/trajectories.py writes them, and has the format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from turnwire.config import nearest
from turnwire.errors import InvalidRequestError, NotFoundError


class Result(TypedDict):
    """A tool call of a turn."""

    tool: str
    error: str
    truncated: bool
    seconds: float


class Turn(TypedDict):
    """An action and what came back; positions are token positions in the segment."""

    index: int
    action_start: int
    action_end: int
    observation_end: int
    generate_stop: str
    observation_full_tokens: int
    generate_seconds: float
    tool_seconds: float
    results: list[Result]
    action: str
    observation: str


class Segment(TypedDict):
    """Tokens, and what training knows of each."""

    token_ids: list[int]
    tokens: list[str]
    prompt_length: int
    loss_mask: list[int]
    logprobs: list[float]
    weight_versions: list[tuple[int, int, int]]
    turns: list[Turn]


class Record(TypedDict):
    """One line."""

    kind: str
    step: int
    trajectory_id: str
    task_id: str
    data_source: str
    tries: int
    messages: list[dict[str, Any]]
    ground_truth: Any
    tools: list[str]
    final_answer: str | None
    stop_reason: str
    reward: float
    reward_parts: dict[str, float]
    advantage: float | None
    filtered: str
    seconds: float
    segments: list[Segment]


@dataclass(frozen=True)
class Choice:
    """What is looked for. `step` None: the latest that is there. `failed`: only rewards below 1."""

    evaluation: bool = False
    step: int | None = None
    source: str | None = None
    failed: bool = False


def find_run(name: str, runs_folder: Path) -> Path:
    """A run's folder, by path or by id. Raises NotFoundError."""
    for folder in (Path(name), runs_folder / name):
        if (folder / "trajectories").is_dir():
            return folder
    runs = [path.parent.name for path in runs_folder.glob("*/trajectories")]
    hint = nearest(name, runs).replace("Allowed:", f"Runs in {runs_folder}:")
    raise NotFoundError(f"there is no run with trajectories in {name} or {runs_folder / name}; {hint}")


def select(run: Path, choice: Choice) -> list[Record]:
    """The records that fit, in the order in which they were written, all of one step. Raises NotFoundError."""
    path = run / "trajectories" / ("eval.jsonl" if choice.evaluation else "train.jsonl")
    if not path.is_file():
        other = "leave --eval out" if choice.evaluation else "try --eval"
        raise NotFoundError(f"the run has no {path.name} (yet); {other}")
    found: list[Record] = []
    steps, sources = set(), set()
    for record in _read(path):
        steps.add(record["step"])
        sources.add(record["data_source"])
        if choice.step is not None and record["step"] != choice.step:
            continue
        if choice.source is not None and record["data_source"] != choice.source:
            continue
        if choice.failed and record["reward"] >= 1:
            continue
        if choice.step is None and found and record["step"] > found[0]["step"]:
            found.clear()
        found.append(record)
    if not found:
        raise NotFoundError(f"no trajectory in {path} fits; {_available(steps, sources)}")
    return found


def _available(steps: set[int], sources: set[str]) -> str:
    if not steps:
        return "it is empty"
    span = str(min(steps)) if len(steps) == 1 else f"{min(steps)} to {max(steps)}"
    return f"there is step {span}, and the sources {', '.join(sorted(sources))}"


def _read(path: Path) -> Iterator[Record]:
    decoder = msgspec.json.Decoder(Record)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if line.endswith(b"\n"):
                    raise InvalidRequestError(f"{path}, line {number}, is not a trajectory: {error}") from error
                return  # the last line is being written


def most_telling(records: list[Record]) -> int:
    """Which to show when nobody says: the first of those with the most tool calls."""
    calls = [
        sum(len(turn["results"]) for segment in record["segments"] for turn in segment["turns"]) for record in records
    ]
    return calls.index(max(calls))
