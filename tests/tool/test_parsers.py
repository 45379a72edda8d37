"""Calls are found wherever they stand, in order, and what is malformed is told so that it can be mended."""

import time
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_service import parsers
from tool_service.base import BaseTool, ToolAction, ToolConfig, ToolObservation, TurnContext


class Echo(BaseTool):
    name = "echo"
    description = "Text in, text out."

    async def execute(self, action: ToolAction[Any], turn: TurnContext) -> ToolObservation:
        return ToolObservation(action.arguments.text)


class Dice(Echo):
    name = "dice"

    class Arguments(msgspec.Struct):
        sides: Annotated[int, msgspec.Meta(ge=2)]
        label: str = ""


class Query(Echo):
    name = "query"

    class Arguments(msgspec.Struct):
        text: Annotated[str, msgspec.Meta(description="What to look for.")]
        limit: int = 3


def tool(kind: type[BaseTool], *syntaxes: parsers.ParserName) -> BaseTool:
    return kind(ToolConfig(parsers=syntaxes or ("tags",)))


def found(text: str, *tools: BaseTool) -> list[tuple[str, Any]]:
    """Each call's tool, and its arguments' first field or its error."""
    return [
        (action.tool, action.error or msgspec.structs.astuple(action.arguments)[0])
        for action in parsers.compose(text, tools)
    ]


def test_tags() -> None:
    assert found("a <echo>one</echo> b <echo>\ntwo\n</echo>", tool(Echo)) == [("echo", "one"), ("echo", "\ntwo\n")]
    assert found("nothing, </echo> and <other>x</other>", tool(Echo)) == []
    assert found("<echo></echo>", tool(Echo)) == [("echo", "")]
    assert found("<echo><echo></echo>", tool(Echo)) == [("echo", "<echo>")]


def test_an_unclosed_tag_says_how_to_close_it() -> None:
    assert found("<echo>one</echo><echo>two", tool(Echo)) == [
        ("echo", "one"),
        ("echo", "<echo> is not closed: end the call with </echo>"),
    ]


def test_positions_are_those_of_the_text() -> None:
    text = "say <echo>hi</echo> now"
    (action,) = tool(Echo).parse_action(text)
    assert text[action.start : action.end] == "<echo>hi</echo>"


def test_fenced_blocks() -> None:
    text = "Look:\n```echo\none\ntwo\n```\nand\n````echo\n```\ninner\n```\n````\n```other\nx\n```"
    assert found(text, tool(Echo, "fenced")) == [("echo", "one\ntwo"), ("echo", "```\ninner\n```")]
    assert found("```echo\r\none\r\n```\r\n", tool(Echo, "fenced")) == [("echo", "one")]
    assert found("```echo\n```", tool(Echo, "fenced")) == [("echo", "")]
    ((_, error),) = found("```echo\none", tool(Echo, "fenced"))
    assert "not closed" in error
    assert found("inline ```echo\n``` is text", tool(Echo, "fenced")) == []


def test_json_tool_calls() -> None:
    text = 'x <tool_call>\n{"name": "dice", "arguments": {"sides": 6}}\n</tool_call> y'
    assert found(text, tool(Dice, "json")) == [("dice", 6)]
    inside = '<tool_call>{"name": "echo", "arguments": {"text": "</tool_call>"}}</tool_call>'
    assert found(inside, tool(Echo, "json")) == [("echo", "</tool_call>")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<tool_call>{"name": "dice", "arguments": {"sides": 6}}', "not followed by </tool_call>"),
        ('<tool_call>{"name": "dice", "arg', "not closed"),
        ('<tool_call>{"name": "dice", </tool_call>', "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deep"),
        ('<tool_call>{"name": "dice", "arguments": {"sides": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "dice", "arguments": {"sides": ' + "9" * 5000 + "}}</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "names no tool"),
        ('<tool_call>{"name": 3}</tool_call>', "names no tool"),
        ('<tool_call>{"name": "dcie"}</tool_call>', "did you mean 'dice'"),
        ('<tool_call>{"name": "dice", "arguments": [6]}</tool_call>', "must be a JSON object"),
        ('<tool_call>{"name": "dice", "arguments": {}}</tool_call>', "`sides`"),
        ('<tool_call>{"name": "dice", "arguments": {"sides": 1}}</tool_call>', ">= 2"),
        ('<tool_call>{"name": "dice", "arguments": {"sides": "6"}}</tool_call>', "`int`"),
        ('<tool_call>{"name": "dice", "arguments": {"sides": 6, "side": 1}}</tool_call>', "did you mean 'sides'"),
    ],
    ids=lambda value: value[:30],
)
def test_a_malformed_json_call_says_what_to_mend(text: str, says: str) -> None:
    ((_, error),) = found(text, tool(Dice, "json"), tool(Echo, "json"))
    assert says in error


