"""Action syntaxes: how calls stand in what the policy wrote.

- `tags`: `<python>1 + 1</python>`
- `fenced`: a fenced block whose info string is the tool's name
- `json`: `<tool_call>{"name": "python", "arguments": {"code": "1 + 1"}}</tool_call>`

A tool names the syntaxes that it is looked for in; `parse` finds the calls of one tool, `compose` puts those of several
tools into the order in which they stand. A call inside another call is text of the outer one. What is malformed (no
closing tag, bad JSON, an unknown tool, wrong arguments) is an action with `error` set, whose text tells the agent what
to mend.

Every search is linear in the text: an opening without an end is looked for once.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import msgspec

from tool_service.action import ToolAction
from turnwire.config import nearest

if TYPE_CHECKING:
    from tool_service.base import BaseTool

ParserName = Literal["tags", "fenced", "json"]

MAX_CALLS = 256
"""Calls of one syntax that are looked for in one text, so that a flood of them costs others no time."""

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


class Found(NamedTuple):
    """A call as it stands in the text, its arguments not yet checked."""

    start: int
    end: int
    text: str = ""
    arguments: Any = None
    """Of a JSON call; None for text."""
    name: str = ""
    """The tool that a JSON call names."""
    error: str = ""


def stop_strings(name: str, parsers: Iterable[ParserName]) -> list[str]:
    """After which strings the policy should stop, so that the tool can act."""
    closings = {"tags": f"</{name}>", "fenced": "\n```\n", "json": CALL_CLOSE}
    return [closings[parser] for parser in parsers]


def _flooded(found: list[Found], position: int) -> bool:
    """Whether the search must end at this call, which is told."""
    if len(found) < MAX_CALLS:
        return False
    found.append(Found(position, position + 1, error=f"there are more than {MAX_CALLS} calls; the rest was not read"))
    return True


def find_tags(text: str, name: str) -> list[Found]:
    """`<name>…</name>`. A closing tag alone is text."""
    opening, closing = f"<{name}>", f"</{name}>"
    found: list[Found] = []
    position = text.find(opening)
    while position >= 0 and not _flooded(found, position):
        body = position + len(opening)
        end = text.find(closing, body)
        if end < 0:
            found.append(Found(position, body, error=f"{opening} is not closed: end the call with {closing}"))
            break
        found.append(Found(position, end + len(closing), text[body:end]))
        position = text.find(opening, end + len(closing))
    return found


@functools.lru_cache(maxsize=1024)
def _fence_opening(name: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]{{0,3}}(`{{3,}})[ \t]*{re.escape(name)}[ \t]*\r?(?:\n|\Z)", re.MULTILINE)


_FENCE_CLOSING = re.compile(r"^[ \t]{0,3}(`{3,})[ \t]*\r?$", re.MULTILINE)


def find_fenced(text: str, name: str) -> list[Found]:
    """A block of three or more backticks with `name` behind them, to a line of at least as many."""
    found: list[Found] = []
    if "```" not in text:
        return found
    opening = _fence_opening(name).search(text)
    while opening and not _flooded(found, opening.start()):
        closing = next(
            (match for match in _FENCE_CLOSING.finditer(text, opening.end()) if len(match[1]) >= len(opening[1])), None
        )
        if closing is None:
            error = f"the {opening[1]}{name} block is not closed: end it with a line of {opening[1]}"
            found.append(Found(opening.start(), opening.end(), error=error))
            break
        body = text[opening.end() : closing.start()]
        found.append(Found(opening.start(), closing.end(), body.removesuffix("\n").removesuffix("\r")))
        opening = _fence_opening(name).search(text, closing.end())
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = re.compile(r"\s*")
_EXAMPLE = f'{CALL_OPEN}{{"name": "…", "arguments": {{…}}}}{CALL_CLOSE}'


@functools.lru_cache(maxsize=4)
def find_json(text: str) -> list[Found]:
    """All `<tool_call>` blocks, whatever tool they name. The closing tag may stand inside a JSON string.

    Cached, because each tool of a trajectory looks through the same text.
    """
    found: list[Found] = []
    position = text.find(CALL_OPEN)
    while position >= 0 and not _flooded(found, position):
        call, position = _json_call(text, position)
        found.append(call)
        position = text.find(CALL_OPEN, position)
    return found


def _json_call(text: str, start: int) -> tuple[Found, int]:
    """The block that opens at `start`, and where to look for the next."""
    body = start + len(CALL_OPEN)
    begin = _space(text, body)
    try:
        value, stop = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        close = text.find(CALL_CLOSE, body)
        if close < 0:
            message = f"{CALL_OPEN} is not closed: write {_EXAMPLE}"
            return Found(start, body, error=message), len(text)
        reason = "nested too deep" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
        end = close + len(CALL_CLOSE)
        return Found(start, end, error=f"the tool call is not valid JSON ({reason}): write {_EXAMPLE}"), end
    stop = _space(text, stop)
    if not text.startswith(CALL_CLOSE, stop):
        message = f"the tool call's JSON is not followed by {CALL_CLOSE}: write {_EXAMPLE}"
        return Found(start, stop, error=message), stop
    end = stop + len(CALL_CLOSE)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Found(start, end, error=f"the tool call names no tool: write {_EXAMPLE}"), end
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return Found(start, end, name=value["name"], error='"arguments" must be a JSON object'), end
    return Found(start, end, arguments=arguments, name=value["name"]), end


def _space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def parse(text: str, name: str, tool: type[BaseTool], parsers: Sequence[ParserName]) -> list[ToolAction[Any]]:
    """The calls of one tool, in order of appearance."""
    found: list[Found] = []
    for parser in parsers:
        if parser == "tags":
            found += find_tags(text, name)
        elif parser == "fenced":
            found += find_fenced(text, name)
        else:
            found += [call for call in find_json(text) if call.name == name]
    if len(parsers) > 1:
        found.sort(key=lambda call: call.start)
    return [action_of(call, name, tool) for call in found]


def action_of(call: Found, name: str, tool: type[BaseTool]) -> ToolAction[Any]:
    """Check a call's arguments."""
    arguments, error = None, call.error
    if not error:
        arguments, error = check_arguments(tool, call.arguments, call.text)
    return ToolAction(name, arguments, call.text, call.start, call.end, error=error)


