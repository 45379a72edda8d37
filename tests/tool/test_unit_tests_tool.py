"""The `unit_tests` tool through the service: tests count what they see themselves, whatever the program does."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from tool_harness import Service, binding, error_of, nothing_left, text_of
from waiting import PATIENCE
from workspace_harness import BACKENDS, service_on

from turnwire.client.tools import tool_call
from turnwire.v1 import tool_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAIN = """
from solution import add

def test_numbers():
    assert add(1, 2) == 3

def test_lists():
    assert add([1], [2]) == [1, 2]
"""
CLASS = """
import unittest
import solution

class Adding(unittest.TestCase):
    def setUp(self):
        self.one = 1

    def test_equal(self):
        self.assertEqual(solution.add(self.one, 2), 3)

    def test_true(self):
        self.assertTrue(solution.add(0, 1) == 1)
"""
ASSERTS = "assert add(1, 2) == 3\nsecond = add(2, 2)\nassert second == 4\n"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n\ncheck(add)\n"
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BACKENDS)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    async with service_on(request.param) as running:
        yield running


async def judged(service: Service, code: str, **context: Any) -> tool_pb2.Observation:
    request = tool_pb2.ExecuteRequest(
        tool=binding("unit_tests", context), call=tool_call("unit_tests", code=code), timeout={"seconds": 40}
    )
    (observation,) = (await service.stub.Execute(request, timeout=PATIENCE)).observations
    return observation


def counts(observation: tool_pb2.Observation) -> tuple[int, int]:
    return int(observation.data["passed"]), int(observation.data["total"])


@pytest.mark.parametrize(("tests", "total"), [(PLAIN, 2), (CLASS, 2), (ASSERTS, 2), (CHECK, 1)])
async def test_a_right_program_passes_all_and_a_wrong_one_does_not(service: Service, tests: str, total: int) -> None:
    observation = await judged(service, RIGHT, tests=tests)
    assert (counts(observation), error_of(observation)) == ((total, total), "")
    assert text_of(observation) == f"{total} of {total} tests passed"
    observation = await judged(service, RIGHT.replace("+", "-"), tests=tests)
    assert counts(observation)[0] == 0


@pytest.mark.parametrize(
    "cheat",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "raise SystemExit",
        "import unittest; raise unittest.SkipTest",
        "def add(a, b): (",
        "",
        "add = 3",
        "while True: pass",
        "def add(a, b):\n    while True: pass",
        "def add(a, b): raise SystemExit(0)",
        "def add(a, b): raise BaseException",
        "def add(a, b): __import__('os')._exit(0)",
        "class Equal:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Equal()",
        "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return Equal(7)",
        "class Equal(list):\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
        "import unittest\nunittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *a, **k: None\n"
        "unittest.TestResult.wasSuccessful = lambda self: True\ndef add(a, b): return 0",
        "import builtins\nbuiltins.AssertionError = type('Fine', (Exception,), {})\ndef add(a, b): return 0",
        "import sys\nfor module in list(sys.modules.values()):\n    for name in dir(module):\n"
        "        if 'test' in name.lower():\n            try: setattr(module, name, lambda *a, **k: None)\n"
        "            except Exception: pass\ndef add(a, b): return 0",
        # writes what test runners read, and a module that hides the tests'
        "for name in ('conftest.py', 'pytest.ini', 'sitecustomize.py', 'unittest.py', 'tests.py', 'json.py'):\n"
        "    open(name, 'w').write('raise SystemExit(0)')\ndef add(a, b): return 0",
        # answers by itself, for all tests at once
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'{\"v\":true}\\n' * 20)\n    except OSError: pass\n"
        "os._exit(0)",
        'import os\nfor fd in range(64):\n    try: os.write(fd, b\'{"passed": 2, "total": 2, "tests": []}\\n\')\n'
        "    except OSError: pass\ndef add(a, b): return 0",
        "import os\nif os.fork():\n    os._exit(0)\ndef add(a, b): return 0",
        "print('2 of 2 tests passed')\nprint('OK', file=__import__('sys').stderr)\ndef add(a, b): return 0",
        # looks for what is expected
        "import gc, sys\ndef add(a, b):\n    seen = repr([o for o in gc.get_objects() if isinstance(o, (str, list))])\n"
        "    return 3 if '== 3' in seen.replace('\\'== 3\\' in', '') else -1",
        "import os\ndef add(a, b):\n    judge = f'/proc/{os.getppid()}'\n"
        "    found = open(judge + '/environ', 'rb').read() + open(judge + '/cmdline', 'rb').read()\n"
        "    with open(judge + '/mem', 'rb') as memory:\n        for line in open(judge + '/maps'):\n"
        "            start, end = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "            if ' rw' in line:\n                memory.seek(start)\n"
        "                found += memory.read(end - start)\n"
        "    return 3 if b'add(1, 2) == 3' in found else -1",
        "import os, glob\ndef add(a, b):\n    places = '/proc/[0-9]*/fd/*', '/workspace/**', '/tmp/**'\n"
        "    for place in [found for each in places for found in glob.glob(each)]:\n        try:\n"
        "            if b'== 3' in open(place, 'rb').read(4096): return 3\n"
        "        except OSError: pass\n    return -1",
        # ends the one who judges
        "import os, signal\ndef add(a, b):\n    os.kill(os.getppid(), signal.SIGTERM); return 0",
        "import os, signal\nos.kill(-1, signal.SIGKILL)",
    ],
)
@pytest.mark.parametrize("tests", [PLAIN, CLASS], ids=["plain", "class"])
async def test_a_cheat_passes_no_test(service: Service, cheat: str, tests: str) -> None:
    observation = await judged(service, cheat, tests=tests, test_seconds=0.7)
    assert error_of(observation) != "INFRA"
    if not error_of(observation):
        assert counts(observation) == (0, 2)
    else:
        assert "passed" not in observation.data


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (  # changes its argument
            "def order(values): values.sort()",
            "def test(): \n    values = [3, 1]\n    order(values)\n    assert values == [1, 3]",
        ),
        ("def count(n): yield from range(n)", "assert list(count(3)) == [0, 1, 2]"),
        ("def twice(f, x): return f(f(x))", "assert twice(lambda n: n + 1, 1) == 3"),
        ("def f(*a, **k): return a, k", "assert f(1, x=2) == ((1,), {'x': 2})"),
        ("def f(): return {1: {2, 3}, 'b': b'\\xff', (1, 2): None}", "assert f()[1, 2] is None and f()[1] == {2, 3}"),
        ("def f(): return float('nan'), float('inf'), 1j, 10**6000", "assert f()[1] > 1e300 and f()[3] == 10**6000"),
        ("def f(): return '\\ud800\\0'", "assert f() == '\\ud800\\0'"),
        ("class Box:\n    def __init__(self, n): self.n = n\n    def __len__(self): return self.n",
         "assert len(Box(3)) == 3"),
        ("class Box:\n    n = 1\n    def up(self): self.n += 1; return self", "b = Box()\nassert b.up().up().n == 3"),
        ("class Box:\n    pass", "b = Box()\nb.n = 1\nassert isinstance(b, Box) and b.n == 1 and b == b and b != 1"),
        ("class Lost(ValueError): pass\ndef f(): raise Lost('why')", "import solution\ntry:\n    f()\n"
         "except solution.Lost as error:\n    found = str(error)\nassert found == 'why'"),
        ("def f(n): return 1 // n",
         "import unittest\nwith unittest.TestCase().assertRaises(ZeroDivisionError):\n    f(0)\nassert f(1) == 1"),
        ("if __name__ == '__main__':\n    raise SystemExit(1)\nA = 5", "from solution import *\nassert A == 5"),
        ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int", "assert P(1) == P(1) and P(1) != P(2)"),
        ("seen = []\ndef f(x): seen.append(x); return len(seen)", "assert f(1) == 1\nassert f(1) == 2"),
        ("import collections\ndef f(x): return collections.Counter(x)",
         "assert f('aab') == {'a': 2, 'b': 1}\nassert f('aab').most_common(1) == [('a', 2)]\nassert 'a' in f('a')"),
        ("import collections\nP = collections.namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
         "assert f() == (1, 2)\nassert f().y == 2"),
        ("from fractions import Fraction\ndef f(): return Fraction(1, 2)",
         "assert f() == 0.5\nassert 0 < f() < 1\nassert abs(2 * f() - 1) < 1e-9\nassert 3 - f() == 2.5"),
        ("class V:\n    def __init__(self, x): self.x = x\n    def __mul__(self, n): return V(self.x * n)",
         "assert (V(2) * 3).x == 6"),
        ("def f(): return range(1, 10, 3)", "assert f() == range(1, 10, 3)"),
        ("from decimal import Decimal\nfrom fractions import Fraction\ndef f(x): return x / 3, Decimal('0.1')",
         "from decimal import Decimal\nfrom fractions import Fraction\n"
         "assert f(Fraction(1)) == (Fraction(1, 3), Decimal('0.1'))\nassert f(Fraction(1))[0] * 3 - 1 == 0"),
        ("class Box:\n    union = 3\n    def difference(self, a, b=0): return a - b\nclass Other:\n    union = Box",
         "assert Box().union == 3 and Box().difference(5, b=1) == 4 and Other().union.union == 3"),
        ("class Mine(set): pass\ndef f(): return Mine({1, 2})",
         "assert f() - {1} == {2} and f() | {3} == {1, 2, 3} and f().issubset({1, 2, 3})"),
        ("class Base(Exception): pass\nclass Below(Base, KeyError): pass\ndef f(): raise Below('why')",
         "import solution\nfrom unittest import TestCase\nfor kind in (solution.Base, KeyError, solution.Below):\n"
         "    with TestCase().assertRaises(kind):\n        f()\n    assert issubclass(solution.Below, kind)"),
        ("class Coded(Exception):\n    def __init__(self, code):\n        super().__init__(f'code {code}')\n"
         "        self.code = code\ndef f(): raise Coded([7])",
         "try:\n    f()\nexcept Exception as error:\n    assert (str(error), error.code) == ('code [7]', [7])"),
        ("def f(x): return x.decode()", "try:\n    f(b'\\xff')\nexcept UnicodeDecodeError as error:\n"
         "    assert error.args[1] == b'\\xff'"),
        ("def again(f, kind):\n    for _ in range(2):\n        try: return f()\n        except kind: pass\n"
         "    raise kind('no')",
         "class Mine(Exception): pass\ntries = []\ndef fails():\n    tries.append(1)\n    raise Mine\n"
         "try:\n    again(fails, Mine)\nexcept Mine as error:\n    assert str(error) == 'no' and len(tries) == 2"),
        ("\ufeffdef f(): return 1", "assert f() == 1"),
        ("def f(x): return x", "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
         "class P:\n    x: int\ndef test(): assert f(P(1).x) == 1"),
        ("def f(x): return x", "import unittest\ndef setUpModule():\n    global one\n    one = 1\n"
         "class A(unittest.TestCase):\n    def test(self): self.assertEqual(f(one), 1)"),
    ],
)  # fmt: skip
async def test_what_tests_may_do_with_a_program(service: Service, code: str, tests: str) -> None:
    observation = await judged(service, code, tests=tests)
    passed, total = counts(observation)
    assert passed == total > 0, text_of(observation)


@pytest.mark.parametrize(
    ("code", "cases", "passed"),
    [
        ("def f(a, b=0): return a + b", [{"call": "f", "args": [1], "kwargs": {"b": 2}, "returns": 3}], 1),
        ("def f(a): return a, 0.1 + 0.2", [{"call": "f", "args": [10**30], "returns": [10**30, 0.3]}], 1),
        ("from decimal import Decimal\nfrom fractions import Fraction\ndef f(x): return Fraction(x), Decimal('0.5')",
         [{"call": "f", "args": [10**30], "returns": [10**30, 0.5]}, {"call": "f", "args": [1], "returns": [2, 1]}], 1),
        ("def f(): return {1: True}", [{"call": "f", "returns": {"1": True}}, {"call": "f", "returns": {}}], 1),
        ("def f(): return 1", [{"call": "g", "returns": 1}, {"call": "f", "returns": "1"}], 0),
        ("import collections\ndef f(x): return [collections.Counter(x)]",
         [{"call": "f", "args": ["a"], "returns": [{"a": 1}]}, {"call": "f", "args": ["b"], "returns": [{"a": 1}]}], 1),
        ("print(sum(map(int, input().split())))", [{"stdin": "1 2\n", "stdout": "3"}, {"stdin": "", "stdout": "0"}], 1),
        ("print('a ')\nprint()\n", [{"stdin": "", "stdout": "a"}], 1),
        ("print('x' * 50_000_000)", [{"stdin": "", "stdout": "x"}], 0),
        ("import time\ntime.sleep(60)", [{"stdin": "", "stdout": ""}], 0),
        ("import os\nprint('right', flush=True)\nif os.fork() == 0: os.setsid(); __import__('time').sleep(60)",
         [{"stdin": "", "stdout": "right"}] * 2, 2),
    ],
)  # fmt: skip
async def test_cases_are_calls_or_whole_programs(service: Service, code: str, cases: list[Any], passed: int) -> None:
    seconds = 20 if passed else 1.5  # short only where that may be the end
    observation = await judged(service, code, cases=json.dumps(cases), test_seconds=seconds)
    assert counts(observation) == (passed, len(cases)), text_of(observation)


@pytest.mark.parametrize(
    "check",
    ["abs(f() - 3) < 1e-6", "abs(3 - f()) < 1e-6", "round(f() - 3) == 0", "not f() - 3", "2 < f() < 4", "3 in f()"],
)
async def test_an_object_of_the_programs_is_not_its_own_judge(service: Service, check: str) -> None:
    zeros = "sub rsub abs neg round bool int index"
    yes = "lt gt le ge contains"
    members = [f"    def __{name}__(self, *a): return 0" for name in zeros.split()]
    members += [f"    def __{name}__(self, *a): return True" for name in yes.split()]
    code = "\n".join(["class Agrees:", *members, "def f(): return Agrees()"])
    assert counts(await judged(service, code, tests=f"assert {check}")) == (0, 1)


async def test_what_tests_imported_is_what_the_next_process_raises(service: Service) -> None:
    code = "import os\nclass No(Exception): pass\ndef f(x):\n    if not x: os._exit(1)\n    raise No"
    tests = (
        "from solution import No, f\ndef test_a(): f(0)\n"
        "def test_b():\n    try: f(1)\n    except No: return\n    assert False"
    )
    assert counts(await judged(service, code, tests=tests)) == (1, 2)


async def test_what_a_program_says_may_hold_anything(service: Service) -> None:
    observation = await judged(service, "def add(a, b): raise ValueError('\\ud800\\0' * 500)", tests=PLAIN)
    assert (counts(observation), error_of(observation)) == ((0, 2), "")
    assert "\\ud800" in text_of(observation)


async def test_a_program_may_be_in_bash(service: Service) -> None:
    cases = json.dumps([{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "x", "stdout": "5"}])
    observation = await judged(service, 'read -r a b; echo "$((a + b))"', cases=cases, language="bash")
    assert counts(observation) == (1, 2)


async def test_what_did_not_pass_is_said_and_the_rest_still_runs(service: Service) -> None:
    tests = PLAIN + "\ndef test_texts():\n    assert add('a', 'b') == 'ba', 'in order'\n"
    dying = "import os\ndef add(a, b):\n    if isinstance(a, int): os._exit(1)\n    return a + b\n"
    observation = await judged(service, dying, tests=tests)
    assert text_of(observation) == (
        "1 of 3 tests passed\ntest_numbers: LinkError: the process ended\ntest_texts: AssertionError: in order"
    )


@pytest.mark.parametrize(
    ("context", "says"),
    [
        ({}, "neither tests nor cases"),
        ({"tests": "   "}, "neither tests nor cases"),
        ({"cases": "[1]"}, "cases are a list of"),
        ({"cases": "[{]"}, "cases are not JSON"),
        ({"cases": '[{"call": "f"}]'}, "cases are a list of"),
        ({"tests": "assert f()", "language": "bash"}, "tests in Python are of programs in Python"),
        ({"tests": "x = 1", "module": "not a name"}, "matching regex"),
        ({"tests": "#" * 2**21}, "at most 1048576"),
    ],
)
async def test_tests_that_cannot_be_run_are_the_clients_mistake(
    service: Service, context: dict[str, Any], says: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=says) as error:
        await judged(service, RIGHT, **context)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("tests", "says"), [("def test(: pass", "SyntaxError"), ("x = 1", "there are 0")])
async def test_tests_that_are_none_are_the_tasks_mistake_and_no_pass(service: Service, tests: str, says: str) -> None:
    observation = await judged(service, RIGHT, tests=tests)
    assert error_of(observation) == "INVALID_ACTION"
    assert says in text_of(observation)
    assert "passed" not in observation.data


@pytest.mark.parametrize(
    "tests",
    [
        "async def test():\n    assert add(1, 1) == {right}",
        "class TestPlain:\n    def test(self):\n        assert add(1, 1) == {right}",
        "import unittest\nclass Later(unittest.IsolatedAsyncioTestCase):\n    async def test(self):\n"
        "        self.assertEqual(add(1, 1), {right})",
        "import unittest\nclass Base(unittest.TestCase):\n    pass\nclass Below(Base):\n    def test(self):\n"
        "        self.assertEqual(add(1, 1), {right})",
        "def helper(x):\n    return add(x, x)\n\ndef test():\n    assert helper(1) == {right}",
    ],
)
async def test_a_test_of_any_form_is_really_run(service: Service, tests: str) -> None:
    assert counts(await judged(service, RIGHT, tests=tests.replace("{right}", "2"))) == (1, 1)
    assert counts(await judged(service, RIGHT, tests=tests.replace("{right}", "3"))) == (0, 1)


@pytest.mark.parametrize(
    "tests",
    [
        "def test():\n    yield add(1, 1)",
        "import unittest\n@unittest.skip('later')\nclass Skipped(unittest.TestCase):\n    def test(self): pass",
        "import unittest\nclass Wrong(unittest.TestCase):\n    @unittest.expectedFailure\n    def test(self): 1 / 0",
        "def test(fixture):\n    pass",
        "def test():\n    assert False\n\ndef test():\n    1 / 0",
    ],
)
async def test_what_was_not_run_to_its_end_has_not_passed(service: Service, tests: str) -> None:
    assert counts(await judged(service, RIGHT, tests=tests)) == (0, 1)


async def test_modules_that_a_program_writes_are_not_the_tests(service: Service) -> None:
    writes = (
        "for folder in ('.', '/tmp', '/workspace'):\n    for name in ('colorsys', 'chunk', 'this'):\n"
        "        open(f'{folder}/{name}.py', 'w').write('import builtins; builtins.AssertionError = SystemExit')\n"
    )
    tests = "import colorsys\nimport chunk\n" + PLAIN + "\ndef test_module():\n    assert colorsys.rgb_to_hsv\n"
    observation = await judged(service, writes + "def add(a, b): return 0", tests=tests)
    assert counts(observation) == (1, 3)


async def test_each_run_leaves_nothing(service: Service) -> None:
    code = "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass\n" + RIGHT

    async def run(count: int) -> None:
        await asyncio.gather(*(judged(service, code, tests=PLAIN, test_seconds=1) for _ in range(count)))

    await run(8)  # opens as many connections to the engine as it keeps
    async with nothing_left(service):
        await run(3)