def test_text_fills_a_first_string_field_and_json_the_rest() -> None:
    assert found("<query>cats</query>", tool(Query)) == [("query", "cats")]
    assert found('<dice>{"sides": 6}</dice>', tool(Dice)) == [("dice", 6)]
    ((_, error),) = found("<dice>six</dice>", tool(Dice))
    assert error.startswith("wrong arguments for dice: JSON is malformed")
    assert error.endswith("Its arguments: sides, label")


def test_calls_of_several_tools_and_syntaxes_are_in_order_of_appearance() -> None:
    tools = [tool(Dice, "tags", "json"), tool(Echo, "fenced", "tags"), tool(Query, "json")]
    text = (
        '<tool_call>{"name": "query", "arguments": {"text": "1"}}</tool_call>\n```echo\n2\n```\n'
        '<dice>{"sides": 3}</dice><echo>4</echo><tool_call>{"name": "dice", "arguments": {"sides": 5}}</tool_call>'
        '<tool_call>{"name": "echo"}</tool_call>'
    )
    assert found(text, *tools)[:5] == [("query", "1"), ("echo", "2"), ("dice", 3), ("echo", "4"), ("dice", 5)]
    ((_, error),) = found(text, *tools)[5:]
    assert "there is no tool 'echo'" in error


def test_a_call_inside_another_call_is_text() -> None:
    tools = [tool(Echo), tool(Query)]
    assert found("<echo><query>x</query></echo><query>y</query>", *tools) == [
        ("echo", "<query>x</query>"),
        ("query", "y"),
    ]


TAGS = ["<echo>", "</echo>", "<query>", "</query>", "<tool_call>", "</tool_call>", "```echo\n", "```\n"]
LETTERS = [" ", "\n", '"', "{", "}", "[", "a", "é", "\ud800", "\0", '{"name": "echo", "arguments": {"text": "x"}}']
PIECES = st.sampled_from([*TAGS, *LETTERS])
TOOLS = [tool(Echo, "tags", "fenced", "json"), tool(Query, "tags", "json")]


@given(st.lists(PIECES, max_size=30).map("".join))
def test_whatever_is_written_calls_do_not_overlap_and_are_in_order(text: str) -> None:
    end = 0
    for action in parsers.compose(text, TOOLS):
        assert end <= action.start < action.end <= len(text)
        end = action.end
        assert bool(action.error) == (action.arguments is None)


TEXT = st.text(max_size=40)


@given(TEXT, TEXT, TEXT)
def test_a_call_in_any_syntax_gives_back_what_was_put_in(before: str, body: str, after: str) -> None:
    if "<echo>" not in before and "</echo>" not in body and "echo>" not in before + body:
        assert ("echo", body) in found(f"{before}<echo>{body}</echo>{after}", tool(Echo))
    if "<tool_call>" not in before:
        call = msgspec.json.encode({"name": "echo", "arguments": {"text": body}}).decode()
        assert ("echo", body) in found(f"{before}<tool_call>{call}</tool_call>{after}", tool(Echo, "json"))


LONG_SPACE = " " * 50
PATTERNS = [*TAGS, "<echo></echo>", "<tool_call></tool_call>", "<tool_call>{", "<tool_call>[", '<tool_call>"', "```"]
PATTERNS += ["````echo\n```\n", f"{LONG_SPACE}```", f"<tool_call>{LONG_SPACE}", '<tool_call>{"a":']


@pytest.mark.parametrize("piece", PATTERNS)
def test_parsing_time_is_linear(piece: str) -> None:
    text = piece * (250_000 // len(piece))
    begin = time.thread_time()
    parsers.compose(text, TOOLS)
    assert time.thread_time() - begin < 5, "of CPU time: hundredths are usual, and minutes what its square would take"


def test_stop_strings_are_where_a_call_of_each_syntax_ends() -> None:
    assert parsers.stop_strings("echo", ("tags", "fenced", "json")) == ["</echo>", "\n```\n", "</tool_call>"]


@pytest.mark.parametrize("syntax", ["tags", "fenced", "json"])
def test_a_flood_of_calls_is_read_up_to_a_limit(syntax: parsers.ParserName) -> None:
    call = {
        "tags": "<echo>x</echo>",
        "fenced": "```echo\nx\n```\n",
        "json": '<tool_call>{"name": "echo", "arguments": {"text": "x"}}</tool_call>',
    }[syntax]
    calls = found(call * 1000, tool(Echo, syntax))
    assert calls[:-1] == [("echo", "x")] * parsers.MAX_CALLS
    assert "the rest was not read" in calls[-1][1]
