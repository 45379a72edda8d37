"""Takes cases to a backend, alone and several at a time, and checks after each what must always hold."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from tool_service.sandbox.base import (
    GRACE_SECONDS,
    Sandbox,
    SandboxBackend,
    SandboxError,
    SandboxLimits,
    Turn,
    TurnResult,
    TurnStatus,
)
from tool_service.sandbox.facts import seen_from_inside
from tool_service.sandbox.hostile.bait import Bait
from tool_service.sandbox.hostile.case import (
    ERROR,
    FLOOD,
    LIMITS,
    LOST,
    MEMORY,
    OK,
    SIGNALED,
    TIMEOUT,
    Case,
    Run,
    Step,
    WrongOutcomeError,
)
from tool_service.sandbox.hostile.outside import outside_of
from tool_service.sandbox.pool import WarmPool

LATEST_SECONDS = GRACE_SECONDS + 0.5
"""How long after its deadline a turn may be answered."""
_SETTLE_SECONDS = 60.0
"""How long removals may take, of folders and containers on a machine that is busy."""
_LOOK_SECONDS = 0.02
_CASE_SECONDS = 90.0
_CANARY_PAUSE = 0.2
_TRIES = 3
_KILLED = (FLOOD, LOST, MEMORY, SIGNALED, TIMEOUT)
_CLEAN = Turn("python", {"code": "import os; print(6 * 7, os.getuid())"}, 10.0)
_OTHER_RUNTIME = Turn("sql", {"query": "select 1"}, 10.0)
_COUNT = Turn("python", {"code": "seen += 1; seen"}, 10.0)


class Outcome(msgspec.Struct, frozen=True):
    """How one case went."""

    case: str
    at_once: int
    """How many cases ran at a time."""
    kinds: tuple[str, ...]
    """The statuses of its turns."""
    seconds: float
    problems: tuple[str, ...]
    """What does not hold; none, and the backend survived it."""


class Report(msgspec.Struct, frozen=True):
    """What one examination found."""

    backend: str
    tier: str
    facts: dict[str, str]
    """What the backend found of the machine, and what a sandbox sees of its limits from inside."""
    outcomes: tuple[Outcome, ...]
    not_promised: tuple[str, ...]
    """Cases that this backend at this tier does not promise: they were not run."""
    problems: tuple[str, ...]
    """What does not hold of all cases together."""
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.problems and not any(outcome.problems for outcome in self.outcomes)


async def examine(
    make_backend: Callable[[], SandboxBackend],
    cases: Sequence[Case],
    passes: Sequence[int] = (1,),
    *,
    limits: SandboxLimits | None = None,
    latest: float = LATEST_SECONDS,
    on_outcome: Callable[[Outcome, int], None] = lambda outcome, total: None,
) -> Report:
    """Run the cases that a backend promises, once for each of `passes`, that many at a time.

    `limits`: the user's, for the facts alone; cases have their own. `latest`: seconds after its deadline in which a
    turn must be answered: on a machine that does other things beside this, nobody can promise the usual ones.
    `on_outcome` hears of each case as it ends, with how many there will be. Raises `SandboxUnavailable` when the
    backend does not start.
    """
    began = time.monotonic()
    bait = Bait()
    try:
        backend = make_backend()
        await backend.start()
        try:
            facts = backend.facts | await _seen(backend, limits or LIMITS)
            promised = [case for case in cases if case.tier <= backend.tier and backend.name in case.backends]
            total = len(promised) * len(passes)
            outcomes: list[Outcome] = []
            problems: list[str] = []
            for at_once in passes:
                suite = _Pass(backend, bait, at_once, latest, lambda outcome: on_outcome(outcome, total))
                outcomes += await suite.run(promised)
                problems += suite.problems
            running = backend.stats().running
            problems += [f"{running} sandboxes are still there"] * (running > 0)
        finally:
            await backend.close()
        problems += bait.harm()
    finally:
        bait.close()
    return Report(
        backend.name,
        backend.tier.name.lower(),
        {name: fact for name, fact in facts.items() if fact},
        tuple(_compared(outcomes, {case.id: case for case in promised})),
        tuple(case.id for case in cases if case not in promised),
        tuple(dict.fromkeys(problems)),
        time.monotonic() - began,
    )


async def _seen(backend: SandboxBackend, limits: SandboxLimits) -> dict[str, str]:
    sandbox = await backend.create(limits)
    try:
        return await seen_from_inside(sandbox)
    finally:
        await sandbox.kill()


def _compared(outcomes: Sequence[Outcome], cases: dict[str, Case]) -> list[Outcome]:
    """A case whose outcome is one alone and another under load has a problem, unless it says that it varies."""
    first: dict[str, Outcome] = {}
    result = []
    for outcome in outcomes:
        alone = first.setdefault(outcome.case, outcome)
        both = min(len(alone.kinds), len(outcome.kinds))  # one of them may have lost its sandbox on the way
        differs = alone.kinds[:both] != outcome.kinds[:both]
        if differs and not cases[outcome.case].varies and not outcome.problems:
            told = f"it was {' '.join(alone.kinds)} with {alone.at_once} at a time, and {' '.join(outcome.kinds)} now"
            outcome = msgspec.structs.replace(outcome, problems=(told,))  # noqa: PLW2901 - the same, with what was found
        result.append(outcome)
    return result


class _Pass:
    """One run through the cases, `at_once` at a time."""

    def __init__(
        self,
        backend: SandboxBackend,
        bait: Bait,
        at_once: int,
        latest: float,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self.problems: list[str] = []
        self._backend = backend
        self._bait = bait
        self._at_once = at_once
        self._latest = latest
        self._on_outcome = on_outcome
        self._outside = outside_of(backend)
        self._pool = WarmPool(
            backend, size=at_once, limits=LIMITS, max_total=3 * at_once + 2, wait_seconds=_CASE_SECONDS
        )
        self._before: dict[str, int] = {}

    async def run(self, cases: Sequence[Case]) -> list[Outcome]:
        await self._outside.start()
        canary = _Canary(await self._backend.create(LIMITS))
        try:
            await self._pool.start()
            await canary.ask()
            async with self._warm():
                gate = asyncio.Semaphore(self._at_once)
                async with canary.asked_all_the_while():
                    return await asyncio.gather(*(self._one(case, canary, gate) for case in cases))
        finally:
            await self._pool.close()
            await canary.sandbox.kill()
            self._outside.close()

    @contextlib.asynccontextmanager
    async def _warm(self) -> AsyncIterator[None]:
        """What happens inside leaves nothing behind. One sandbox is used before the first look: some things are made
        once and kept."""
        sandbox = await self._pool.take()
        await sandbox.run(_CLEAN)
        await self._pool.discard(sandbox)
        await self._settled()
        self._before = await self._outside.look()
        yield
        self.problems += await self._left()

    async def _settled(self) -> bool:
        """Whether the pool came back to its size."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            stats = self._pool.stats()
            if (stats.ready, stats.in_use, stats.creating) == (self._at_once, 0, 0):
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_SECONDS)

    async def _left(self) -> list[str]:
        """What is left behind, once what is being removed is gone."""
        if not await self._settled():
            return [f"the pool did not come back to {self._at_once} ready: {self._pool.stats()}"]
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            seen = await self._outside.look()
            more = self._outside.more(self._before, seen)
            if not more:
                return []
            if time.monotonic() > deadline:
                self._before = seen
                return more
            await asyncio.sleep(_LOOK_SECONDS)

    async def _one(self, case: Case, canary: _Canary, gate: asyncio.Semaphore) -> Outcome:
        async with gate:
            began = time.monotonic()
            kinds: list[str] = []
            problems = [*await self._problems(case, kinds), *await canary.ask()]
            if self._at_once == 1:
                problems += await self._left()
            problems += self._bait.harm()
            outcome = Outcome(case.id, self._at_once, tuple(kinds), time.monotonic() - began, tuple(problems))
        self._on_outcome(outcome)
        return outcome

    async def _problems(self, case: Case, kinds: list[str]) -> list[str]:
        """Of the case by itself: its outcome, and the trajectory afterwards."""
        problems: list[str] = []
        uid = 0
        try:
            async with asyncio.timeout(_CASE_SECONDS), self._taken() as sandbox:
                for step in case.steps:
                    began = time.monotonic()
                    result = await step.take(sandbox, self._bait.names)
                    problems += self._late(step, time.monotonic() - began)
                    if result is not None:
                        kinds.append(result.status)
                        problems += self._never(result)
                        if result.status in _KILLED and not await sandbox.ping():
                            break  # its processes took long to die, and the whole sandbox went with them
                uid = await self._clean(sandbox, case) if sandbox.alive else 0
                if not sandbox.alive:
                    await self._told_and_replaced(sandbox, case)
        except WrongOutcomeError as error:
            problems.append(str(error))
        except TimeoutError:
            problems.append(f"it took longer than {_CASE_SECONDS:g} s")
        except SandboxError as error:
            problems.append(f"{type(error).__name__}: {error}")
        if left := self._outside.processes_of(uid):
            problems.append(f"{len(left)} processes of its user are left")
        return problems

    @contextlib.asynccontextmanager
    async def _taken(self) -> AsyncIterator[Sandbox]:
        sandbox = await self._pool.take()
        try:
            yield sandbox
        finally:
            await self._pool.discard(sandbox)

    async def _told_and_replaced(self, dead: Sandbox, case: Case) -> None:
        """A trajectory whose sandbox is gone is told so, and works in another."""
        told = await dead.run(_CLEAN)
        if told.status is not LOST:
            raise WrongOutcomeError(f"a dead sandbox answers {told.status}, not {LOST}")
        async with self._taken() as another:
            await self._clean(another, case)

    def _late(self, step: Step, seconds: float) -> list[str]:
        if isinstance(step, Run) and seconds > step.turn.timeout + self._latest:
            return [f"the answer came after {seconds:.1f} s, with {step.turn.timeout:g} s to run"]
        return []

    def _never(self, result: TurnResult) -> list[str]:
        problems = []
        if result.status is TurnStatus.INFRA:
            problems.append(f"what a program did counts as our failure: {result.detail}")
        if self._bait.is_in(result):
            problems.append("a secret of the service shows in the output")
        return problems

    async def _clean(self, sandbox: Sandbox, case: Case) -> int:
        """The next clean calls of the trajectory; the user that it runs as, 0 where it is not known."""
        uid = 0
        for _ in range(_TRIES):
            result = await sandbox.run(_CLEAN)
            if result.status is OK and result.stdout.startswith(b"42 "):
                uid = int(result.stdout.split()[1])
                break
            if case.spoils and result.status in (OK, ERROR, SIGNALED):
                break
            if result.status is not LOST:
                raise WrongOutcomeError(f"the next call does not work: {result}")
            if not sandbox.alive:
                return 0
        else:
            raise WrongOutcomeError("the next calls all say that the session is lost")
        other = await sandbox.run(_OTHER_RUNTIME)
        if other.status not in (OK, ERROR, LOST):  # a full workspace, say, is the program's doing
            raise WrongOutcomeError(f"the next call of another runtime does not work: {other}")
        return uid


class _Canary:
    """A trajectory beside all others that counts, and must never be wrong."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._count = 0
        self._lock = asyncio.Lock()
        self._wrong: list[str] = []

    async def ask(self) -> list[str]:
        """What has been wrong since the last time, and is now."""
        async with self._lock:
            if self._count == 0:
                await self.sandbox.run(Turn("python", {"code": "seen = 0"}, 10.0))
            self._count += 1
            result = await self.sandbox.run(_COUNT)
            wrong, self._wrong = self._wrong, []
        if result.status is not OK or result.stdout.strip() != str(self._count).encode():
            wrong.append(f"the trajectory beside it is harmed: {result}")
        return wrong

    @contextlib.asynccontextmanager
    async def asked_all_the_while(self) -> AsyncIterator[None]:
        async def ask_for_ever() -> None:
            while True:
                wrong = await self.ask()
                self._wrong += wrong
                await asyncio.sleep(_CANARY_PAUSE)

        asking = asyncio.create_task(ask_for_ever())
        try:
            yield
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
