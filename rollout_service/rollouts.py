"""One Rollout stream: tasks in, a task of asyncio for each trajectory, events out.

Invariants: a stream has at most its share of trajectories in flight, and the service at most its own; a task is read
only when both have room, so the stream's flow control holds the client. Events wait in a bounded queue: a client that
does not read holds its trajectories, but not the tool sessions of those that are over: each is closed at once. Each
accepted task gives exactly one Trajectory, unless the stream dies; then each of its trajectories is cancelled and its
tool session closed before the stream is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable

from rollout_service.agent import Agent, Cancellation
from rollout_service.engines.base import Ids
from rollout_service.task import Task
from rollout_service.tools import TrajectoryTools
from turnwire.client.tools import ToolClient
from turnwire.errors import AlreadyExistsError, InvalidRequestError, UnavailableError
from turnwire.v1 import rollout_pb2

logger = logging.getLogger(__name__)

EVENTS_QUEUED = 64

ParseTask = Callable[[rollout_pb2.RolloutTask], tuple[Task, Ids]]


class Admission:
    """Room for trajectories in the whole service, and whether it still takes any."""

    def __init__(self, most: int) -> None:
        self.running = 0
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
    """Runs one stream; `events` is what goes out."""

    def __init__(
        self,
        agent: Agent,
        tools: ToolClient | None,
        admission: Admission,
        most: int,
        parse: ParseTask,
    ) -> None:
        self._agent, self._tools, self._admission, self._parse = agent, tools, admission, parse
        self._room = asyncio.Semaphore(most)
        self._running: dict[str, Cancellation] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._queue: asyncio.Queue[rollout_pb2.RolloutResponse | Exception | None] = asyncio.Queue(EVENTS_QUEUED)

    async def events(
        self, requests: AsyncIterable[rollout_pb2.RolloutRequest]
    ) -> AsyncGenerator[rollout_pb2.RolloutResponse, None]:
        """Events as they happen; ends when the client has sent its last task and each has its trajectory.

        Raises InvalidRequestError or AlreadyExistsError for a bad task, UnavailableError when the service drains while
        the client would still send tasks.
        """
        reader = asyncio.create_task(self._supervise(requests))
        try:
            while (event := await self._queue.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            await asyncio.shield(asyncio.create_task(self._end(reader)))

    async def _end(self, reader: asyncio.Task[None]) -> None:
        """Cancel what runs, and wait until its sessions are closed."""
        reader.cancel()
        for work in self._work:
            work.cancel()
        await asyncio.wait([reader, *self._work])

    async def _supervise(self, requests: AsyncIterable[rollout_pb2.RolloutRequest]) -> None:
        """Read until the client is done, the service drains, or a task is bad; then let what runs finish."""
        outcome: Exception | None = None
        reading = asyncio.create_task(self._read(requests))
        drained = asyncio.create_task(self._admission.drained())
        try:
            await asyncio.wait([reading, drained], return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            else:
                reading.cancel()
                await asyncio.wait([reading])
                outcome = UnavailableError("the service is draining; send the other tasks to another one")
            while self._work:
                await asyncio.wait(self._work)
        except Exception as error:  # noqa: BLE001 - raised again by `events`, where it becomes the stream's status
            outcome = error
        finally:
            reading.cancel()
            drained.cancel()
        await self._queue.put(outcome)

    async def _read(self, requests: AsyncIterable[rollout_pb2.RolloutRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "cancel":
                if (cancellation := self._running.get(request.cancel.trajectory_id)) is not None:
                    cancellation.ask()
            elif kind == "task":
                await self._start(request.task)
            else:
                raise InvalidRequestError("a request holds neither a task nor a cancellation")

    async def _start(self, message: rollout_pb2.RolloutTask) -> None:
        task, prompt = self._parse(message)
        if task.trajectory_id in self._running:
            raise AlreadyExistsError(f"trajectory {task.trajectory_id!r} is in flight on this stream")
        await self._room.acquire()
        try:
            await self._admission.enter()
        except asyncio.CancelledError:
            self._room.release()
            raise
        cancellation = self._running[task.trajectory_id] = Cancellation()
        work = asyncio.create_task(self._one(task, prompt, cancellation))
        self._work.add(work)
        work.add_done_callback(lambda done: self._finished(task, done))

    def _finished(self, task: Task, work: asyncio.Task[None]) -> None:
        self._work.discard(work)
        del self._running[task.trajectory_id]
        self._room.release()
        self._admission.leave()
        if not work.cancelled() and (error := work.exception()) is not None:
            logger.error("trajectory %s broke", task.trajectory_id, exc_info=error)

    async def _one(self, task: Task, prompt: Ids, cancellation: Cancellation) -> None:
        tools = TrajectoryTools(self._tools, task) if task.tools and self._tools is not None else None
        closing: asyncio.Task[None] | None = None
        try:
            try:
                trajectory = await self._agent.run(task, prompt, tools, cancellation, self._emit_turn)
            finally:  # at once: the event may have to wait for the client, and what the trajectory holds must not
                self._agent.engine.release(task.trajectory_id)
                if tools is not None:
                    closing = asyncio.create_task(tools.close())
            await self._queue.put(rollout_pb2.RolloutResponse(trajectory=trajectory))
        finally:
            if closing is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(closing)

    async def _emit_turn(self, turn: rollout_pb2.TurnFinished) -> None:
        await self._queue.put(rollout_pb2.RolloutResponse(turn=turn))
