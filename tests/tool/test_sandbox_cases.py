"""The hostile suite on the process backend, on both of its tiers."""

from __future__ import annotations

import asyncio
import dataclasses
import os

import pytest
from interpreters import readable_interpreter
from waiting import PATIENCE

from tool_service.sandbox import ProcessBackend, ProcessConfig, Sandbox, Tier, Turn, TurnResult, TurnStatus
from tool_service.sandbox.hostile import CASES, ELSEWHERE, GROUPS, ROWS, Report, chosen, examine
from tool_service.sandbox.hostile.case import DOCKER, PROCESS, SIGNALED, Cancel, Case, Step, case, py

TIERS = [pytest.param("isolated", marks=pytest.mark.needs("isolated-sandbox")), "restricted"]


def backend_of(tier: str) -> ProcessBackend:
    interpreter = readable_interpreter() if tier == "restricted" else ""
    return ProcessBackend(ProcessConfig(tier=tier, minimum_tier=tier, interpreter=interpreter))


def failures(report: Report) -> list[str]:
    """One a line, for people."""
    told = [f"{one.case} ({one.at_once} at once): {problem}" for one in report.outcomes for problem in one.problems]
    return [*told, *report.problems]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tier", TIERS)
async def test_every_case_has_its_outcome_and_leaves_nothing(tier: str, passes: tuple[int, ...]) -> None:
    if tier == "isolated":  # what users run: alone and under load, always, as containers
        passes = (1, 8)
    report = await examine(lambda: backend_of(tier), CASES, passes, latest=PATIENCE)
    assert not failures(report), "\n\n".join(failures(report))
    assert report.tier == tier
    assert len(report.outcomes) == len(passes) * (len(CASES) - len(report.not_promised))
    assert set(report.not_promised) == {
        one.id for one in CASES if one.tier > Tier[tier.upper()] or PROCESS not in one.backends
    }


def test_every_row_has_a_case_or_a_reason_why_not() -> None:
    tried = {row for one in CASES for row in one.rows}
    assert tried | set(ELSEWHERE) == set(ROWS)
    assert not tried & set(ELSEWHERE)
    assert {row[0] for row in ROWS} | {""} == set(GROUPS)


def test_the_table_names_each_case_once_and_says_what_it_tries() -> None:
    names = [one.id for one in CASES]
    assert len(names) == len(set(names))
    assert {one.tier for one in CASES} == {Tier.RESTRICTED, Tier.ISOLATED}
    assert {backend for one in CASES for backend in one.backends} == {PROCESS, DOCKER}
    assert all(one.tries and one.steps for one in CASES)


def test_cases_are_chosen_by_row_by_name_and_by_pattern() -> None:
    assert {one.id for one in chosen(["B9", "F*", "A6-one-big"])} >= {"B9-stop", "F4-dns", "A6-one-big"}
    assert "A6-slow-growth" not in {one.id for one in chosen(["A6-one-big"])}
    assert chosen([]) == list(CASES)
    with pytest.raises(ValueError, match="'Z9' chooses no case; rows are A1 to H22"):
        chosen(["A1", "Z9"])


SLEEPS = Turn("python", {"code": "import time; time.sleep(60)"})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (case("A1-x", "", py("1", shows="2")), "'2' is missing"),
        (case("A1-x", "", py("print(41)", hides="41")), "'41' should not be there"),
        (case("A1-x", "", py("1 / 0")), "TOOL_ERROR is not OK"),
        (case("A1-x", "", py("import os; os.kill(os.getpid(), 9)", SIGNALED, signal=11)), "the signal is 9, not 11"),
        (case("A1-x", "", py("import os; os.getuid = None")), "the next call does not work"),
        (case("A1-x", "", Cancel(Turn("python", {"code": "1"}), 20.0)), "it ended before it was cancelled"),
    ],
)
@pytest.mark.needs("isolated-sandbox")
async def test_an_outcome_that_is_not_right_is_told(wrong: Case, says: str) -> None:
    report = await examine(lambda: backend_of("isolated"), [wrong])
    assert not report.holds
    assert says in "\n".join(failures(report))


