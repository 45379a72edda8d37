"""A rollout task as the agent loop has it: checked, with every limit resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf import struct_pb2
from google.protobuf.duration_pb2 import Duration

from rollout_service.config import RolloutDefaults
from rollout_service.engines.base import Sampling
from turnwire.errors import InvalidRequestError
from turnwire.v1 import common_pb2, rollout_pb2

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Limits:
    """Of one trajectory; see `RolloutDefaults`."""

    max_turns: int
    max_action_tokens: int
    max_observation_tokens: int
    max_trajectory_tokens: int
    tool_timeout: float
    trajectory_timeout: float


@dataclass(frozen=True)
class Task:
    """One trajectory to be generated. `answer_tags` None: a turn without a tool call is the final answer."""

    trajectory_id: str
    messages: tuple[dict[str, str], ...]
    tools: tuple[common_pb2.ToolBinding, ...]
    sampling: Sampling
    limits: Limits
    answer_tags: tuple[str, str] | None
    metadata: struct_pb2.Struct | None


def parse_task(message: rollout_pb2.RolloutTask, defaults: RolloutDefaults, longest: int, has_tools: bool) -> Task:
    """The wire's task. Raises InvalidRequestError, with the trajectory's id, for what cannot be."""
    try:
        return _parse(message, defaults, longest, has_tools)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"task {message.trajectory_id!r}: {error.message}") from error


def _parse(message: rollout_pb2.RolloutTask, defaults: RolloutDefaults, longest: int, has_tools: bool) -> Task:
    if not message.trajectory_id:
        raise InvalidRequestError("trajectory_id is empty")
    if not message.messages:
        raise InvalidRequestError("there are no messages")
    names = [tool.name for tool in message.tools]
    if len(set(names)) != len(names):
        raise InvalidRequestError(f"a tool is bound twice: {', '.join(names)}")
    if names and not has_tools:
        raise InvalidRequestError("it binds tools, and this service has no tool_target")
    answer = message.final_answer if message.HasField("final_answer") else None
    if answer is not None and not (answer.open and answer.close):
        raise InvalidRequestError("final_answer needs both open and close")
    return Task(
        message.trajectory_id,
        tuple(_message(item) for item in message.messages),
        tuple(message.tools),
        parse_sampling(message.sampling),
        resolve_limits(message.limits, defaults, longest),
        None if answer is None else (answer.open, answer.close),
        message.metadata if message.HasField("metadata") else None,
    )


def _message(message: rollout_pb2.ChatMessage) -> dict[str, str]:
    if message.role not in ROLES:
        raise InvalidRequestError(f"unknown role {message.role!r}; use one of {', '.join(ROLES)}")
    return {"role": message.role, "content": text_of_parts(message.content)}


def text_of_parts(parts: Sequence[common_pb2.ContentPart]) -> str:
    """The text of content. Raises InvalidRequestError for media, which a text model cannot read."""
    for part in parts:
        if (kind := part.WhichOneof("part")) != "text":
            raise InvalidRequestError(f"content holds {kind or 'an unknown part'}; this engine's model reads text only")
    return "".join(part.text for part in parts)


def parse_sampling(message: common_pb2.SamplingParams) -> Sampling:
    """The wire's sampling parameters, with their defaults. Raises InvalidRequestError out of range."""
    return Sampling(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else None,
    )


def resolve_limits(message: rollout_pb2.RolloutLimits, defaults: RolloutDefaults, longest: int) -> Limits:
    """A task's limits over the service's, and never beyond the engine's longest sequence."""
    return Limits(
        message.max_turns or defaults.max_turns,
        message.max_action_tokens or defaults.max_action_tokens,
        message.max_observation_tokens or defaults.max_observation_tokens,
        min(message.max_trajectory_tokens or defaults.max_trajectory_tokens or longest, longest),
        _seconds(message.tool_timeout) or defaults.tool_timeout_seconds,
        _seconds(message.trajectory_timeout) or defaults.trajectory_timeout_seconds,
    )


def _seconds(duration: Duration) -> float:
    value = duration.ToTimedelta().total_seconds()
    if value < 0:
        raise InvalidRequestError("a timeout is negative")
    return value
