"""What a case is: a few steps in a fresh sandbox, and the right outcome of each."""

from __future__ import annotations

import abc
import asyncio
import re
from dataclasses import dataclass

import msgspec

from tool_service.sandbox.base import (
    JSON,
    MIB,
    FileRefused,
    Sandbox,
    SandboxLimits,
    Tier,
    Turn,
    TurnResult,
    TurnStatus,
)

OK, ERROR, TIMEOUT = TurnStatus.OK, TurnStatus.TOOL_ERROR, TurnStatus.TIMEOUT
MEMORY, FLOOD, SIGNALED, LOST = (
    TurnStatus.MEMORY,
    TurnStatus.OUTPUT_LIMIT,
    TurnStatus.SIGNALED,
    TurnStatus.SESSION_LOST,
)
PROCESS, DOCKER = "process", "docker"
LIMITS = SandboxLimits(
    memory_bytes=192 * MIB,
    processes=32,
    open_files=64,
    file_bytes=8 * MIB,
    workspace_bytes=16 * MIB,
    workspace_inodes=17_000,
    cpu_seconds=20,
    output_bytes=64 * 1024,
    flood_bytes=4 * MIB,
)
"""What cases are written for: small, so that reaching a limit is quick."""

_PATIENCE_SECONDS = 30.0
"""For turns whose outcome is not their deadline: on a machine that is busy they are slow, and right all the same."""
_SHOWN = 1500


class WrongOutcomeError(AssertionError):
    """An outcome that is not the right one. The message says what came."""


class Step(abc.ABC):
    """One thing that is done to a sandbox."""

    @abc.abstractmethod
    async def take(self, sandbox: Sandbox, names: dict[str, str]) -> TurnResult | None:
        """Do it; the turn's result where it is a turn. `names`: what `@NAME@` stands for in programs. Raises
        `WrongOutcomeError`."""


@dataclass(frozen=True)
class Run(Step):
    """One turn and what it must give. `shows` and `hides` are looked for in stdout, stderr and detail together."""

    turn: Turn
    statuses: tuple[TurnStatus, ...]
    shows: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    value: dict[str, JSON] | None = None
    """Of the result's value: these keys, with these values."""
    signal: int | None = None
    restarted: bool | None = None

    async def take(self, sandbox: Sandbox, names: dict[str, str]) -> TurnResult:
        payload = {key: _filled(value, names) for key, value in self.turn.payload.items()}
        turn = msgspec.structs.replace(self.turn, payload=payload)
        result = await sandbox.run(turn)
        self._judge(result)
        return result

    def _judge(self, result: TurnResult) -> None:
        said = _short(result)
        text = (result.stdout + result.stderr).decode("utf-8", "replace") + result.detail
        wrong = [
            *(f"{part!r} is missing" for part in self.shows if part not in text),
            *(f"{part!r} should not be there" for part in self.hides if part in text),
        ]
        if result.status not in self.statuses:
            wrong.append(f"{result.status} is not {' or '.join(self.statuses)}")
        if max(len(result.stdout), len(result.stderr)) > self.turn.output_bytes:
            wrong.append(f"more than the {self.turn.output_bytes} bytes of output that were asked for")
        if self.value and not _holds(result.value, self.value):
            wrong.append(f"the value is not {self.value}")
        if self.signal is not None and result.signal != self.signal:
            wrong.append(f"the signal is {result.signal}, not {self.signal}")
        if self.restarted is not None and result.restarted != self.restarted:
            wrong.append(f"restarted is {result.restarted}")
        if wrong:
            raise WrongOutcomeError(f"{'; '.join(wrong)}: {said}")


@dataclass(frozen=True)
class Put(Step):
    """A file that is put into the workspace, or `refused`."""

    path: str
    data: bytes = b"x"
    refused: bool = False

    async def take(self, sandbox: Sandbox, names: dict[str, str]) -> None:
        try:
            await sandbox.put_file(self.path, self.data)
        except FileRefused as error:
            if not self.refused:
                raise WrongOutcomeError(f"{self.path!r} was refused: {error}") from error
        else:
            if self.refused:
                raise WrongOutcomeError(f"{self.path!r} was not refused")


@dataclass(frozen=True)
class Fetch(Step):
    """A file that is fetched out of the workspace: refused, unless it `holds` something."""

    path: str
    holds: bytes | None = None
    or_refused: bool = False
    max_bytes: int = 4096
    bounded: bool = False
    """That it may be refused or not, and may hold whatever, but no more than `max_bytes`."""

    async def take(self, sandbox: Sandbox, names: dict[str, str]) -> None:
        try:
            data = await sandbox.get_file(self.path, self.max_bytes)
        except FileRefused as error:
            if self.holds is not None and not self.or_refused:
                raise WrongOutcomeError(f"{self.path!r} was refused: {error}") from error
            return
        if len(data) > self.max_bytes or (not self.bounded and data != self.holds):
            raise WrongOutcomeError(f"{self.path!r} gave {len(data)} bytes: {data[:80]!r}")