@pytest.mark.needs("isolated-sandbox")
async def test_an_answer_that_comes_too_late_is_told() -> None:
    report = await examine(lambda: backend_of("isolated"), [case("A1-x", "", py("1", timeout=20.0))], latest=-20.0)
    assert "with 20 s to run" in "\n".join(failures(report))


@pytest.mark.needs("isolated-sandbox")
async def test_what_harms_others_or_the_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no sandbox lets happen is done here by the test itself, while a case runs."""
    left = []

    class Harmful(Cancel):
        async def take(self, sandbox: Sandbox, names: dict[str, str]) -> None:
            await super().take(sandbox, names)
            os.chmod(names["FILE"], 0o644)
            left.append(await asyncio.create_subprocess_exec("sleep", "60"))
            _, writer = await asyncio.open_connection("127.0.0.1", int(names["PORT"]))
            writer.close()

    monkeypatch.setattr("tool_service.sandbox.hostile.runner._SETTLE_SECONDS", 0.5)
    one = dataclasses.replace(case("A1-x", "harm"), steps=(Harmful(SLEEPS),))
    report = await examine(lambda: backend_of("isolated"), [one])
    left[0].kill()
    await left[0].wait()
    told = "\n".join(failures(report))
    for part in ("left behind: 1 processes", "secret of the host was changed", "a socket of the service was reached"):
        assert part in told


class Given(Step):
    """A step whose outcomes are given, one a pass."""

    def __init__(self, *results: TurnResult) -> None:
        self.results = list(results)

    async def take(self, sandbox: Sandbox, names: dict[str, str]) -> TurnResult:
        return self.results.pop(0)


async def told_of(*results: TurnResult, passes: tuple[int, ...] = (1,)) -> str:
    one = dataclasses.replace(case("A1-x", "given"), steps=(Given(*results),))
    return "\n".join(failures(await examine(lambda: backend_of("isolated"), [one], passes)))


@pytest.mark.needs("isolated-sandbox")
async def test_failures_of_ours_and_outcomes_that_differ_under_load_are_told() -> None:
    ok, late = TurnResult(TurnStatus.OK), TurnResult(TurnStatus.TIMEOUT)
    assert "counts as our failure: the engine died" in await told_of(
        TurnResult(TurnStatus.INFRA, detail="the engine died")
    )
    assert await told_of(ok, ok, passes=(1, 2)) == ""
    assert "it was OK with 1 at a time, and TIMEOUT now" in await told_of(ok, late, passes=(1, 2))


class Dies(Step):
    """A turn that is killed, and takes its sandbox along."""

    async def take(self, sandbox: Sandbox, names: dict[str, str]) -> TurnResult:
        await sandbox.kill()
        return TurnResult(TurnStatus.TIMEOUT)


@pytest.mark.needs("isolated-sandbox")
async def test_a_case_ends_with_its_sandbox_and_the_trajectory_goes_on_in_another() -> None:
    one = dataclasses.replace(case("A1-x", "dies"), steps=(Dies(), py("1", shows="1")))
    report = await examine(lambda: backend_of("isolated"), [one])
    assert not failures(report)
    assert [outcome.kinds for outcome in report.outcomes] == [(TurnStatus.TIMEOUT,)]


class Leak(Step):
    """The service's secret in a turn's result."""

    def __init__(self, in_value: bool) -> None:
        self.in_value = in_value

    async def take(self, sandbox: Sandbox, names: dict[str, str]) -> TurnResult:
        secret = os.environ["TURNWIRE_CANARY"]
        return (
            TurnResult(TurnStatus.OK, value=[secret]) if self.in_value else TurnResult(TurnStatus.OK, secret.encode())
        )


@pytest.mark.needs("isolated-sandbox")
@pytest.mark.parametrize("in_value", [True, False])
async def test_a_secret_that_shows_is_told(in_value: bool) -> None:
    one = dataclasses.replace(case("A1-x", "leak"), steps=(Leak(in_value),))
    assert "a secret of the service shows" in "\n".join(failures(await examine(lambda: backend_of("isolated"), [one])))


@pytest.mark.needs("isolated-sandbox")
async def test_a_neighbour_that_gives_wrong_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tool_service.sandbox.hostile.runner._COUNT", Turn("python", {"code": "seen += 2; seen"}))
    assert "the trajectory beside it is harmed" in await told_of(TurnResult(TurnStatus.OK))
