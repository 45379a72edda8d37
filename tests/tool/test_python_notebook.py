"""The `python` tool as people know it from notebooks: what is shown, what is kept, what a mistake looks like."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tool_harness import Service, error_of, text_of
from workspace_harness import BACKENDS, service_on, turns

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESTARTED = "[the session was restarted: earlier variables are lost]"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BACKENDS)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    async with service_on(request.param) as running:
        yield running


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        (("40 + 2", "_ + 1"), ["42", "43"]),
        (("5", "None", "_"), ["5", "", "5"]),
        (("x = 3", "x"), ["", "3"]),
        (("x = 3; x",), ["3"]),
        (("if True:\n    7",), [""]),
        (("print(1)\n2\n3",), ["1\n3"]),
        (("def f():\n    return 1", "f()", "f.__module__"), ["", "1", "'__main__'"]),
        (("import math", "math.floor(2.5)"), ["", "2"]),
        (("'a\\nb'", "print('a\\nb')"), ["'a\\nb'", "a\nb"]),
        (("class C:\n    def __repr__(self): return 'me'", "C()"), ["", "me"]),
        (("%matplotlib inline",), None),
        (("await asyncio.sleep(0)",), None),
        (("import asyncio\nasync def f(): return 9\nasyncio.run(f())",), ["9"]),
        (("__name__", "__builtins__.__name__"), ["'__main__'", "'builtins'"]),
        (("open('a.txt', 'w').write('x')", "import os; os.listdir()"), ["1", "['a.txt']"]),
        (("open('mine.py', 'w').write('A = 1')", "import mine; mine.A"), ["5", "1"]),
    ],
)
async def test_a_cell_shows_its_last_value_and_leaves_its_names(
    service: Service, cells: tuple[str, ...], shown: list[str] | None
) -> None:
    said = await turns(service, "python", *cells)
    if shown is None:
        assert error_of(said[0]) == "TOOL_ERROR"
        assert "SyntaxError" in text_of(said[0])
    else:
        assert [text_of(observation) for observation in said] == shown


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("input('name? ')", "name? \nTraceback (most recent call last):\n*EOFError: EOF when reading a line"),
        ("x = (1,\n\ny = 2", "*SyntaxError: '(' was never closed"),
        ("  x = 1\n y = 2", "*IndentationError: unexpected indent"),
        ("x = 1\nx +", "*SyntaxError: invalid syntax"),
        ("(" * 100_000, "*SyntaxError: too many nested parentheses"),
        ("1+" * 100_000 + "1", "*RecursionError: maximum recursion depth exceeded"),
        ("'\\ud800'.encode()", "*UnicodeEncodeError: *"),
        ("raise KeyError('k')", "*KeyError: 'k'"),
        ("raise SystemExit('why')", "why\nexit code 1"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("raise KeyboardInterrupt", "*KeyboardInterrupt"),
        ("assert 1 == 2, 'no'", "*AssertionError: no"),
        ("import os\nos.dup2(os.open('/dev/null', os.O_WRONLY), 2)\n1 / 0", "ZeroDivisionError"),
    ],
)
async def test_a_mistake_is_a_traceback_and_the_session_goes_on(service: Service, code: str, says: str) -> None:
    said = await turns(service, "python", "kept = 1", code, "kept")
    assert error_of(said[1]) == "TOOL_ERROR"
    text = text_of(said[1])
    begin, _, end = says.partition("*")
    assert text.startswith(begin)
    assert end.rstrip("*") in text
    assert text_of(said[2]) == "1"


async def test_a_mistake_of_an_earlier_cell_is_shown_as_a_cause_without_what_runs_cells(service: Service) -> None:
    raised = "first = KeyError('k')\nraise first"
    again = "raise ValueError from first", "try:\n    raise first\nexcept KeyError:\n    1 / 0"
    ends = "class Ends(SystemExit):\n    @property\n    def code(self): return 1 / 0\nraise Ends"
    for observation in await turns(service, "python", raised, *again, ends):
        assert error_of(observation) == "TOOL_ERROR"
        places = [line for line in text_of(observation).splitlines() if line.lstrip().startswith("File ")]
        assert places
        assert all('"<turn ' in line for line in places)
