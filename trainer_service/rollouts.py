"""Trajectories from the rollout service: one call asks for one, and gets it or the reason why there is none.

Invariants:

- One permit is one trajectory in flight; a call to `sample` ends in exactly one `Sampled` or `Lost`, or raises what
  stops the whole run.
- An infrastructure failure is never a result. It is tried again, under a new attempt id and with the same sampling
  seed, so that a retried trajectory is the one that the uninterrupted run would have had.
- A lost connection costs no attempt: the pool waits until the service is back, gives it the current weights
  (`on_connect`), and asks again for everything that was in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format

from trainer_service.config import LimitsConfig, RetryConfig, RolloutConfig, SamplingConfig
from trainer_service.data.task import Task
from trainer_service.rewards.base import Attempt, ToolOutcome, TurnText
from turnwire.client.rollout import RolloutClient, RolloutStream, rollout_limits, rollout_task
from turnwire.enums import short_name
from turnwire.errors import (
    CancelledByPeerError,
    DeadlineError,
    ExhaustedError,
    InfraError,
    InternalError,
    TakenOverError,
    TurnwireError,
    UnavailableError,
)
from turnwire.telemetry import logs
from turnwire.v1 import common_pb2, rollout_pb2

logger = logging.getLogger(__name__)

_PASSING = (
    UnavailableError,
    InfraError,
    InternalError,
    ExhaustedError,
    DeadlineError,
    CancelledByPeerError,
    TakenOverError,
)
"""Errors of the service that waiting can cure. Any other says that what we ask for is wrong."""

_FIRST_RECONNECT, _LAST_RECONNECT = 0.2, 3.0


@dataclass(frozen=True)
class Assignment:
    """One trajectory to get. `label` is unique in the run, and the first part of its trajectory id."""

    label: str
    task: Task
    sampling: SamplingConfig
    seed: int


@dataclass(frozen=True)
class Sampled:
    """A finished trajectory, and the texts that rewards see. `tries` counts its attempts."""

    trajectory: rollout_pb2.Trajectory
    attempt: Attempt
    tries: int
    seconds: float


@dataclass(frozen=True)
class Lost:
    """There is none: our infrastructure failed it too often, its time was over, or the task itself was refused."""

    reason: str


@dataclass
class _Pending:
    """A trajectory in flight: its end, and its turns so far by index."""

    done: asyncio.Future[rollout_pb2.Trajectory]
    turns: dict[int, rollout_pb2.TurnFinished] = field(default_factory=dict)


class _StreamLostError(Exception):
    """The stream ended under a trajectory."""


def sampling_seed(run_seed: int, *parts: int | str) -> int:
    """The seed of a trajectory, from the run's and from what it is: the same after every resume. 63 bits."""
    digest = hashlib.blake2b("/".join(map(str, (run_seed, *parts))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RolloutPool:
    """Asks for trajectories over one stream. Use it with `async with`."""

    def __init__(
        self,
        client: RolloutClient,
        config: RolloutConfig,
        run_id: str,
        on_connect: Callable[[], Awaitable[None]],
        notify: Callable[[str], None],
    ) -> None:
        """`on_connect` is awaited before each stream is opened; `notify` is told what a person should know."""
        self._client = client
        self._config = config
        # A process of ours that died may have left trajectories under its ids at the services: never use them again.
        self._prefix = f"{run_id}.{secrets.token_hex(3)}"
        self._on_connect = on_connect
        self._notify = notify
        self._permits = asyncio.Semaphore(config.max_in_flight)
        self._pending: dict[str, _Pending] = {}
        self._stream: RolloutStream | None = None
        self._connected = asyncio.Event()
        self._fatal: BaseException | None = None
        self._successes = 0
        self._retries = 0
        self._keeper: asyncio.Task[None] | None = None
        self.infra_failures = 0
        """Attempts that infrastructure failed, so far."""

    async def __aenter__(self) -> RolloutPool:
        self._keeper = asyncio.create_task(self._keep_connected())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper

    @property
    def in_flight(self) -> int:
        """Trajectories at the service."""
        return len(self._pending)

    # -- one trajectory

    async def sample(self, assignment: Assignment) -> Sampled | Lost:
        """Get one trajectory. Raises a TurnwireError where the service says that it will never do this."""
        retry = _Retry(self._config.retry, self._successes)
        async with self._permits:
            for tries in itertools.count(1):
                started = time.monotonic()
                try:
                    trajectory, pending = await self._try(assignment, tries)
                except _StreamLostError:
                    continue
                if trajectory.stop_reason == common_pb2.STOP_REASON_CANCELLED:
                    # Nobody here cancels: its time was over, and another attempt would take as long.
                    return Lost(f"cancelled: {trajectory.error or 'by the rollout service'}")
                if trajectory.stop_reason == common_pb2.STOP_REASON_INVALID_TASK:
                    return Lost(f"invalid task: {trajectory.error or 'no reason given'}")
                if trajectory.stop_reason != common_pb2.STOP_REASON_INFRA_ERROR:
                    self._successes += 1
                    return Sampled(trajectory, _attempt(trajectory, pending), tries, time.monotonic() - started)
                self.infra_failures += 1
                reason = trajectory.error or "no reason given"
                delay = retry.failed(self._successes)
                if delay is None:
                    return Lost(f"infrastructure: {reason}")
                self._tell_retry(assignment, reason)
                await asyncio.sleep(delay)
        raise AssertionError("unreachable: the attempts have no end")

    def _tell_retry(self, assignment: Assignment, reason: str) -> None:
        """The first failure is worth a line; of an outage with hundreds, one in a while is enough."""
        self._retries += 1
        logger.info("%s is tried again: %s", assignment.label, reason)
        if self._retries & (self._retries - 1) == 0:  # 1, 2, 4, 8 …
            self._notify(f"infrastructure failed {self._retries} trajectories so far, they are tried again: {reason}")

    async def _try(self, assignment: Assignment, tries: int) -> tuple[rollout_pb2.Trajectory, _Pending]:
        await self._connected.wait()
        if self._fatal is not None:
            raise self._fatal
        stream = self._stream
        assert stream is not None  # noqa: S101 - `_connected` is set after it
        task = self._wire_task(assignment, tries)
        logs.trajectory_id.set(task.trajectory_id)
        pending = _Pending(asyncio.get_running_loop().create_future())
        self._pending[task.trajectory_id] = pending
        try:
            try:
                await stream.submit(task)
            except TurnwireError:
                logger.debug("the stream ended while a task was handed in; its reader says why")
            return await pending.done, pending
        finally:
            self._pending.pop(task.trajectory_id, None)

    def _wire_task(self, assignment: Assignment, tries: int) -> rollout_pb2.RolloutTask:
        task, sampling, answer = assignment.task, assignment.sampling, self._config.final_answer
        return rollout_task(
            f"{self._prefix}/{assignment.label}/{tries}",
            [{"role": message.role, "content": message.content} for message in task.messages],
            task.tools,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=assignment.seed,
            limits=_limits(self._config.limits),
            answer_tags=None if answer is None else (answer.open, answer.close),
        )

    # -- the stream under all of them

    async def _keep_connected(self) -> None:
        """Keep one stream open until cancelled; what no waiting can cure is given to everyone who waits."""
        delay = _FIRST_RECONNECT
        while True:
            try:
                await self._on_connect()
                async with self._client.rollouts() as stream:
                    self._stream = stream
                    self._connected.set()
                    async for event in stream:
                        delay = _FIRST_RECONNECT
                        self._deliver(event)
                raise UnavailableError("the rollout service ended the stream")  # noqa: TRY301 - one path for every end
            except _PASSING as error:
                self._connected.clear()
                self._lose_stream()
                logger.info("lost the rollout service: %s", error)
                if delay == _FIRST_RECONNECT:
                    self._notify(f"waiting for the rollout service: {await self._client.refusal(error) or error}")
                await asyncio.sleep(delay)
                delay = min(_LAST_RECONNECT, delay * 2)
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must get it
                self._fatal = error
                self._connected.set()
                for pending in self._pending.values():
                    if not pending.done.done():
                        pending.done.set_exception(error)
                return

    def _deliver(self, event: rollout_pb2.TurnFinished | rollout_pb2.Trajectory) -> None:
        pending = self._pending.get(event.trajectory_id)
        if pending is None:
            return
        if isinstance(event, rollout_pb2.TurnFinished):
            pending.turns[event.turn.index] = event
        elif not pending.done.done():
            pending.done.set_result(event)

    def _lose_stream(self) -> None:
        self._stream = None
        for pending in self._pending.values():
            if not pending.done.done():
                pending.done.set_exception(_StreamLostError())


class _Retry:
    """Whether and when a trajectory that infrastructure failed is tried again."""

    def __init__(self, config: RetryConfig, successes: int) -> None:
        self._config = config
        self._successes = successes
        self._failures = 0
        self._first_failure = 0.0

    def failed(self, successes: int) -> float | None:
        """Seconds until the next attempt; None: no more. `successes` of all trajectories tell an outage, in which
        nothing succeeds and which is waited out, from a trajectory that fails alone."""
        now = time.monotonic()
        if self._failures == 0:
            self._successes, self._first_failure = successes, now
        self._failures += 1
        alone = successes > self._successes
        if self._failures >= self._config.attempts and (
            alone or now - self._first_failure > self._config.patience_seconds
        ):
            return None
        delay: float = self._config.first_delay_seconds * 2.0 ** min(self._failures - 1, 20)
        return min(self._config.max_delay_seconds, delay)


def _limits(config: LimitsConfig) -> rollout_pb2.RolloutLimits:
    return rollout_limits(
        max_turns=config.max_turns or 0,
        max_action_tokens=config.max_action_tokens or 0,
        max_observation_tokens=config.max_observation_tokens or 0,
        max_trajectory_tokens=config.max_trajectory_tokens or 0,
        tool_timeout=config.tool_timeout_seconds,
        trajectory_timeout=config.trajectory_timeout_seconds,
    )


def _attempt(trajectory: rollout_pb2.Trajectory, pending: _Pending) -> Attempt:
    """What rewards see of a trajectory."""
    turns = []
    for turn in (turn for segment in trajectory.segments for turn in segment.turns):
        seen = pending.turns.get(turn.index)
        outcomes = tuple(
            ToolOutcome(result.tool, _error_name(result.error), _plain(result.data) if result.HasField("data") else {})
            for result in turn.results
        )
        turns.append(TurnText(seen.action_text if seen else "", seen.observation_text if seen else "", outcomes))
    return Attempt(
        tuple(turns),
        trajectory.final_answer if trajectory.HasField("final_answer") else None,
        short_name(common_pb2.StopReason, trajectory.stop_reason),
    )


def _error_name(kind: common_pb2.ErrorKind.ValueType) -> str:
    return short_name(common_pb2.ErrorKind, kind) if kind else ""


def _plain(data: Any) -> dict[str, Any]:
    result: dict[str, Any] = json_format.MessageToDict(data)
    return result
