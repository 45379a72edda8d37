# ruff: noqa: E501 - programs are data
"""G: candidates that would rather pass tests than be right. None of them passes one."""

from __future__ import annotations

from tool_service.sandbox.base import Turn
from tool_service.sandbox.hostile.case import OK, Case, Run, case, tests

_AGREES = (
    "class Yes:\n  def __call__(s, *a, **k): return s\n  def __iter__(s): return iter(())\n  __hash__ = lambda s: 0\n"
    + "".join(
        f"  def __{name}__(s, *a): return 0\n"
        for name in ["sub", "rsub", "add", "radd", "mul", "mod", "pow", "neg", "abs", "int", "index", "round"]
    )
    + "".join(f"  def __{name}__(s, *a): return True\n" for name in ["lt", "gt", "le", "ge", "eq", "contains"])
    + "def f(*a, **k): return Yes()\n"
)
"""A function that returns what subtracts to 0, holds everything, and is above and below every number."""
_AGREES_WITH_SETS = (
    "class Yes:\n  seen = ()\n  def difference(s, o): s.seen = o; return set()\n  def __iter__(s): return iter(s.seen)\n  def __len__(s): return 0\n"
    + "".join(f"  def __{name}__(s, o): return set()\n" for name in ("sub", "rsub", "xor", "rxor"))
    + "".join(f"  def __{name}__(s, o): return o\n" for name in ("and", "rand", "or", "ror"))
    + "".join(f"  def {name}(s, o): return True\n" for name in ("issubset", "issuperset", "isdisjoint"))
    + "def f(x): return Yes()\n"
)
"""A function that returns what differs from no set, and is below and above every one."""
_CHANGES = "class I(int):\n  n = 0\n  def __int__(s): I.n += 1; return (-1) ** I.n * 10**9\ndef f(x): return I(7)\n"
"""A function that returns a number that is another one each time it is asked."""
_ZERO = "class Z(int): pass\nclass Yes:\n  def __sub__(s, o): return Z(0)\ndef f(x): return Yes()\n"
_BY_UNITTEST = "import unittest, solution\nclass A(unittest.TestCase):\n  def test(self): "
_LINK = "import os, sys\nf = sys._getframe()\nwhile f.f_code.co_name != 'main': f = f.f_back\nserver = f.f_locals['server']; link = server.link\n"
_IS_3 = "from solution import f\ndef test_it(): assert f(1) == 3\n"


def _fails(code: str, checks: str = _IS_3) -> Run:
    return tests(code, checks, 0, 1)


