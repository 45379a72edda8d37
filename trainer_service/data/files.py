"""Tasks from files in verl's format, unchanged: parquet, or one JSON object a line with the same columns.

Columns: `prompt` (chat messages), `data_source`, `reward_model.ground_truth`, and `extra_info`, of which
`tools_kwargs` names tools and their contexts. Every row is read once at the start, so that a malformed one is found
then, with its row number, its column, and what to do about it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_service.data.task import Message, Task
from trainer_service.tasks_config import SourceConfig
from turnwire.errors import ConfigError, Problem

_SHOWN_PROBLEMS = 20
_ROLES = ("system", "user", "assistant", "tool")


class RowError(ValueError):
    """A row that is not a task: the column, and what to do."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.column = column


def load_tasks(config: SourceConfig, key: str, limit: int | None = None) -> list[Task]:
    """The tasks of a file, or the first `limit` of them. Raises ConfigError with what is wrong and in which rows."""
    path = Path(config.path)
    tasks: list[Task] = []
    problems: list[Problem] = []
    size = min(filter(None, (config.size, limit)), default=None)
    for number, row in _rows(path, config, key):
        if number < config.start:
            continue
        if size is not None and len(tasks) + len(problems) >= size:
            break
        try:
            if isinstance(row, RowError):
                raise row
            tasks.append(task_of_row(row, number, config))
        except RowError as error:
            problems.append(Problem(f"{key}.path", f"{path} row {number}, column {error.column}: {error}"))
            if len(problems) == _SHOWN_PROBLEMS:
                problems.append(Problem(f"{key}.path", "and perhaps more: reading stopped here"))
                break
    if problems:
        raise ConfigError(problems, "data")
    if not tasks:
        raise ConfigError([Problem(f"{key}.path", f"{path} has no row from {config.start} on")], "data")
    return tasks


def _rows(path: Path, config: SourceConfig, key: str) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """Numbered rows, from 0. A line that is not JSON is yielded as what is wrong with it."""
    if not path.is_file():
        raise ConfigError([Problem(f"{key}.path", f"there is no file {path.resolve()}")], "data")
    yield from (_jsonl_rows(path) if config.kind == "jsonl" else _parquet_rows(path, key))


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    with path.open("rb") as file:
        for number, line in enumerate(line for line in file if line.strip()):
            try:
                row = json.loads(line)
            except ValueError as error:  # also: not UTF-8
                yield number, RowError("(all)", f"is not JSON: {error}; write one object a line")
                continue
            if not isinstance(row, dict):
                yield number, RowError("(all)", f"is {type(row).__name__}, not an object")
                continue
            yield number, row


def _parquet_rows(path: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow  # noqa: PLC0415 - heavy, and only for parquet
    import pyarrow.parquet  # noqa: PLC0415

    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield number, row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError([Problem(f"{key}.path", f"{path} is not a parquet file: {error}")], "data") from error


def task_of_row(row: dict[str, Any], number: int, config: SourceConfig) -> Task:
    """One row as a task. Raises RowError."""
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise RowError("reward_model.ground_truth", "is missing; it holds the answer that the reward compares with")
    data_source = config.data_source or row.get("data_source")
    if not isinstance(data_source, str) or not data_source:
        raise RowError(
            "data_source", "is missing; set `data_source` of the source in the config to name one for all rows"
        )
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise RowError("extra_info", f"is {type(extra).__name__}, not an object")
    return Task(
        task_id=f"{Path(config.path).stem}-{number}",
        messages=_messages(row.get("prompt")),
        data_source=data_source,
        ground_truth=_json(reward_model["ground_truth"], "reward_model.ground_truth"),
        tools=_tools(extra.get("tools_kwargs"), config),
        extra=_json({k: v for k, v in extra.items() if k != "tools_kwargs"}, "extra_info"),
    )


def _messages(prompt: Any) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        raise RowError("prompt", 'is text; write chat messages: [{"role": "user", "content": …}]')
    if not isinstance(prompt, list) or not prompt:
        raise RowError("prompt", 'is missing; it holds chat messages: [{"role": "user", "content": …}]')
    messages = []
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise RowError("prompt", "each message needs `role` and a text `content`; only text is supported")
        if message.get("role") not in _ROLES:
            raise RowError("prompt", f"role {message.get('role')!r} is not one of {', '.join(_ROLES)}")
        messages.append(Message(message["role"], message["content"]))
    return tuple(messages)


def _tools(kwargs: Any, config: SourceConfig) -> dict[str, dict[str, Any]]:
    if kwargs is None or config.tools_kwargs == "ignore":
        return {}
    if not isinstance(kwargs, dict):
        raise RowError("extra_info.tools_kwargs", f"is {type(kwargs).__name__}, not an object of tool names")
    tools: dict[str, dict[str, Any]] = {}
    for name, value in kwargs.items():
        here = config.tool_names.get(name, name)
        if value is None or not here:  # parquet gives every row the columns of all rows, as null
            continue
        if not isinstance(value, dict):
            raise RowError(f"extra_info.tools_kwargs.{name}", f"is {type(value).__name__}, not an object")
        context = (value.get("create_kwargs") or {}) if config.tools_kwargs == "contexts" else {}
        tools[here] = _json({k: v for k, v in context.items() if v is not None}, f"extra_info.tools_kwargs.{name}")
    return tools


def _json(value: Any, column: str) -> Any:
    """Only what every wire and file can hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_json(item, column) for item in value]
    if isinstance(value, dict):
        return {str(name): _json(item, column) for name, item in value.items()}
    raise RowError(column, f"holds a {type(value).__name__}, which is not JSON; write it as text or a number")
