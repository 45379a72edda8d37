"""The reward `unit_tests`, judged by a real tool service in real sandboxes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from run_files import lines
from services import all_services, finished, last_state, tool_service
from trainer_harness import REPOSITORY, attempt, run_config, run_values, task

from tool_service.config import ToolServiceConfig
from tool_service.server import ToolServer
from trainer_service.config import check
from trainer_service.judging import Judge, RewardError
from trainer_service.rewards.base import Score, ToolOutcome
from trainer_service.rewards.unit_tests import tests_of as forms_of
from turnwire.config import convert
from turnwire.errors import NotFoundError, UnavailableError

ADD = "def add(a, b):\n    return a + b\n"
TESTS = """
from solution import add

def test_numbers():
    assert add(1, 2) == 3

def test_negative():
    assert add(-1, -2) == -3

def test_lists():
    assert add([1], [2]) == [1, 2]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target() -> AsyncIterator[str]:
    async with tool_service() as address:
        yield address


async def score(target: str, ground_truth: Any, answer: str | None, *outcomes: ToolOutcome, **options: Any) -> Score:
    config = run_config(reward={"name": "unit_tests", "options": options}).reward
    judge = Judge(config)
    try:
        await judge.connect(target)
        return await judge.score(task(ground_truth), attempt(answer, *outcomes))
    finally:
        judge.close()


