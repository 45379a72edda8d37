"""Between the wire's messages and the plain values that tools work with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from google.protobuf import duration_pb2, struct_pb2

from tool_service.action import Media, ToolObservation, cut
from turnwire.errors import InvalidRequestError
from turnwire.v1 import common_pb2, tool_pb2

ERROR_KINDS = {
    name: common_pb2.ErrorKind.Value(f"ERROR_KIND_{name}")
    for name in (
        "INVALID_ACTION",
        "TOOL_ERROR",
        "TIMEOUT",
        "MEMORY",
        "OUTPUT_LIMIT",
        "SIGNALED",
        "SESSION_LOST",
        "INFRA",
    )
}
MODALITIES = {name: common_pb2.Modality.Value(f"MODALITY_{name.upper()}") for name in ("text", "image", "video")}

_LARGEST_EXACT = 2**53
_MAX_DEPTH = 24
"""Of nested data: each level is up to three levels of messages, and parsers accept a hundred."""


def plain(struct: struct_pb2.Struct) -> dict[str, Any]:
    """A Struct as plain values. Numbers without a fraction are integers, since a Struct holds only doubles."""
    return {name: _plain_value(value) for name, value in struct.fields.items()}


def _plain_value(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        return value.string_value
    if kind == "number_value":
        number = value.number_value
        return int(number) if abs(number) <= _LARGEST_EXACT and number == int(number) else number
    if kind == "bool_value":
        return value.bool_value
    if kind == "struct_value":
        return plain(value.struct_value)
    if kind == "list_value":
        return [_plain_value(item) for item in value.list_value.values]
    return None


def fill_struct(struct: struct_pb2.Struct, values: Mapping[str, Any], depth: int = 0) -> None:
    """Plain values into a Struct, without loss: what a double cannot hold (large integers, inf, nan) is a string.

    Raises TypeError for what is not a JSON value, or nested too deep.
    """
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(f"keys are strings, not {type(name).__name__}")
        _fill_value(struct.fields[_text(name)], value, depth + 1)


def _fill_value(target: struct_pb2.Value, value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise TypeError(f"nested deeper than {_MAX_DEPTH} levels")
    if value is None:
        target.null_value = struct_pb2.NULL_VALUE
    elif isinstance(value, str):
        target.string_value = _text(value)
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int | float):
        _fill_number(target, value)
    elif isinstance(value, Mapping):
        target.struct_value.SetInParent()
        fill_struct(target.struct_value, value, depth)
    elif isinstance(value, list | tuple):
        target.list_value.SetInParent()
        for item in value:
            _fill_value(target.list_value.values.add(), item, depth + 1)
    else:
        raise TypeError(f"{type(value).__name__} is not a JSON value")


def _fill_number(target: struct_pb2.Value, value: float) -> None:
    if abs(value) <= _LARGEST_EXACT or (isinstance(value, float) and math.isfinite(value)):
        target.number_value = value
    else:  # Python refuses to write integers of many digits in decimals
        target.string_value = hex(value) if isinstance(value, int) and value.bit_length() > 8192 else str(value)


def _text(text: str) -> str:
    """Text that a proto string can hold: lone surrogates are replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def duration(seconds: float) -> duration_pb2.Duration:
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def seconds_of(value: duration_pb2.Duration, what: str) -> float:
    """A client's duration in seconds. Raises InvalidRequestError unless it is positive."""
    seconds: float = value.seconds + value.nanos / 1e9
    if not seconds > 0:
        raise InvalidRequestError(f"{what} must be positive, got {seconds:g} s")
    return seconds


class Room(msgspec.Struct):
    """What the observations of one turn may hold: of text each, of data and media what those before have left."""

    text_bytes: int
    data_bytes: int
    media_bytes: int


def fill_observation(target: tool_pb2.Observation, observation: ToolObservation, room: Room) -> None:
    """Write an observation within limits, and take what it holds from the room."""
    if observation.error is not None:
        target.error = ERROR_KINDS[observation.error]
    if observation.detail:
        target.error_detail = _text(observation.detail)
    if isinstance(observation.content, str):
        # A tool that cut its text wrote a note of its own, for which there is some room.
        limit = room.text_bytes + (_ROOM_FOR_NOTE if observation.truncated else 0)
        text, full = cut(observation.content, limit)
        target.content.add().text = text
        target.truncated = observation.truncated or full > limit
        target.full_bytes = full if observation.full_bytes is None else observation.full_bytes
    else:
        _fill_parts(target, observation, room)
    if observation.data is not None:
        _fill_data(target, observation.data, room)


_ROOM_FOR_NOTE = 256


def _fill_parts(target: tool_pb2.Observation, observation: ToolObservation, room: Room) -> None:
    parts: Sequence[str | Media] = observation.content
    left, full = room.text_bytes, 0
    for part in parts:
        if isinstance(part, str):
            text, size = cut(part, max(left, 0))
            left -= size
            full += size
            target.truncated |= left < 0
        elif len(part.data) > room.media_bytes:
            target.truncated = True
            text = f"[left out: {part.media_type} of {len(part.data)} bytes]"
        else:
            room.media_bytes -= len(part.data)
            message = common_pb2.MediaPart(data=part.data, media_type=part.media_type)
            is_video = part.media_type.startswith("video/")
            target.content.add(**{"video" if is_video else "image": message})
            continue
        target.content.add().text = text
    target.truncated |= observation.truncated
    target.full_bytes = full if observation.full_bytes is None else observation.full_bytes


def _fill_data(target: tool_pb2.Observation, data: Mapping[str, Any], room: Room) -> None:
    try:
        target.data.SetInParent()
        fill_struct(target.data, data)
        size = target.data.ByteSize()
        left = room.data_bytes
        problem = f"data left out: {size} bytes, of a turn's at most {left} more are sent" if size > left else ""
    except TypeError as error:
        problem = f"data left out: {error}"
    if not problem:
        room.data_bytes -= size
    else:
        target.ClearField("data")
        target.error_detail = f"{target.error_detail}; {problem}" if target.error_detail else problem
