"""How the `python` runtime takes a program apart, against Python's own syntax tree of the whole."""

from __future__ import annotations

import ast
from types import CodeType

import pytest

from tool_service.sandbox.inside import worker_python

NAME = "<turn 1>"


def by_syntax_tree(source: str) -> tuple[CodeType, CodeType | None]:
    tree = ast.parse(source)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = compile(ast.Expression(tree.body.pop().value), NAME, "eval", dont_inherit=True)
    return compile(tree, NAME, "exec", dont_inherit=True), last


@pytest.mark.parametrize(
    "source",
    [
        # a last line that is an expression
        *("1 + 1", "x = 1\nx", "x = 1\n\nx  # said\n\n# all\n", "x\r\ny\r\n", "\f1", "'a'\n'b'", "x = 3\n-x", "x;"),
        *("*a,", "x\n\n\n"),
        *("print(\n 1\n)", "f(\n1,\n)", "x = [1,\n2\n][0]\nx", "x = (1 +\n2)\n[x]", "lambda: (yield)", "f=\\\n3\nf"),
        "from __future__ import annotations\n1",
        "import math, json\ntotal = sum(i * i for i in range(9))\nprint(total)",
        # behind a block, or part of one
        *("if 1:\n  2\n3", "def f():\n  return 1\nf()", "match x:\n case 1: pass\ncase(2)", "with a: b", "if x: f()"),
        *("if 1:\n  2\nelse:\n  3", "for i in [1]: pass\nelse: 1", "if 1:\n  2\n", "try: 1\nfinally: 2"),
        # behind a semicolon, a backslash, or inside of a string
        *("a=1;a", "1; 2", "1 +\\\n2", "1\n\\\n2", "\\\n1", "'''a\n''' + \\\nb", "x='''\na\n'''", "'''\na\n'''"),
        *("x = '''\nprint(1)'''", "'''\nprint(1)\n'''", "'''\n'''; 1", "f'''{\n1\n}'''", "x = '''\n1\n'''\n'''2'''\n"),
        # nothing to show
        *("", "\n\n", "# c", "x = 1", "x = 1\n", "x: int", "pass", "del x", "x += 1", "import a", "global x"),
    ],
)
def test_a_program_is_parted_where_its_syntax_tree_is(source: str) -> None:
    assert worker_python._compile(source, NAME) == by_syntax_tree(source)  # and so are positions


@pytest.mark.parametrize(
    "source",
    [
        *("a\n  b", "  a\nb", "x = (1,\n\ny", "x +", "1\n2 3", "(yield)", "await x", "return 1", "x:=1"),
        *("@f\n1", "else: 1", "if x:\n1", "for x in y:\n\n1", "try:\n  1\nf()", "'''a\nf()", "x = '\nf()"),
        *("\0", "1\n\0", "\ud800", "(" * 300, "0777", "x = 1\n1x", "class A:\n1", "\\\n", "1 \\", "\t1\n 2"),
    ],
)
def test_what_is_no_program_is_told_as_of_the_whole(source: str) -> None:
    with pytest.raises((SyntaxError, ValueError, RecursionError, MemoryError)) as expected:
        by_syntax_tree(source)
    with pytest.raises(expected.type) as found:
        worker_python._compile(source, NAME)
    said, meant = found.value, expected.value
    assert str(said).replace("<unknown>", NAME) == str(meant).replace("<unknown>", NAME)
    assert getattr(said, "lineno", None) == getattr(meant, "lineno", None)
    assert said.__context__ is None