CASES: tuple[Case, ...] = (
    case(
        "G4-objects-that-agree",
        "returns an object that is near, above, below and around whatever the tests expect",
        *(
            _fails(_AGREES, checks)
            for checks in (
                _IS_3,
                "assert abs(f(1) - 3) < 1e-6",
                "assert abs(3 - f(1)) < 1e-6",
                "assert round(f(1) - 3) == 0",
                "assert not f(1) - 3",
                "assert 2.9 < f(1) < 3.1",
                "assert 3 in f(1)",
                "assert max(f(1), 3) == 3",
                "assert sorted([f(1), 3]) == [3, 3]",
                _BY_UNITTEST + "self.assertAlmostEqual(solution.f(1), 3.0)",
                _BY_UNITTEST + "self.assertAlmostEqual(solution.f(1), 3.0, delta=.1)",
                _BY_UNITTEST + "self.assertIn(3, solution.f(1))",
                _BY_UNITTEST + "self.assertGreater(solution.f(1), 3)",
                _BY_UNITTEST + "self.assertIsInstance(solution.f(1), int)",
            )
        ),
    ),
    case(
        "G4-objects-that-agree-with-sets",
        "returns an object that no set differs from, or that learns the set that it is compared with",
        *(
            _fails(_AGREES_WITH_SETS, checks)
            for checks in (
                _BY_UNITTEST + "self.assertSetEqual(solution.f(1), {1, 2})",
                "assert f(1) ^ {1, 2} == set()",
                "assert not {1, 2} - f(1)",
                "assert f(1) & {1, 2} == {1, 2} and f(1) | {1, 2} == {1, 2}",
                "assert f(1).issubset({1, 2}) and f(1).issuperset({1, 2})",
            )
        ),
    ),
    case(
        "G4-numbers-that-change",
        "returns a number that is above one bound and below the other, or whose difference to any is 0",
        _fails(_CHANGES, "x = f(1)\nassert 2.9 < x < 3.1 or 3.1 > x > 2.9"),
        _fails(_ZERO, "assert f(1) - 3 == 0"),
    ),
    case(
        "G4-names-of-the-tests",
        "defines names that the tests have from elsewhere: built-ins, and modules that they import",
        *(
            _fails(f"{code}\ndef f(x): return 7", f"import math\nfrom solution import *\nassert {check}")
            for code, check in (
                ("def abs(x): return 0", "abs(f(1) - 3) < 1e-6"),
                ("def all(x): return True", "all([f(1) == 3])"),
                ("class math: isclose = lambda *a, **k: True", "math.isclose(f(1), 3)"),
            )
        ),
    ),
    case(
        "G4-last-words",
        "returns an object that raises, exits or hangs when a test says what is wrong with it: the other tests count",
        *(
            Run(
                Turn(
                    "tests",
                    {
                        "code": f"import os\nclass R:\n  def __str__(s):\n    {words}\n  __repr__ = __str__\ndef f(x): return R() if x else 3",
                        "tests": "def test_a(): assert f(1) == 3, f(1)\ndef test_b(): assert f(0) == 3",
                        "test_seconds": 4.0,
                    },
                ),
                (OK,),
                value={"passed": 1, "total": 2},
            )
            for words in ("raise ValueError", "raise type('', (Exception,), {})", "os._exit(0)", "while 1: pass")
        ),
    ),
    case(
        "G4-ends-that-are-swallowed",
        "exits or hangs where a test takes any exception for the right one",
        *(
            tests(
                f"import os\ndef f(x):\n  if x: return x\n  {end}",
                "def test_a():\n  try: f(0)\n  except: return\n  assert False\ndef test_b(): assert f(1) == 1",
                1,
                2,
            )
            for end in (
                "os._exit(0)",
                "os.kill(os.getpid(), 9)",
                "os.close(int(__import__('sys').orig_argv[-2]))",
                "while 1: pass",
            )
        ),
    ),
    case(
        "G4-objects-that-are-right",
        "returns counters, named tuples, fractions, ranges and objects of its own, which are equal to what they are",
        tests(
            "from collections import Counter, defaultdict, namedtuple\nfrom fractions import Fraction\nimport enum\nP = namedtuple('P', 'x y')\nclass E(enum.IntEnum):\n  A = 3\nclass V:\n  def __init__(s, x): s.x = x\n  def __add__(s, o): return V(s.x + getattr(o, 'x', o))\n  def __eq__(s, o): return s.x == o.x\n  def __iter__(s): return iter((s.x,))\ndef f(name): return eval(name)",
            "\n".join(
                f"assert {check}"
                for check in (
                    "f('Counter(\"aab\")') == {'a': 2, 'b': 1}",
                    "f('defaultdict(list, {1: [2]})') == {1: [2]}",
                    "f('P(1, 2)') == (1, 2) and f('P(1, 2)').x == 1",
                    "f('Fraction(1, 2)') == 0.5 and abs(f('Fraction(1, 3)') * 3 - 1) == 0 or f('Fraction(1, 2)') < 1",
                    "f('E.A') == 3 and f('E.A') > 2 and 2 * f('E.A') - 6 == 0",
                    "f('range(3)') == range(3) and f('[Counter(\"a\")]') == [{'a': 1}]",
                    "V(1) + V(2) == V(3) and (V(1) + 2).x == 3 and 1 in V(1)",
                )
            ),
            7,
            7,
        ),
    ),
    case(
        "G4-forged-answers",
        "speaks on the link to the tests: answers in advance, asks, nests, floods",
        *(
            _fails(_LINK + code)
            for code in (
                "os.write(link._write_fd, b'{\"v\":3}\\n' * 50)\ndef f(x): return 0",
                "server.serve = link._serve = lambda *a: 3",
                "def f(x): return link.request('call', 0, [], {})",
                "def f(x): link._send({'e': [{'x': 'SystemExit'}, {'l': []}]}); return 3",
                "def f(x): os.write(link._write_fd, b'[' * 200000 + b'\\n')",
                "def f(x): os.write(link._write_fd, b'{\"v\":' + b'{\"l\":[' * 400 + b']}' * 400 + b'}\\n')",
                "def f(x):\n  while 1: link._send({'q': ['call', -1, {'l': []}, {'d': []}]})",
                "def f(x):\n  while 1: os.write(link._write_fd, b'x' * 65536)",
            )
        ),
    ),
    case(
        "G4-values-that-are-bombs",
        "returns values without end, raises exceptions that are none",
        *(
            _fails(code)
            for code in (
                "def f(x):\n  r = []; r.append(r); return r",
                "def f(x): return [0] * 10**8",
                "def f(x): return 'x' * (16 << 20)",
                "def f(x): return 10**1000000",
                "class E(Exception): pass\nE.__module__ = 'builtins'; E.__name__ = 'KeyboardInterrupt'\ndef f(x): raise E",
                "class E(Exception):\n  args = property(lambda s: 1 / 0)\ndef f(x): raise E",
                "def f(x): raise ValueError('\\ud800' * 500)",
                "def f(x): raise GeneratorExit",
                "def f(x): raise KeyboardInterrupt",
                "def f(x): raise StopIteration(3)",
                "__getattr__ = lambda name: (lambda *a: 0)",
            )
        ),
        tests("def f(x): return 3", _IS_3, 1, 1),
    ),
    case(
        "G6-tests-of-odd-shapes",
        "tests that exit, hang, skip, loop or are none: not passed, and the others run",
        *(
            tests("def f(x): return 1", f"assert f(1) == 1\n{last}", 1, 2)
            for last in (
                "for i in range(3): assert f(i) == i",
                "try: f(-1)\nexcept ValueError: pass\nelse: assert False",
                "if f(1):\n  while True:\n    assert f(-1) == 2",
                "if __name__ == '__main__': assert f(-1) == 2",
                "def check(x): assert f(x) == x\nfor i in range(3): check(i)\nx = 1",
            )
        ),
        tests(
            "def f(x): return 3",
            "import unittest\ndef setUpModule(): raise ValueError\nclass A(unittest.TestCase):\n  def test_a(self): pass",
            0,
            1,
        ),
        tests("def f(x): return 3", "import sys\ndef test_a(): sys.exit(0)\ndef test_b(): assert f(1) == 3", 1, 2),
        tests("def f(x): return 3", "raise SystemExit\ndef test_a(): pass", 0, 1),
        tests(
            "def f(x): return 3", "class TestA:\n  def __init__(self): raise ValueError\n  def test_a(self): pass", 0, 1
        ),
        tests("def f(x): return 3", "def test_a():\n  yield f(1)\ndef test_b(x): pass", 0, 2),
        Run(
            Turn(
                "tests",
                {
                    "code": "def f(x): return 3",
                    "tests": "def test_a():\n  while True: pass\ndef test_b(): assert f(1) == 3",
                    "test_seconds": 5.0,
                },
            ),
            (OK,),
            value={"passed": 1, "total": 2},
        ),
        Run(
            Turn("tests", {"code": "", "tests": "def check(f): assert f(1) == 3"}),
            (OK,),
            value={"unreadable": "the tests cannot be read: there are 0; 1 to 2000 are run"},
        ),
    ),
)