def check_arguments(tool: type[BaseTool], arguments: Any, text: str = "") -> tuple[Any, str]:
    """A tool's `Arguments` from plain values, or from text where there are none; or else what is wrong with them."""
    try:
        if arguments is None:
            return tool.arguments_from_text(text), ""
        _refuse_unknown(arguments, tool.Arguments)
        return msgspec.convert(arguments, tool.Arguments), ""
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        reason = str(error) or "nested too deep"
        fields = ", ".join(field.encode_name for field in msgspec.structs.fields(tool.Arguments)) or "none"
        return None, f"wrong arguments for {tool.name}: {reason}. Its arguments: {fields}"


def _refuse_unknown(arguments: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for name in arguments:
        if name not in known:
            raise msgspec.ValidationError(f"unknown argument {name!r}; {nearest(name, known)}")


@functools.lru_cache(maxsize=1024)
def text_field(kind: type[msgspec.Struct]) -> str | None:
    """The field that a call's text fills: the first, when it is a plain string and no other is required."""
    fields = msgspec.structs.fields(kind)
    if not fields or any(field.required for field in fields[1:]):
        return None
    first = msgspec.inspect.type_info(fields[0].type)
    while isinstance(first, msgspec.inspect.Metadata):
        first = first.type
    return fields[0].name if isinstance(first, msgspec.inspect.StrType) else None


def compose(text: str, tools: Sequence[BaseTool]) -> list[ToolAction[Any]]:
    """All calls of all tools in order of appearance, each once, without those that stand inside another call."""
    if len(tools) == 1 and "json" not in tools[0].config.parsers:
        actions = tools[0].parse_action(text)
        if len(actions) < 2:
            return actions
    else:
        actions = [action for tool in tools for action in tool.parse_action(text)]
        actions += _unclaimed(text, [tool.name for tool in tools if "json" in tool.config.parsers])
    actions.sort(key=lambda action: (action.start, -action.end))
    kept: list[ToolAction[Any]] = []
    end = 0
    for action in actions:
        if action.start >= end:
            kept.append(action)
            end = action.end
    return kept


def _unclaimed(text: str, names: Sequence[str]) -> list[ToolAction[Any]]:
    """JSON calls that are malformed, or name a tool that is not there."""
    actions: list[ToolAction[Any]] = []
    if not names or CALL_OPEN not in text:
        return actions
    for call in find_json(text):
        if call.name not in names:
            error = call.error or f"there is no tool {call.name[:80]!r}; {nearest(call.name[:80], names)}"
            actions.append(ToolAction(call.name[:80], None, "", call.start, call.end, error=error))
    return actions
