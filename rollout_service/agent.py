"""The agent loop: one trajectory from its prompt to its end.

Generate until a stop; hand the text to the tools; append what they observed; again. Each trajectory runs in a task of
its own, so it never waits for another one's tool. What the agent did wrong is an observation; what *we* did wrong (tool
service, sandbox, engine) ends the trajectory as INFRA_ERROR, with the tokens so far, and is never training data; so is
a task that the tools refuse, which ends as INVALID_TASK.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from opentelemetry.trace import Span

from rollout_service.chat import Chat
from rollout_service.engines.base import Engine, GenerateDelta, GenerateJob, GenerateStop, Ids, Sampling
from rollout_service.task import Task, TaskRefusedError, shown_text
from rollout_service.telemetry import RolloutMetrics, error_name
from rollout_service.tools import ToolDirectory, TrajectoryTools
from rollout_service.trajectory import MultiTurnTrajectory, TrajectoryBuilder, TurnRecord, wire_turn
from turnwire.errors import InvalidRequestError, TurnwireError
from turnwire.telemetry import tracing
from turnwire.v1 import common_pb2, rollout_pb2, tool_pb2

T = TypeVar("T")

OnTurn = Callable[[rollout_pb2.TurnFinished], Awaitable[None]]

_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Ending:
    """Why a trajectory ended, and with what answer."""

    reason: common_pb2.StopReason.ValueType
    answer: str | None = None
    error: str = ""


class Cancellation:
    """How a trajectory is ended from outside: by asking, or by the end of its time."""

    def __init__(self) -> None:
        self.asked = False
        self._timeout: asyncio.Timeout | None = None

    def ask(self) -> None:
        """End it now, or as soon as it begins. Once it ends anyway this does nothing."""
        self.asked = True
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def within(self, seconds: float | None, work: Awaitable[T]) -> T | None:
        """What `work` gives, in this task; None where it was ended first, by `ask` or after `seconds`, if any."""
        timeout = self._timeout = asyncio.timeout(0 if self.asked else seconds)
        try:
            async with timeout:
                return await work
        except TimeoutError:
            if not timeout.expired():
                raise
            return None
        finally:
            self._timeout = None


@dataclass(frozen=True)
class Agent:
    """What all trajectories share."""

    engine: Engine
    chat: Chat
    directory: ToolDirectory | None
    metrics: RolloutMetrics | None = None

    async def run(
        self, task: Task, prompt: Ids, tools: TrajectoryTools | None, cancellation: Cancellation, on_turn: OnTurn
    ) -> rollout_pb2.Trajectory:
        """Generate one trajectory. Ends it as CANCELLED when that is asked for, or its time is over."""
        began = time.perf_counter()
        trajectory = MultiTurnTrajectory(prompt)
        builder = TrajectoryBuilder(task.trajectory_id, task.metadata)
        builder.add_segment(trajectory)
        timeout = task.limits.trajectory_timeout
        ending = await cancellation.within(timeout, self._turns(task, trajectory, tools, on_turn))
        if ending is None:
            reason = "" if cancellation.asked else f"trajectory_timeout of {timeout:g} s is over"
            ending = Ending(common_pb2.STOP_REASON_CANCELLED, error=reason)
        return builder.build(
            ending.reason, elapsed=time.perf_counter() - began, error=ending.error, final_answer=ending.answer
        )

    async def _turns(
        self, task: Task, trajectory: MultiTurnTrajectory, tools: TrajectoryTools | None, on_turn: OnTurn
    ) -> Ending:
        try:
            return await self._loop(task, trajectory, tools, on_turn)
        except TaskRefusedError as error:
            return Ending(common_pb2.STOP_REASON_INVALID_TASK, error=str(error))
        except TurnwireError as error:
            if self.directory is not None:
                self.directory.doubt()
            return Ending(common_pb2.STOP_REASON_INFRA_ERROR, error=f"{type(error).__name__}: {error}")

    async def _loop(
        self, task: Task, trajectory: MultiTurnTrajectory, tools: TrajectoryTools | None, on_turn: OnTurn
    ) -> Ending:
        limits, stops = task.limits, await self._stop_strings(task)
        image_tokens = 0  # known once the engine has had them
        for turn in range(limits.max_turns):
            room = limits.max_trajectory_tokens - len(trajectory) - image_tokens
            if room <= 0:
                return Ending(common_pb2.STOP_REASON_MAX_TOKENS)
            with tracing.child("turn", turn=turn) as span:
                began = time.perf_counter()
                action = await self._generate(task, trajectory, turn, stops, min(room, limits.max_action_tokens))
                room -= action.image_tokens - image_tokens
                image_tokens = action.image_tokens
                generated = time.perf_counter()
                text = self.chat.action_text(action.token_ids)
                said = _until_stop(text, stops) if action.stop is GenerateStop.STRING else text

                ending = _ending_without_tools(task, said, action, tools is not None)
                observations: list[tool_pb2.Observation] = []
                if ending is None and tools is not None:
                    span.add_event("generated")
                    observed = await tools.act(said)
                    observations = list(observed.observations)
                    ending = _ending_after_tools(task, said, observed)
                answered = time.perf_counter()
                if span.is_recording():
                    _describe(span, action, observations)

            shown, bridged, full = "", None, 0
            if observations:
                shown = "\n".join(shown_text(item.content) for item in observations)
                ids, full = self._observation_ids(shown, limits.max_observation_tokens)
                bridged = self.chat.bridge.around(action.token_ids, ids)
                if len(action.token_ids) + len(bridged) > room:
                    bridged, ending = None, ending or Ending(common_pb2.STOP_REASON_MAX_TOKENS)
            record = trajectory.add_turn(
                action.token_ids,
                action.logprobs,
                action.spans,
                action.stop or GenerateStop.LENGTH,
                bridged,
                results=[_result(item) for item in observations],
                generate_seconds=generated - began,
                tool_seconds=answered - generated,
                observation_full_tokens=full,
            )
            if self.metrics is not None:
                self.metrics.turn(task, record)
            await on_turn(_finished(task, record, text, shown))
            if ending is not None:
                return ending
        return Ending(common_pb2.STOP_REASON_MAX_TURNS)

    async def _stop_strings(self, task: Task) -> tuple[str, ...]:
        names = [tool.name for tool in task.tools]
        stops = await self.directory.stop_strings(names) if names and self.directory is not None else ()
        return (*stops, task.answer_tags[1]) if task.answer_tags is not None else stops

    async def _generate(
        self, task: Task, trajectory: MultiTurnTrajectory, turn: int, stops: tuple[str, ...], max_tokens: int
    ) -> GenerateDelta:
        end = self.chat.bridge.end_of_turn
        job = GenerateJob(
            f"{task.trajectory_id}#{turn}",
            trajectory.get_concatenated_tokens(),
            max_tokens,
            _turn_sampling(task.sampling, turn),
            stops,
            frozenset() if end is None else frozenset([end]),
            sequence_key=task.trajectory_id,
            adapter=task.adapter,
            images=task.images,
        )
        try:
            deltas = [delta async for delta in self.engine.generate(job)]
        except InvalidRequestError as error:  # an image that is none
            raise TaskRefusedError(error.message) from error
        if len(deltas) == 1:
            return deltas[0]
        return GenerateDelta(
            np.concatenate([delta.token_ids for delta in deltas]),
            np.concatenate([delta.logprobs for delta in deltas]),
            tuple(span for delta in deltas for span in delta.spans),
            deltas[-1].stop,
            deltas[-1].image_tokens,
        )

    def _observation_ids(self, text: str, limit: int) -> tuple[Ids, int]:
        """Ids of an observation within the limit, and how many they were where they had to be cut, else 0."""
        ids = self.chat.text(text)
        full = len(ids)
        if full <= limit:
            return ids, 0
        keep = limit - len(self.chat.text(_cut_note(limit, full)))
        if keep <= 0:
            return ids[:limit], full
        return np.concatenate([ids[:keep], self.chat.text(_cut_note(keep, full))])[:limit], full


def _cut_note(shown: int, full: int) -> str:
    return f"\n[cut: first {shown} of {full} tokens shown]"


def _turn_sampling(sampling: Sampling, turn: int) -> Sampling:
    """Each turn draws from a stream of its own."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + turn * _SEED_STEP) % 2**64)


