"""The conformance table on the `process` backend, with what must hold after every case."""

import asyncio
import os
from collections.abc import AsyncIterator

import psutil
import pytest
import sandbox_conformance as conformance
import sandbox_conformance_code
import sandbox_conformance_sql

from tool_service.sandbox import ProcessBackend, ProcessConfig, Sandbox, Tier, Turn, TurnStatus

CASES = (*sandbox_conformance_code.CASES, *sandbox_conformance_sql.CASES)
SECRET = "canary-secret-5f1d"
AT_ONCE = 4
"""Cases that run beside each other: statuses must not depend on load."""


@pytest.fixture(params=[pytest.param("isolated", marks=pytest.mark.needs("isolated-sandbox")), "restricted"])
async def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessBackend]:
    monkeypatch.setenv("TURNWIRE_CANARY", SECRET)
    interpreter = conformance.readable_interpreter() if request.param == "restricted" else ""
    made = ProcessBackend(ProcessConfig(tier=request.param, minimum_tier=request.param, interpreter=interpreter))
    await made.start()
    yield made
    await made.close()


async def _python(sandbox: Sandbox, code: str) -> tuple[TurnStatus, bytes]:
    result = await sandbox.run(Turn("python", {"code": code}, 5.0))
    return result.status, result.stdout


def _processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def _run(case: conformance.Case, backend: ProcessBackend, canary: Sandbox, canary_lock: asyncio.Lock) -> None:
    sandbox = await backend.create(conformance.LIMITS)
    results = await conformance.check(case, sandbox)
    assert all(result.status is not TurnStatus.INFRA for result in results), "a program's doing is not our failure"
    assert all(SECRET.encode() not in result.stdout + result.stderr for result in results)
    if sandbox.alive:
        status, _ = await _python(sandbox, "1 + 1")
        assert status in (TurnStatus.OK, TurnStatus.TOOL_ERROR, TurnStatus.SESSION_LOST, TurnStatus.SIGNALED)
        result = await sandbox.run(Turn("sql", {"query": "select 1"}, 5.0))
        assert result.status in (TurnStatus.OK, TurnStatus.SESSION_LOST, TurnStatus.TOOL_ERROR), (
            "another runtime works after it"
        )
    async with canary_lock:
        assert await _python(canary, "seen + 1") == (TurnStatus.OK, b"42\n"), "the sandbox beside it is unharmed"
    await sandbox.kill()


@pytest.mark.timeout(400)
async def test_every_case_has_its_outcome_and_leaves_nothing(backend: ProcessBackend) -> None:
    canary = await backend.create(conformance.LIMITS)
    await _python(canary, "seen = 41")
    await asyncio.sleep(0.1)
    before = _processes()
    lock = asyncio.Lock()
    descriptors = len(os.listdir("/proc/self/fd"))
    cases = [case for case in CASES if case.tier <= backend.tier]
    failures = []
    for start in range(0, len(cases), AT_ONCE):
        batch = cases[start : start + AT_ONCE]
        runs = (asyncio.wait_for(_run(case, backend, canary, lock), 30) for case in batch)
        for case, error in zip(batch, await asyncio.gather(*runs, return_exceptions=True), strict=True):
            if error is not None:
                failures.append(f"{case.id}: {type(error).__name__} {error}")
        if _processes() != before:
            failures.append(f"one of {[case.id for case in batch]} left processes")
            before = _processes()
    assert not failures, "\n\n".join(failures)
    for _ in range(100):  # large workspaces of the restricted tier are deleted in the background
        if len(os.listdir("/proc/self/fd")) <= descriptors:
            break
        await asyncio.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert backend.stats().running == 1


async def test_the_table_names_each_case_once() -> None:
    names = [case.id for case in CASES]
    assert len(names) == len(set(names))
    assert {case.tier for case in CASES} == {Tier.RESTRICTED, Tier.ISOLATED}
