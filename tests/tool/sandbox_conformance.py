"""How a sandbox backend is run through a case: a few turns and the right outcome of each.

The cases are tables in sandbox_conformance_code.py and sandbox_conformance_sql.py; their ids are rows of the hostile
inputs' list. test_sandbox_cases.py runs them on the `process` backend, with what must hold after each (next turn works,
a neighbour is unharmed, nothing is left).
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tool_service.sandbox.base import JSON, MIB, Sandbox, SandboxLimits, Tier, Turn, TurnResult, TurnStatus

OK, ERROR, TIMEOUT = TurnStatus.OK, TurnStatus.TOOL_ERROR, TurnStatus.TIMEOUT
MEMORY, FLOOD, SIGNALED, LOST = (
    TurnStatus.MEMORY,
    TurnStatus.OUTPUT_LIMIT,
    TurnStatus.SIGNALED,
    TurnStatus.SESSION_LOST,
)
LIMITS = SandboxLimits(
    memory_bytes=192 * MIB,
    processes=32,
    open_files=64,
    file_bytes=8 * MIB,
    workspace_bytes=16 * MIB,
    workspace_inodes=512,
    cpu_seconds=20,
    output_bytes=64 * 1024,
    flood_bytes=4 * MIB,
)


def readable_interpreter() -> str:
    """A Python for the restricted tier, whose sandboxes of another uid read it where it lies: the running one's base
    ("", the default) unless that is in a folder closed to others."""
    place = Path(sys.base_prefix).resolve()
    open_to_all = all(part.stat().st_mode & 0o001 for part in (place, *place.parents))
    return "" if open_to_all or os.geteuid() != 0 else "/usr/bin/python3"


@dataclass(frozen=True)
class Step:
    """One turn and what it must give. `shows` and `hides` are looked for in stdout, stderr and detail together."""

    turn: Turn
    statuses: tuple[TurnStatus, ...]
    shows: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    value: JSON = None
    signal: int | None = None
    restarted: bool | None = None


@dataclass(frozen=True)
class Case:
    id: str
    steps: tuple[Step, ...]
    tier: Tier = Tier.RESTRICTED
    """The least tier that promises it."""
    tags: tuple[str, ...] = field(default=())


def py(
    code: str,
    *statuses: TurnStatus,
    shows: str | tuple[str, ...] = (),
    hides: str | tuple[str, ...] = (),
    timeout: float = 5.0,
    signal: int | None = None,
    restarted: bool | None = None,
) -> Step:
    return Step(
        Turn("python", {"code": code}, timeout),
        statuses or (OK,),
        (shows,) if isinstance(shows, str) else shows,
        (hides,) if isinstance(hides, str) else hides,
        signal=signal,
        restarted=restarted,
    )


def sql(
    query: str, *statuses: TurnStatus, shows: str = "", value: JSON = None, timeout: float = 5.0, **options: JSON
) -> Step:
    payload: dict[str, JSON] = {"query": query, **options}
    return Step(Turn("sql", payload, timeout), statuses or (OK,), (shows,) if shows else (), value=value)


def script(text: str, *statuses: TurnStatus, shows: str = "") -> Step:
    return Step(Turn("sql", {"script": text}, 5.0), statuses or (OK,), (shows,) if shows else ())


def case(name: str, *steps: Step, tier: Tier = Tier.RESTRICTED) -> Case:
    return Case(name, steps, tier)


async def check(one: Case, sandbox: Sandbox) -> list[TurnResult]:
    """Run a case's turns on a fresh sandbox made under `LIMITS`; AssertionError where an outcome is not right."""
    results = []
    for number, step in enumerate(one.steps):
        result = await sandbox.run(step.turn)
        results.append(result)
        where = f"{one.id}, turn {number + 1}: {_short(result)}"
        assert result.status in step.statuses, where
        assert result.wall_seconds < step.turn.timeout + 2, where
        assert max(len(result.stdout), len(result.stderr)) <= step.turn.output_bytes, where
        text = (result.stdout + result.stderr).decode("utf-8", "replace") + result.detail
        for part in step.shows:
            assert part in text, f"{where}: {part!r} is missing"
        for part in step.hides:
            assert part not in text, f"{where}: {part!r} should not be there"
        if step.value is not None:
            assert result.value == step.value, where
        if step.signal is not None:
            assert result.signal == step.signal, where
        if step.restarted is not None:
            assert result.restarted == step.restarted, where
    return results


def _short(result: TurnResult) -> str:
    text = repr(result)
    return text if len(text) < 1500 else text[:700] + " ... " + text[-700:]