@pytest.mark.needs("isolated-sandbox")
@pytest.mark.asyncio(loop_scope="module")
class TestInASandbox:
    @pytest.mark.parametrize(
        ("answer", "share"),
        [
            (ADD, 1.0),
            (f"Here it is:\n```python\n{ADD}```\nDone.", 1.0),
            (f"```\ndef add(a, b): return 0\n```\nNo:\n```py\n{ADD}```", 1.0),
            ("def add(a, b):\n    return abs(a + b) if isinstance(a, int) else a + b", 2 / 3),
            ("def add(a, b):\n    return a - b", 0.0),
            ("import sys\nsys.exit(0)", 0.0),
            ("import os\nos.kill(os.getppid(), 9)\n", 0.0),
            ("I do not know.", 0.0),
            ("", 0.0),
            (None, 0.0),
            ("#" * 2**21, 0.0),
        ],
    )
    async def test_the_reward_is_the_share_of_tests_that_pass(
        self, target: str, answer: str | None, share: float
    ) -> None:
        result = await score(target, TESTS, answer)
        assert result == Score(share, {"passed": share, "all_passed": float(share == 1)})

    @pytest.mark.parametrize(("answer", "value"), [(ADD, 1), (ADD.replace("+ b", "+ b if a > 0 else 0"), 0)])
    async def test_it_can_be_all_or_nothing(self, target: str, answer: str, value: float) -> None:
        assert (await score(target, TESTS, answer, all_or_nothing=True)).value == value

    @pytest.mark.parametrize(
        "ground_truth",
        [
            TESTS,
            "assert add(1, 2) == 3",
            ["assert add(1, 2) == 3", "assert add(2, 2) == 4"],
            {"tests": "assert add(1, 2) == 3"},
            {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
            {"inputs": [[1, 2], [10**30, 1]], "outputs": [3, 10**30 + 1], "fn_name": "add"},
            [{"call": "add", "args": [1, 2], "returns": 3}],
            json.dumps({"cases": [{"call": "add", "args": [1, 2], "returns": 3}]}),
        ],
    )
    async def test_tests_come_as_datasets_have_them(self, target: str, ground_truth: Any) -> None:
        assert (await score(target, ground_truth, ADD)).value == 1
        assert (await score(target, ground_truth, ADD.replace("+", "*"))).value < 1

    async def test_the_example_tasks_can_be_solved_and_not_by_nothing(self, target: str) -> None:
        for row in lines(REPOSITORY / "examples" / "data" / "programs.jsonl"):
            truth = row["reward_model"]["ground_truth"]
            assert (await score(target, truth, row["extra_info"]["solution"])).value == 1, row["prompt"]
            assert (await score(target, truth, "pass")).value == 0, row["prompt"]

    async def test_whole_programs_are_judged_by_what_they_print(self, target: str) -> None:
        truth = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
        assert (await score(target, truth, "print(sum(map(int, input().split())))")).value == 1
        assert (await score(target, truth, 'read a b; echo "$((a + b))"', language="bash")).value == 1
        assert (await score(target, truth, "print(3)")).value == 0.5

    async def test_a_file_that_came_back_from_a_tool_can_be_what_is_judged(self, target: str) -> None:
        path = "outputs/solution.py"
        versions = [ToolOutcome("bash", "", {"files": [{"path": path, "text": text}]}) for text in ("1/0", ADD)]
        assert (await score(target, TESTS, "see the file", *versions, file=path)).value == 1
        assert (await score(target, TESTS, ADD, ToolOutcome("bash"), file=path)).value == 0

    async def test_tests_that_cannot_run_fail_the_trajectory_and_are_no_zero(self, target: str) -> None:
        with pytest.raises(RewardError, match="SyntaxError"):
            await score(target, "def test(:", ADD)
        with pytest.raises(RewardError, match="there are 0; 1 to"):
            await score(target, "x = 1", ADD)

    async def test_a_service_that_is_lost_is_tried_again_and_is_never_a_zero(self) -> None:
        judge = Judge(run_config(reward={"name": "unit_tests", "options": {"attempts": 2}}).reward)
        async with tool_service() as address:
            await judge.connect(address)
            port = int(address.rpartition(":")[2])
        judging = asyncio.create_task(judge.score(task(TESTS), attempt(ADD)))
        with pytest.raises(RewardError, match="InfraError: the tests could not be run"):
            await judging
        async with tool_service(port):
            assert (await judge.score(task(TESTS), attempt(ADD))).value == 1
        judge.close()

    async def test_a_service_without_the_tool_is_refused_before_the_run(self) -> None:
        plugins = {"exclude": ["bash", "python", "sql", "unit_tests"], "entry_points": False}
        async with ToolServer(convert({"plugins": plugins}, ToolServiceConfig)) as address:
            with pytest.raises(NotFoundError, match="has no tool 'unit_tests'"):
                await score(address, TESTS, ADD)

    async def test_a_run_is_judged_by_the_tool_service(self, model_path: Path, tmp_path: Path) -> None:
        data = tmp_path / "programs.jsonl"
        cases = [{"stdin": "", "stdout": ""}, {"stdin": "", "stdout": "not what a random policy writes"}]
        prompt = [{"role": "user", "content": "Write a program."}]
        row = {"prompt": prompt, "data_source": "programs", "reward_model": {"ground_truth": cases}}
        data.write_text("".join(json.dumps({**row, "id": number}) + "\n" for number in range(4)))
        values = run_values(model_path, reward={"name": "unit_tests"})
        values["data"] = {"train": [{"kind": "jsonl", "path": str(data)}]}
        values["rollout"] |= {"final_answer": None, "limits": {"max_action_tokens": 120, "max_trajectory_tokens": 200}}
        values["training"] = {"steps": 1, "prompts_per_step": 3, "threads": 1}
        async with all_services(model_path, tmp_path / "runs") as (client, _):
            events = await finished(client, "tested", values)
        assert last_state(events) == ("FINISHED", "")
        records = list(lines(tmp_path / "runs" / "tested" / "trajectories" / "train.jsonl"))
        answered = [record for record in records if record["final_answer"] is not None]
        assert answered
        assert {record["reward"] for record in answered} == {0.5}
        assert answered[0]["reward_parts"] == {"passed": 0.5, "all_passed": 0.0}


@pytest.mark.parametrize("truth", ["", "  ", [], {}, {"tests": ""}, 7, None, {"inputs": ["a"], "outputs": []}])
def test_a_ground_truth_without_tests_is_found_before_the_run(truth: Any) -> None:
    with pytest.raises(ValueError, match="has no tests"):
        forms_of(truth)


def test_a_tool_that_is_not_served_is_found_before_the_run(model_path: Path) -> None:
    config = run_config(model_path, reward={"name": "unit_tests"})
    said = [str(problem) for problem in check(config, served_tools=["python", "sql", "search"])]
    assert any("the reward 'unit_tests' calls the tool 'unit_tests', which is not served" in line for line in said)
    said = [str(problem) for problem in check(config, served_tools=["python", "sql", "search", "unit_tests"])]
    assert not any("which is not served" in line for line in said)


async def test_a_tool_service_that_is_not_there_is_named() -> None:
    with pytest.raises(UnavailableError, match=r"no tool service answers at 127\.0\.0\.1:1"):
        await score("127.0.0.1:1", TESTS, ADD)
