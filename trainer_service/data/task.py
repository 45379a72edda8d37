"""The one type every data source turns into: what a trajectory is given, and what its answer is judged by.

Loaders (parquet, JSONL, procedural) produce it, the training loop sends `messages` and `tools` to the
rollout service, and rewards read `data_source`, `ground_truth` and `extra`. Frozen, because the same task
is sampled many times (a group) and again after a resume: nobody may change what another trajectory is
judged by.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True):
    """One chat message of the prompt, as a chat template takes it."""

    role: str
    """`system`, `user` or `assistant`."""
    content: str


class Task(msgspec.Struct, frozen=True):
    """A prompt with a verifiable answer.

    `ground_truth`, the tool contexts and `extra` hold JSON values only: a task survives every wire and file.
    """

    task_id: str
    """Unique within its data source, and the same in every process and after a resume."""
    messages: tuple[Message, ...]
    data_source: str
    """Names where the task came from (for example `demo/sql`); rewards and metrics are grouped by it."""
    ground_truth: Any
    tools: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Tool name to that tool's per-trajectory context (for example `{"sql": {"init_sql": "..."}}`)."""
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """Whatever else the source knows; never shown to the policy."""