@dataclass(frozen=True)
class Cancel(Step):
    """A turn whose client goes away after `seconds`: the sandbox is dead with it."""

    turn: Turn
    seconds: float = 0.5

    async def take(self, sandbox: Sandbox, names: dict[str, str]) -> None:
        running = asyncio.ensure_future(sandbox.run(self.turn))
        done, _ = await asyncio.wait((running,), timeout=self.seconds)
        if done:
            raise WrongOutcomeError(f"it ended before it was cancelled: {_short(running.result())}")
        running.cancel()
        await asyncio.wait((running,))
        if sandbox.alive:
            raise WrongOutcomeError("the sandbox outlived the client of its turn")


@dataclass(frozen=True)
class Wait(Step):
    """Time in which nothing is asked of it, as while a model thinks."""

    seconds: float

    async def take(self, sandbox: Sandbox, names: dict[str, str]) -> None:
        await asyncio.sleep(self.seconds)


@dataclass(frozen=True)
class Case:
    """`id` begins with the row that it is for, as `A1-fork-bomb`; what has no row is ordinary use, which must work
    behind every wall."""

    id: str
    tries: str
    """What the program does, for people."""
    steps: tuple[Step, ...]
    tier: Tier = Tier.RESTRICTED
    """The least tier that promises it."""
    rows: tuple[str, ...] = ()
    backends: tuple[str, ...] = (PROCESS, DOCKER)
    spoils: bool = False
    """That the program breaks its own interpreter: the next turn there may fail, as an error of the program's."""

    @property
    def varies(self) -> bool:
        """Whether more than one outcome is right."""
        return any(isinstance(step, Run) and len(step.statuses) > 1 for step in self.steps)

    @property
    def group(self) -> str:
        """The letter of its rows; empty for ordinary use."""
        return self.rows[0][0] if self.rows else ""


def case(
    name: str,
    tries: str,
    *steps: Step,
    tier: Tier = Tier.RESTRICTED,
    also: tuple[str, ...] = (),
    backends: tuple[str, ...] = (PROCESS, DOCKER),
    spoils: bool = False,
) -> Case:
    """`also`: rows beside the one in the name."""
    row = re.match(r"[A-H]\d+(?=-)", name)
    rows = (row[0], *also) if row else also
    return Case(name, tries, steps, tier, rows, backends, spoils)


def py(
    code: str,
    *statuses: TurnStatus,
    shows: str | tuple[str, ...] = (),
    hides: str | tuple[str, ...] = (),
    timeout: float = 0.0,
    signal: int | None = None,
    restarted: bool | None = None,
) -> Run:
    """A turn of Python. `timeout`: 0 for what ends by itself."""
    return Run(
        Turn("python", {"code": code}, timeout or _PATIENCE_SECONDS),
        statuses or (OK,),
        (shows,) if isinstance(shows, str) else shows,
        (hides,) if isinstance(hides, str) else hides,
        signal=signal,
        restarted=restarted,
    )


def bash(
    text: str,
    *statuses: TurnStatus,
    shows: str | tuple[str, ...] = (),
    hides: str | tuple[str, ...] = (),
    timeout: float = 0.0,
) -> Run:
    """A turn of the shell."""
    return Run(
        Turn("bash", {"script": text}, timeout or _PATIENCE_SECONDS),
        statuses or (OK,),
        (shows,) if isinstance(shows, str) else shows,
        (hides,) if isinstance(hides, str) else hides,
    )


def sql(
    query: str,
    *statuses: TurnStatus,
    shows: str = "",
    value: dict[str, JSON] | None = None,
    timeout: float = 0.0,
    **options: JSON,
) -> Run:
    """One statement."""
    payload: dict[str, JSON] = {"query": query, **options}
    return Run(
        Turn("sql", payload, timeout or _PATIENCE_SECONDS), statuses or (OK,), (shows,) if shows else (), value=value
    )


def script(text: str, *statuses: TurnStatus, shows: str = "") -> Run:
    """Several statements, to set a database up."""
    return Run(Turn("sql", {"script": text}, _PATIENCE_SECONDS), statuses or (OK,), (shows,) if shows else ())


def tests(code: str, checks: str, passed: int, total: int) -> Run:
    """A candidate program against hidden tests: how many it passes."""
    turn = Turn("tests", {"code": code, "tests": checks}, _PATIENCE_SECONDS)
    return Run(turn, (OK,), value={"passed": passed, "total": total})


def _holds(value: JSON, expected: dict[str, JSON]) -> bool:
    return isinstance(value, dict) and all(value.get(key) == item for key, item in expected.items())


def _filled(value: JSON, names: dict[str, str]) -> JSON:
    if not isinstance(value, str):
        return value
    for name, meaning in names.items():
        value = value.replace(f"@{name}@", meaning)
    return value


def _short(result: TurnResult) -> str:
    text = repr(result)
    return text if len(text) < _SHOWN else text[: _SHOWN // 2] + " ... " + text[-_SHOWN // 2 :]
