"""One Rollout stream: tasks in, a task of asyncio for each trajectory, events out.

Invariants: a stream has at most its share of trajectories in flight, and the service at most its own. A stream is read
ahead by as many tasks again, which wait for a place, so that a cancellation behind them is heard; then its flow control
holds the client. Streams take turns for the service's places. Events wait in a bounded queue: a client that does not
read holds its trajectories until `idle` ends its stream, but neither the tool sessions nor the service's places of
those that are over: each is given back at once. Each accepted task gives exactly one Trajectory, unless the stream
dies; then each of its trajectories is cancelled and its tool session closed before the stream is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterable, Awaitable, Callable

from opentelemetry.trace import Span

from rollout_service.agent import Agent, Cancellation
from rollout_service.engines.base import Ids
from rollout_service.task import Task, TaskRefusedError
from rollout_service.telemetry import stop_name
from rollout_service.tools import TrajectoryTools
from turnwire.client.tools import ToolClient
from turnwire.errors import AlreadyExistsError, DeadlineError, InvalidRequestError, UnavailableError
from turnwire.security.gate import DRAIN_RETRY_SECONDS
from turnwire.telemetry import logs, tracing
from turnwire.v1 import common_pb2, rollout_pb2

logger = logging.getLogger(__name__)

EVENTS_QUEUED = 64

ParseTask = Callable[[rollout_pb2.RolloutTask], tuple[Task, Ids]]

Write = Callable[[rollout_pb2.RolloutResponse], Awaitable[None]]


class Admission:
    """Room for trajectories in the whole service, and whether it still takes any."""

    def __init__(self, most: int) -> None:
        self.running = 0
        self.waiting = 0
        """Tasks that were read and have no place yet, of all streams."""
        self.streams = 0
        """Open ones."""
        self._room = asyncio.Semaphore(most)
        self._draining = asyncio.Event()

    @property
    def draining(self) -> bool:
        """Whether no further task is taken."""
        return self._draining.is_set()

    def drain(self) -> None:
        """Take no further task."""
        self._draining.set()

    async def drained(self) -> None:
        """Wait for `drain`."""
        await self._draining.wait()

    async def enter(self) -> None:
        """Wait for room."""
        await self._room.acquire()
        self.running += 1

    def leave(self) -> None:
        """Give the room back."""
        self.running -= 1
        self._room.release()


class RolloutStream:
    """Runs one stream. `most`: trajectories in flight. `idle`: seconds that the client may be silent, or not read."""

    def __init__(
        self,
        agent: Agent,
        tools: ToolClient | None,
        admission: Admission,
        parse: ParseTask,
        *,
        most: int,
        idle: float,
    ) -> None:
        self._agent, self._tools, self._admission, self._parse = agent, tools, admission, parse
        self._idle = idle
        self._quiet_since = time.monotonic()
        self._places = asyncio.Semaphore(2 * most)
        self._room = asyncio.Semaphore(most)
        self._next = asyncio.Lock()
        self._running: dict[str, Cancellation] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._held: dict[str, asyncio.Task[None]] = {}
        """Those of `_work` that wait for a place, by trajectory."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._queue: asyncio.Queue[rollout_pb2.RolloutResponse | Exception | None] = asyncio.Queue(EVENTS_QUEUED)

    async def run(self, requests: AsyncIterable[rollout_pb2.RolloutRequest], write: Write) -> None:
        """Write events as they happen; ends when the client has sent its last task and each has its trajectory.

        Raises InvalidRequestError or AlreadyExistsError for a bad task, UnavailableError when the service drains while
        the client would still send tasks, DeadlineError when it sends none for too long with nothing in flight, or does
        not read.
        """
        reader = asyncio.create_task(self._supervise(requests))
        self._admission.streams += 1
        try:
            while (event := await self._queue.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                await self._send(event, write)
        finally:
            self._admission.streams -= 1
            await asyncio.shield(asyncio.create_task(self._end(reader)))

    async def _send(self, event: rollout_pb2.RolloutResponse, write: Write) -> None:
        try:
            async with asyncio.timeout(self._idle):
                await write(event)
        except TimeoutError as error:  # this status waits behind what is not read, but holds nothing
            raise DeadlineError(
                f"an event was not read for {self._idle:g} s; read while you submit, "
                "or raise stream_idle_seconds in the rollout service's config"
            ) from error

    async def _end(self, reader: asyncio.Task[None]) -> None:
        """Cancel what runs, once nothing more can begin, and wait until its sessions are closed."""
        reader.cancel()
        await asyncio.wait([reader])
        for work in self._work:
            work.cancel()
        while self._work or self._leaving:
            await asyncio.wait(self._work | self._leaving)

    async def _supervise(self, requests: AsyncIterable[rollout_pb2.RolloutRequest]) -> None:
        """Read until the client is done or silent, the service drains, or a task is bad; then let what runs finish."""
        outcome: Exception | None = None
        reading = asyncio.create_task(self._read(requests))
        drained = asyncio.create_task(self._admission.drained())
        silent = asyncio.create_task(self._silence())
        try:
            await asyncio.wait([reading, drained, silent], return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            else:
                reading.cancel()
                await asyncio.wait([reading])
                outcome = self._why_not_read()
                for work in self._held.values():
                    work.cancel()
            while self._work or self._leaving:
                await asyncio.wait(self._work | self._leaving)
        except Exception as error:  # noqa: BLE001 - raised again by `run`, where it becomes the stream's status
            outcome = error
        finally:
            for task in (reading, drained, silent):
                task.cancel()
            await asyncio.wait([reading, drained, silent])
        await self._queue.put(outcome)

    async def _silence(self) -> None:
        """Wait until nothing has been in flight, and nothing has come, for the idle time."""
        while (left := self._idle if self._work else self._quiet_since + self._idle - time.monotonic()) > 0:  # noqa: ASYNC110 - for time to pass
            await asyncio.sleep(left)

    def _why_not_read(self) -> Exception:
        if self._admission.draining:
            return UnavailableError(
                "the service is draining; send the other tasks to another one", retry_after=DRAIN_RETRY_SECONDS
            )
        return DeadlineError(
            f"no task came for {self._idle:g} s while none was in flight; open a stream when there is one again, "
            "or raise stream_idle_seconds in the rollout service's config"
        )

    async def _read(self, requests: AsyncIterable[rollout_pb2.RolloutRequest]) -> None:
        async for request in requests:
            self._quiet_since = time.monotonic()
            kind = request.WhichOneof("message")
            if kind == "cancel":
                if (cancellation := self._running.get(request.cancel.trajectory_id)) is not None:
                    cancellation.ask()
            elif kind == "task":
                await self._start(request.task)
            else:
                raise InvalidRequestError("a request holds neither a task nor a cancellation")

    async def _start(self, message: rollout_pb2.RolloutTask) -> None:
        try:
            task, prompt = self._parse(message)
        except TaskRefusedError as error:
            await self._emit(_without_turns(message, common_pb2.STOP_REASON_INVALID_TASK, str(error)))
            return
        if task.trajectory_id in self._running:
            raise AlreadyExistsError(f"trajectory {task.trajectory_id!r} is in flight on this stream")
        await self._places.acquire()
        cancellation = self._running[task.trajectory_id] = Cancellation()
        work = self._held[task.trajectory_id] = asyncio.create_task(self._one(message, task, prompt, cancellation))
        self._work.add(work)
        work.add_done_callback(lambda done: self._finished(task, done))

    def _finished(self, task: Task, work: asyncio.Task[None]) -> None:
        self._work.discard(work)
        self._held.pop(task.trajectory_id, None)
        del self._running[task.trajectory_id]
        self._places.release()
        self._quiet_since = time.monotonic()

    async def _one(self, message: rollout_pb2.RolloutTask, task: Task, prompt: Ids, cancellation: Cancellation) -> None:
        logs.trajectory_id.set(task.trajectory_id)
        with tracing.begin("trajectory", message.traceparent, trajectory_id=task.trajectory_id) as span:
            await self._run(message, task, prompt, cancellation, span)

    async def _run(
        self, message: rollout_pb2.RolloutTask, task: Task, prompt: Ids, cancellation: Cancellation, span: Span
    ) -> None:
        entered = await self._admitted(cancellation)
        span.add_event("has its place" if entered else "was cancelled while it waited")
        self._held.pop(task.trajectory_id, None)
        tools: TrajectoryTools | None = None
        try:
            if entered and task.tools and self._tools is not None:
                tools = TrajectoryTools(self._tools, task)
            trajectory = await self._agent.run(task, prompt, tools, cancellation, self._emit_turn)
        except Exception:  # a bug: the client must hear of its task all the same
            opaque = secrets.token_hex(8)
            logger.exception("internal error %s: trajectory %s broke", opaque, task.trajectory_id)
            reason = f"internal error {opaque}; the service's log has it under this id"
            trajectory = _without_turns(message, common_pb2.STOP_REASON_INFRA_ERROR, reason)
        else:
            if span.is_recording():
                _describe(span, task, trajectory)
        finally:  # at once: the event may have to wait for the client, and what the trajectory holds must not
            leaving = asyncio.create_task(self._leave(task, tools, entered))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        try:
            await self._emit(trajectory)
        finally:
            if entered:
                self._room.release()

    async def _admitted(self, cancellation: Cancellation) -> bool:
        """Whether it got its place before it was cancelled."""
        begin = time.monotonic()
        self._admission.waiting += 1
        try:
            return await cancellation.within(None, self._enter()) is not None
        finally:
            self._admission.waiting -= 1
            if self._agent.metrics is not None:
                self._agent.metrics.waited(time.monotonic() - begin)

    async def _enter(self) -> bool:
        """Wait for a place on the stream, then at the service: one task of each stream at a time."""
        async with self._next:
            await self._room.acquire()
            try:
                await self._admission.enter()
            except asyncio.CancelledError:
                self._room.release()
                raise
            return True

    async def _leave(self, task: Task, tools: TrajectoryTools | None, entered: bool) -> None:
        """Give back what a trajectory held."""
        self._agent.engine.release(task.trajectory_id)
        try:
            if tools is not None:
                await tools.close()
        finally:
            if entered:
                self._admission.leave()

    async def _emit(self, trajectory: rollout_pb2.Trajectory) -> None:
        if self._agent.metrics is not None:
            self._agent.metrics.ended(trajectory)
        await self._queue.put(rollout_pb2.RolloutResponse(trajectory=trajectory))

    async def _emit_turn(self, turn: rollout_pb2.TurnFinished) -> None:
        await self._queue.put(rollout_pb2.RolloutResponse(turn=turn))


def _describe(span: Span, task: Task, trajectory: rollout_pb2.Trajectory) -> None:
    segments = trajectory.segments
    tracing.describe(
        span,
        tools=[tool.name for tool in task.tools],
        stop_reason=stop_name(trajectory.stop_reason),
        turns=sum(len(segment.turns) for segment in segments),
        prompt_tokens=sum(segment.prompt_length for segment in segments),
        tokens=sum(segment.token_ids.shape[0] for segment in segments),
        sampled_tokens=sum(span.end - span.start for segment in segments for span in segment.weight_spans),
        weight_versions=sorted({span.version for segment in segments for span in segment.weight_spans}),
    )


def _without_turns(
    message: rollout_pb2.RolloutTask, reason: common_pb2.StopReason.ValueType, error: str
) -> rollout_pb2.Trajectory:
    """What comes out for a task of which nothing was generated."""
    metadata = message.metadata if message.HasField("metadata") else None
    return rollout_pb2.Trajectory(
        trajectory_id=message.trajectory_id, stop_reason=reason, error=error, metadata=metadata
    )