def _until_stop(text: str, stops: tuple[str, ...]) -> str:
    """The text up to the end of the first stop string; what the last token holds beyond it is not meant."""
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _ending_without_tools(task: Task, said: str, action: GenerateDelta, has_tools: bool) -> Ending | None:
    """How an action ends the trajectory by itself; None if the tools must look at it."""
    if action.stop is GenerateStop.LENGTH:
        return Ending(common_pb2.STOP_REASON_MAX_TOKENS)
    if task.answer_tags is not None:
        opened, closed = task.answer_tags
        before, found, _ = said.rpartition(closed)
        start = before.rfind(opened) if found else -1
        if start >= 0:
            return Ending(common_pb2.STOP_REASON_FINAL_ANSWER, before[start + len(opened) :])
    return None if has_tools else _ending_without_call(task, said)


def _ending_without_call(task: Task, said: str) -> Ending:
    if task.answer_tags is not None:
        return Ending(common_pb2.STOP_REASON_NO_ACTION)
    return Ending(common_pb2.STOP_REASON_FINAL_ANSWER, said)


def _ending_after_tools(task: Task, said: str, observed: tool_pb2.ObservationTurn) -> Ending | None:
    """How what came back ends the trajectory; None if it goes on."""
    for observation in observed.observations:
        if observation.error == common_pb2.ERROR_KIND_INFRA:
            detail = observation.error_detail or "its infrastructure failed"
            return Ending(common_pb2.STOP_REASON_INFRA_ERROR, error=f"tool {observation.tool!r}: {detail}")
    if observed.done:
        return Ending(common_pb2.STOP_REASON_TOOL_DONE)
    return None if observed.observations else _ending_without_call(task, said)


def _result(observation: tool_pb2.Observation) -> rollout_pb2.ToolResult:
    return rollout_pb2.ToolResult(
        tool=observation.tool,
        error=observation.error,
        truncated=observation.truncated,
        elapsed=observation.elapsed,
        data=observation.data if observation.HasField("data") else None,
    )


def _describe(span: Span, action: GenerateDelta, observations: Sequence[tool_pb2.Observation]) -> None:
    stop = (action.stop or GenerateStop.LENGTH).value
    tracing.describe(span, action_tokens=len(action.token_ids), generate_stop=stop)
    if observations:
        tracing.describe(span, tools=[observation.tool for observation in observations])
    if errors := [error_name(observation.error) for observation in observations if observation.error]:
        tracing.describe(span, errors=errors)


def _finished(task: Task, turn: TurnRecord, action: str, observation: str) -> rollout_pb2.TurnFinished:
    return rollout_pb2.TurnFinished(
        trajectory_id=task.trajectory_id, turn=wire_turn(turn), action_text=action, observation_text=observation
    )
