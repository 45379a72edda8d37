"""Plugins are found, or refused by name: nothing fails silently."""

import importlib.metadata
import textwrap
from pathlib import Path
from typing import Any

import pytest
import tool_harness as harness

from tool_service.config import ToolServiceConfig, check
from tool_service.registry import ENTRY_POINT_GROUP, ToolRegistry, load_registry
from turnwire.config import convert
from turnwire.errors import ConfigError, NotFoundError

TOOL = """
from tool_service.base import BaseTool, ToolAction, ToolObservation, TurnContext

class {kind}(BaseTool):
    name = "{name}"
    description = "A tool."

    async def execute(self, action, turn):
        return ToolObservation("{name}")
"""


def write(folder: Path, file: str, text: str = "", name: str = "") -> Path:
    path = folder / file
    path.write_text(textwrap.dedent(text) if text else TOOL.format(kind=f"{name.title()}Tool", name=name))
    return path


def config_of(folder: Path, *exclude: str, **sections: Any) -> ToolServiceConfig:
    return convert({"plugins": {"directories": [str(folder)], "exclude": list(exclude)}, **sections}, ToolServiceConfig)


def problems_of(config: ToolServiceConfig) -> list[str]:
    return [str(problem) for problem in check(config)]


def test_the_built_in_tools_are_there_by_default() -> None:
    registry = load_registry(ToolServiceConfig())
    assert [tool.name for tool in registry.list_tools()] == ["bash", "python", "search", "sql", "unit_tests"]
    assert registry.get_tool("python").source.endswith("tools/python_tool.py")


def test_a_tool_is_found_in_a_directory(tmp_path: Path) -> None:
    write(tmp_path, "hello_tool.py", name="hello")
    write(tmp_path, "helper.py", "raise RuntimeError('not a plugin, not loaded')")
    registry = load_registry(config_of(tmp_path))
    assert registry.get_tool("hello").source == str(tmp_path / "hello_tool.py")
    assert registry.get_tool("hello").stop_strings == ("</hello>",)


def test_several_tools_may_stand_in_one_file(tmp_path: Path) -> None:
    text = TOOL.format(kind="A", name="a") + TOOL.format(kind="B", name="b")
    write(tmp_path, "two_tool.py", text)
    registry = load_registry(config_of(tmp_path))
    assert registry.get_tool("a").tool is not registry.get_tool("b").tool


def test_a_tool_is_found_by_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, "my_turnwire_package.py", TOOL.format(kind="PackagedTool", name="packaged"))
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        importlib.metadata.EntryPoint("packaged", "my_turnwire_package:PackagedTool", ENTRY_POINT_GROUP),
        importlib.metadata.EntryPoint("missing", "no_such_module_at_all:Tool", ENTRY_POINT_GROUP),
        importlib.metadata.EntryPoint("wrong", "json:dumps", ENTRY_POINT_GROUP),
        importlib.metadata.EntryPoint("empty", "json", ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints(points).select(group=group)
    )
    said = problems_of(ToolServiceConfig())
    assert len(said) == 3
    assert any("missing = no_such_module_at_all:Tool: failed to load: ModuleNotFoundError" in line for line in said)
    assert any("wrong" in line and "neither a module nor a BaseTool class" in line for line in said)
    assert any("empty" in line and "defines no subclass" in line for line in said)
    config = convert({"plugins": {"exclude": ["missing", "wrong", "empty"]}}, ToolServiceConfig)
    assert (
        load_registry(config).get_tool("packaged").source == "entry point packaged = my_turnwire_package:PackagedTool"
    )
    assert load_registry(convert({"plugins": {"entry_points": False}}, ToolServiceConfig)).list_tools()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (line 1)"),
        ("x = 1\n\n1 / 0", "ZeroDivisionError: division by zero (line 3)"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(1)", "SystemExit"),
        ("x = 1", "defines no subclass"),
        (TOOL.format(kind="Bad", name="Not A Name"), "a name is"),
        (TOOL.format(kind="Bad", name="bad").replace('description = "A tool."', ""), "`description` is missing"),
        (TOOL.format(kind="Bad", name="bad") + "\n    class Config: pass\n", "must derive from"),
        (
            "import msgspec\n"
            + TOOL.format(kind="Bad", name="bad")
            + "\n    class Arguments(msgspec.Struct):\n        x: 'Nowhere'\n",
            "Nowhere",
        ),
    ],
)
def test_a_broken_plugin_is_refused_by_name_unless_excluded(tmp_path: Path, text: str, says: str) -> None:
    file = write(tmp_path, "bad_tool.py", text)
    write(tmp_path, "good_tool.py", name="good")
    (said,) = problems_of(config_of(tmp_path))
    assert str(file) in said
    assert says in said
    for exclude in ("bad_tool", "bad", "bad_tool.py"):
        assert load_registry(config_of(tmp_path, exclude)).get_tool("good")


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    write(tmp_path, "a_tool.py", "1/0")
    write(tmp_path, "b_tool.py", "import nothing_like_this")
    config = config_of(
        tmp_path / "nowhere",
        "serach",
        tools={"search": {"top_k": 0, "topk": 1}, "pyton": {}, "python": {"parsers": ["xml"]}},
    )
    said = "\n".join(problems_of(config))
    assert "nowhere is not a directory" in said
    assert "tools.search.top_k" in said
    assert "tools.search.topk: unknown key; did you mean 'top_k'" in said
    assert "tools.pyton: unknown tool; did you mean" in said
    assert "tools.python.parsers" in said
    assert "'serach' matches nothing; did you mean" in said
    assert len(problems_of(config_of(tmp_path))) == 2


def test_a_name_that_is_taken_is_refused_with_both_places(tmp_path: Path) -> None:
    write(tmp_path, "sql_tool.py", name="sql")
    (said,) = problems_of(config_of(tmp_path))
    assert str(tmp_path / "sql_tool.py") in said
    assert "tools/sql_tool.py" in said.replace(str(tmp_path), "")


def test_an_unknown_tool_is_named_with_its_nearest_match() -> None:
    with pytest.raises(NotFoundError, match="did you mean 'python'"):
        load_registry(ToolServiceConfig()).get_tool("pyhton")


def test_register_takes_a_class_of_any_origin(tmp_path: Path) -> None:
    probe = load_registry(harness.config_of()).get_tool("noop").tool
    registry = ToolRegistry()
    registry.register(probe, "here")
    assert registry.problems == []
    assert registry.get_tool("noop").source == "here"


def test_schemas_are_whole_and_nested() -> None:
    search = load_registry(ToolServiceConfig()).get_tool("search")
    schema = search.context_schema
    assert schema["properties"]["documents"]["items"] == {"$ref": "#/$defs/Document"}
    assert schema["$defs"]["Document"]["required"] == ["text"]
    assert search.arguments_schema["properties"]["query"] == {"type": "string", "description": "Keywords."}
    assert search.arguments_schema["required"] == ["query"]


def test_limits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="turn_timeout_seconds"):
        convert({"limits": {"turn_timeout_seconds": 900.0}}, ToolServiceConfig)
    with pytest.raises(ConfigError, match="ready"):
        convert({"sandbox": {"pool": {"ready": 9, "max": 3}}}, ToolServiceConfig)
    said = problems_of(convert({"limits": {"media_bytes": 2**30, "action_bytes": 2**30}}, ToolServiceConfig))
    assert [line.split(":")[0] for line in said] == ["limits", "limits.action_bytes"]
