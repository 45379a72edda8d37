"""The `unit_tests` tool: runs a program against the task's tests, which it cannot see, in the trajectory's sandbox.

The reward of the same name calls it once a trajectory, in a sandbox that the policy never touched. Bound to a
trajectory it lets the policy run a task's *public* tests: hidden ones have no place in a sandbox in which it acts.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec

from tool_service.base import BaseTool, ToolAction, ToolConfig, ToolObservation, TurnContext
from tool_service.sandbox.base import TurnResult, TurnStatus
from tool_service.tools.outcome import failure_of, value_of
from turnwire.errors import InvalidRequestError

_FAILURES_SHOWN = 10


class UnitTestsTool(BaseTool):
    """Observations are `3 of 5 tests passed`, then the first that did not, a line each."""

    name = "unit_tests"
    description = "Runs a program against the task's tests. Answers with how many passed, and why others did not."
    needs_sandbox = True

    class Config(ToolConfig, frozen=True):
        """
        cpu_seconds: CPU time of one run, all its processes together; unset: `sandbox.limits.cpu_seconds`.
        max_tests_bytes: of tests and cases together.
        """

        cpu_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
        max_tests_bytes: Annotated[int, msgspec.Meta(ge=1)] = 2**20

    class Context(msgspec.Struct, forbid_unknown_fields=True):
        tests: Annotated[
            str,
            msgspec.Meta(
                description="Python: `test_*` functions and unittest classes, or else bare asserts. They import the "
                "program as `module`, or use its names."
            ),
        ] = ""
        cases: Annotated[
            str,
            msgspec.Meta(
                description='A JSON list, as text so that large integers survive, of {"call", "args", "kwargs", '
                '"returns"} and {"stdin", "stdout"}.'
            ),
        ] = ""
        module: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_]\w{0,63}$")] = "solution"
        language: Annotated[
            Literal["python", "bash"], msgspec.Meta(description="`bash`: for cases of stdin and stdout only.")
        ] = "python"
        test_seconds: Annotated[float, msgspec.Meta(gt=0, le=600, description="Of each test.")] = 5.0

    class Arguments(msgspec.Struct):
        code: Annotated[str, msgspec.Meta(description="The whole program.")]

    config: Config

    @classmethod
    def check_context(cls, config: Config, context: Context) -> None:
        cls._payload(config, context)

    async def reset(self, context: Context) -> None:
        self._tests = self._payload(self.config, context)

    @staticmethod
    def _payload(config: Config, context: Context) -> dict[str, Any]:
        """What the sandbox's `tests` runtime takes, besides the program."""
        size = len(context.tests) + len(context.cases)
        if size > config.max_tests_bytes:
            raise _refused(f"tests of {size} characters; at most {config.max_tests_bytes} are taken")
        if not context.tests.strip() and not context.cases.strip():
            raise _refused("there are neither tests nor cases")
        if context.tests and context.language != "python":
            raise _refused("tests in Python are of programs in Python; other programs have cases of stdin and stdout")
        try:
            cases = json.loads(context.cases) if context.cases else []
        except (ValueError, RecursionError) as error:
            raise _refused(f"cases are not JSON: {error}") from error
        if not isinstance(cases, list) or not all(map(_is_case, cases)):
            raise _refused('cases are a list of {"call", "args", "kwargs", "returns"} and {"stdin", "stdout"}')
        if context.language != "python" and any("call" in case for case in cases):
            raise _refused(f"a {context.language} program has no functions to call")
        return {
            "tests": context.tests,
            "cases": cases,
            "module": context.module,
            "language": context.language,
            "test_seconds": context.test_seconds,
        }

    async def execute(self, action: ToolAction[Arguments], turn: TurnContext) -> ToolObservation:
        result = await turn.run("tests", {**self._tests, "code": action.arguments.code}, self.config.cpu_seconds)
        return observation_of(result)


def observation_of(result: TurnResult) -> ToolObservation:
    """A run's outcome. Without a report nothing has passed, whatever the reason."""
    report = value_of(result)
    if result.status is not TurnStatus.OK or not report:
        return failure_of(result)
    if why := report.get("unreadable"):
        return ToolObservation.failed(f"error: {why}", "INVALID_ACTION", str(why))
    failed = [test for test in report["tests"] if not test["passed"]]
    lines = [f"{report['passed']} of {report['total']} tests passed"]
    lines += [f"{test['name']}: {test['detail']}" for test in failed[:_FAILURES_SHOWN]]
    if len(failed) > _FAILURES_SHOWN:
        lines.append(f"({len(failed) - _FAILURES_SHOWN} more did not pass)")
    return ToolObservation("\n".join(lines), data=report)


def _is_case(case: Any) -> bool:
    if not isinstance(case, dict):
        return False
    if "call" in case:
        whole = isinstance(case["call"], str) and "returns" in case and case.keys() <= _CALL
        return whole and isinstance(case.get("args", []), list) and isinstance(case.get("kwargs", {}), dict)
    return case.keys() == {"stdin", "stdout"} and all(isinstance(text, str) for text in case.values())


_CALL = {"call", "args", "kwargs", "returns"}


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"context of tool 'unit_tests': {reason}")
