"""A rollout task as the agent loop has it: checked, with every limit resolved.

What a client may send is bounded here, so that no task can hold up those of others: ids, answer tags and stop strings
(looked for at every token), the text of the messages (tokenized on the event loop), metadata (sent back).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf import struct_pb2
from google.protobuf.duration_pb2 import Duration

from rollout_service.chat import Message, texts_of
from rollout_service.config import RolloutDefaults
from rollout_service.engines.base import EngineInfo, Sampling
from rollout_service.engines.validation import check_adapter
from rollout_service.media import check_images
from turnwire.errors import InvalidRequestError
from turnwire.v1 import common_pb2, rollout_pb2

ROLES = ("system", "user", "assistant", "tool")

MAX_ID_BYTES = 1000
MAX_STOPS, MAX_STOP_BYTES = 64, 1024
MAX_METADATA_BYTES = 1024 * 1024
MAX_CHARACTERS_A_TOKEN = 64
"""Texts of which a token would have to stand for more than this are refused without being tokenized."""

_LONGEST_DURATION_SECONDS = 315_576_000_000
"""google.protobuf.Duration's own limit."""


class TaskRefusedError(Exception):
    """This task cannot be done, and trying again cannot help: an unknown tool, a context or limit that the tool service
    refuses, messages that do not fit. It ends as INVALID_TASK, and leaves the others on its stream alone."""


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
    """One trajectory to be generated. `answer_tags` None: a turn without a tool call is the final answer. `images`: of
    the messages, in order."""

    trajectory_id: str
    messages: tuple[Message, ...]
    tools: tuple[common_pb2.ToolBinding, ...]
    sampling: Sampling
    limits: Limits
    answer_tags: tuple[str, str] | None
    metadata: struct_pb2.Struct | None
    adapter: str = ""
    images: tuple[common_pb2.MediaPart, ...] = ()


def parse_task(
    message: rollout_pb2.RolloutTask, defaults: RolloutDefaults, engine: EngineInfo, has_tools: bool
) -> Task:
    """The wire's task. Raises InvalidRequestError for what cannot be; TaskRefusedError for messages that cannot fit, an
    adapter that is not there, and images that the model cannot read."""
    longest = engine.max_model_tokens
    task = _parse(message, defaults, longest, has_tools)
    try:
        check_adapter(task.adapter, engine.adapters)
        check_images(task.images, engine.modalities)
    except InvalidRequestError as error:
        raise TaskRefusedError(error.message) from error
    characters = sum(len(text) for item in task.messages for text in texts_of(item))
    if characters > longest * MAX_CHARACTERS_A_TOKEN or len(task.messages) > longest:
        raise TaskRefusedError(
            f"{len(task.messages)} messages of {characters} characters cannot fit into {longest} tokens"
        )
    return task


def _parse(message: rollout_pb2.RolloutTask, defaults: RolloutDefaults, longest: int, has_tools: bool) -> Task:
    if not message.trajectory_id:
        raise InvalidRequestError("trajectory_id is empty")
    if (size := len(message.trajectory_id.encode())) > MAX_ID_BYTES:
        raise InvalidRequestError(f"trajectory_id has {size} bytes; it may have {MAX_ID_BYTES}")
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
    if answer is not None:
        check_stops("final_answer", [answer.open, answer.close])
    if (size := message.metadata.ByteSize()) > MAX_METADATA_BYTES:
        raise InvalidRequestError(f"metadata has {size} bytes; it may have {MAX_METADATA_BYTES}")
    return Task(
        message.trajectory_id,
        tuple(_message(item) for item in message.messages),
        tuple(message.tools),
        parse_sampling(message.sampling),
        resolve_limits(message.limits, defaults, longest),
        None if answer is None else (answer.open, answer.close),
        message.metadata if message.HasField("metadata") else None,
        message.adapter,
        tuple(part.image for item in message.messages for part in item.content if part.HasField("image")),
    )


def _message(message: rollout_pb2.ChatMessage) -> Message:
    if message.role not in ROLES:
        raise InvalidRequestError(f"unknown role {message.role!r}; use one of {', '.join(ROLES)}")
    for part in message.content:
        if (kind := part.WhichOneof("part")) not in ("text", "image"):
            raise InvalidRequestError(f"content holds {kind or 'an unknown part'}; it may be text and images")
    parts: list[dict[str, str]] = []
    for part in message.content:
        if part.HasField("image"):
            parts.append({"type": "image"})
        elif parts and parts[-1]["type"] == "text":  # one text, so that no two make what neither is: a control token
            parts[-1]["text"] += part.text
        else:
            parts.append({"type": "text", "text": part.text})
    if any(part["type"] == "image" for part in parts):
        return {"role": message.role, "content": parts}
    return {"role": message.role, "content": parts[0]["text"] if parts else ""}


def check_stops(name: str, stops: Sequence[str]) -> None:
    """Raise InvalidRequestError for more, or longer, texts than can be looked for at every token."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"there are {len(stops)} {name}; there may be {MAX_STOPS}")
    if any(len(stop.encode()) > MAX_STOP_BYTES for stop in stops):
        raise InvalidRequestError(f"{name} may have {MAX_STOP_BYTES} bytes at most")


def shown_text(parts: Sequence[common_pb2.ContentPart]) -> str:
    """An observation's content as a text model is shown it: of an image or video that it cannot see, what it is."""
    shown = ""
    for part in parts:
        if part.WhichOneof("part") == "text":
            shown += part.text
        else:
            media = part.image if part.HasField("image") else part.video
            shown += f"{' ' if shown else ''}({media.media_type}, {len(media.data)} bytes)"
    return shown


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
        _seconds(message, "tool_timeout") or defaults.tool_timeout_seconds,
        _seconds(message, "trajectory_timeout") or defaults.trajectory_timeout_seconds,
    )


def _seconds(limits: rollout_pb2.RolloutLimits, name: str) -> float | None:
    """A limit's seconds; None where it is not set."""
    if not limits.HasField(name):  # type: ignore[arg-type]
        return None
    duration: Duration = getattr(limits, name)
    value: float = duration.seconds + duration.nanos / 1e9
    if not 0 < value <= _LONGEST_DURATION_SECONDS:
        raise InvalidRequestError(f"{name} is {value:g} s; it must be positive, and a valid Duration")
    return value
