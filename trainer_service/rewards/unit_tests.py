"""The share of hidden tests that the trajectory's program passes.

The program runs at the tool service, by its tool `unit_tests`, in a sandbox of its own in which no policy has acted;
the tests run in another process there, and what counts is the tests that were seen to pass. A program that exits,
hangs, patches or prints earns nothing by it. When judging itself fails (no sandbox, no service), it is tried again, and
in the end the trajectory fails: that is never a reward of 0.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from trainer_service.data.task import Task
from trainer_service.rewards.base import Attempt, Reward, Score
from turnwire.client import Connection, connect
from turnwire.errors import DeadlineError, ExhaustedError, InfraError, InternalError, NotFoundError, UnavailableError
from turnwire.security.config import ConnectionSecurity
from turnwire.v1 import common_pb2, tool_pb2

_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_MOST_CHARACTERS = 2**20
_PAUSE_SECONDS = 0.5
_RETRIED = (UnavailableError, ExhaustedError, DeadlineError, InternalError)


class UnitTestsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    all_or_nothing: 1 when every test passes, else 0; off: the share of tests that pass.
    file: the program is this file of the workspace, as `outputs/solution.py`, as it last came back from a tool. Empty:
        it is the final answer, of which the last fenced block if there is one.
    language: of the program; `bash` for cases of stdin and stdout.
    module: the name under which tests import the program.
    test_seconds: of each test. seconds: of all of them; with `attempts` it must fit into reward.timeout_seconds.
    attempts: how often judging is tried when it fails for no fault of the program's.
    """

    all_or_nothing: bool = False
    file: str = ""
    language: Literal["python", "bash"] = "python"
    module: str = "solution"
    test_seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 20.0
    attempts: Annotated[int, msgspec.Meta(ge=1)] = 4


class UnitTests(Reward):
    """The ground truth is tests; docs/rewards.md has its forms."""

    name = "unit_tests"
    options_type = UnitTestsOptions
    needs_tool = "unit_tests"

    def __init__(self, options: UnitTestsOptions) -> None:
        super().__init__(options)
        self._connection: Connection | None = None
        self._closed = threading.Event()

    def connect(self, tool_target: str, security: ConnectionSecurity) -> None:
        self._connection = connect(tools=tool_target, security=security)
        served = [tool.name for tool in self._connection.tools.list_tools()]
        if self.needs_tool not in served:
            raise NotFoundError(f"the tool service at {tool_target} has no tool {self.needs_tool!r}")

    def check_task(self, task: Task) -> None:
        tests_of(task.ground_truth)

    def score(self, task: Task, attempt: Attempt) -> float | Score:
        tests = tests_of(task.ground_truth)
        program = self._program(attempt)
        if program is None or len(program) > _MOST_CHARACTERS:
            return self._score(0, 1)
        observation = self._judge(program, tests)
        if observation.error == common_pb2.ERROR_KIND_INVALID_ACTION:
            raise ValueError(f"the ground truth: {observation.error_detail}")
        if observation.error:  # whatever it was, the program did it
            return self._score(0, 1)
        report: Any = observation.data
        return self._score(int(report["passed"]), int(report["total"]))

    def _score(self, passed: int, total: int) -> Score:
        share, whole = passed / total, float(passed == total)
        return Score(whole if self.options.all_or_nothing else share, {"passed": share, "all_passed": whole})

    def _program(self, attempt: Attempt) -> str | None:
        """What is judged; None where there is none."""
        if self.options.file:
            return last_version(attempt, self.options.file)
        if attempt.final_answer is None:
            return None
        blocks = _FENCE.findall(attempt.final_answer)
        return blocks[-1] if blocks else attempt.final_answer

    def _judge(self, program: str, tests: Mapping[str, str]) -> tool_pb2.Observation:
        """Run them. Raises InfraError when that fails again and again."""
        connection, options = self._connection, self.options
        if connection is None:
            raise InfraError("the reward unit_tests is not connected to a tool service")
        context = {
            **tests,
            "language": options.language,
            "module": options.module,
            "test_seconds": options.test_seconds,
        }
        reason = ""
        for attempt in range(options.attempts):
            if attempt and self._closed.wait(_PAUSE_SECONDS * 2**attempt):
                break
            try:
                answer = connection.tools.execute(
                    self.needs_tool, arguments={"code": program}, context=context, timeout=options.seconds
                )
            except _RETRIED as error:
                reason = error.message
                continue
            (observation,) = answer.observations
            if observation.error != common_pb2.ERROR_KIND_INFRA:
                return observation
            reason = observation.error_detail
        raise InfraError(f"the tests could not be run: {reason}")

    def close(self) -> None:
        self._closed.set()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def last_version(attempt: Attempt, path: str) -> str | None:
    """A text file of the workspace as a tool last showed it; None where none did."""
    found = None
    for outcome in attempt.outcomes():
        for file in outcome.data.get("files", ()):
            if file.get("path") == path:
                found = file.get("text")
    return found


def tests_of(ground_truth: Any) -> dict[str, str]:
    """What the tool takes: `tests`, Python source, and `cases`, JSON text. Raises ValueError for another ground truth.

    Its forms are those of common datasets: source; a list of asserts (MBPP) or of cases; and objects of `tests` and
    `cases`, of `test` and `entry_point` (HumanEval), or of `inputs`, `outputs` and `fn_name` (APPS).
    """
    value, cases = ground_truth, list[dict[str, Any]]()
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            value = ground_truth  # source that begins with a list or set
    match value:
        case str():
            tests, cases = value, []
        case [str(), *_]:
            tests, cases = "\n".join(map(str, value)), []
        case [dict(), *_]:
            tests, cases = "", value
        case {"test": str(test), "entry_point": str(name)}:
            tests, cases = f"{test}\n\ncheck({name})\n", []
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            tests, cases = "", [_case(value.get("fn_name"), *pair) for pair in zip(inputs, outputs, strict=True)]
        case dict():
            tests, cases = value.get("tests", ""), value.get("cases", [])
            tests = "\n".join(tests) if isinstance(tests, list) else tests
        case _:
            tests, cases = "", []
    if not isinstance(tests, str) or not isinstance(cases, list) or not (tests.strip() or cases):
        raise ValueError(f"the ground truth has no tests: {str(ground_truth)[:200]!r}")
    return {"tests": tests, "cases": json.dumps(cases) if cases else ""}


def _case(function: str | None, given: Any, right: Any) -> dict[str, Any]:
    if function:
        return {"call": function, "args": given, "returns": right}
    lines = ["\n".join(text) if isinstance(text, list) else text for text in (given, right)]
    return {"stdin": lines[0], "stdout": lines[1]}
