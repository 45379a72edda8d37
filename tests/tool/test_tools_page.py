"""docs/tools.md and the docstring of BaseTool's module show the example that is there, and it does what they say."""

import asyncio
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import tool_harness as harness
from tool_harness import error_of, text_of

import tool_service.base
from tool_service.config import ToolServiceConfig
from turnwire.config import convert, parse_yaml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tools" / "dice_tool.py"
PAGE = (ROOT / "docs" / "tools.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_the_example() -> None:
    assert blocks("python")[0] == EXAMPLE.read_text()


def test_the_docstring_shows_the_example() -> None:
    docstring = inspect.getmodule(tool_service.base).__doc__ or ""
    assert textwrap.indent(EXAMPLE.read_text(), "    ").strip() in docstring


def test_the_pages_test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(compile(blocks("python")[-1], "docs/tools.md", "exec"), names)
    asyncio.run(names["test_a_loaded_die_rolls_the_same"]())


async def test_the_pages_config_is_one_and_the_example_obeys_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (section,) = blocks("yaml")
    async with harness.running(convert(parse_yaml(section), ToolServiceConfig)) as service:
        observation = await service.call("dice", '{"sides": 6}', {"seed": 3})
        assert 1 <= observation.data["roll"] <= 6
        assert text_of(observation) == str(int(observation.data["roll"]))
        observation = await service.call("dice", '{"sides": 21}')
        assert (text_of(observation), error_of(observation)) == ("a die has at most 20 sides", "TOOL_ERROR")
        observation = await service.call("dice", '{"sides": 1}')
        assert error_of(observation) == "INVALID_ACTION"
