"""The tools of one trajectory and the sandbox that they share; executes one turn's calls in order.

Invariants: calls run one after the other, in order of appearance, so that the same calls have the same effects; every
call is answered by exactly one observation; the sandbox is taken at the first call that needs one, before any call of
that turn has run, so that a turn refused for want of a sandbox has done nothing and may be sent again; and all tools
prepare it then, so that no program has been there before and could stand in their way.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tool_service import wire
from tool_service.action import ToolAction, ToolObservation
from tool_service.base import BaseTool, TurnContext
from tool_service.config import TurnLimits
from tool_service.parsers import check_arguments, compose
from tool_service.registry import RegisteredTool
from tool_service.sandbox.base import GRACE_SECONDS, Sandbox, SandboxError, Turn, TurnResult
from tool_service.sandbox.patience import CHANCE_SECONDS, PatientTimeout
from tool_service.sandboxes import Sandboxes
from tool_service.telemetry import ToolMetrics
from turnwire.config import nearest
from turnwire.errors import InfraError, TurnwireError
from turnwire.v1 import tool_pb2

logger = logging.getLogger(__name__)

PAST_SANDBOX_SECONDS = 0.5
"""How much longer than a sandbox itself a call waits for the sandbox's turn to end."""

PREPARE_SECONDS = 60.0
"""How long bringing a new sandbox into a tool's state may take."""


class Binding(msgspec.Struct, frozen=True):
    """A tool with its checked context and what its instances share."""

    registered: RegisteredTool
    context: msgspec.Struct
    shared: Any


class ToolSet:
    """One trajectory's tools. `reset` first, `close` last; turns do not overlap."""

    def __init__(
        self,
        trajectory_id: str,
        bindings: Sequence[Binding],
        sandboxes: Sandboxes,
        metrics: ToolMetrics | None = None,
    ) -> None:
        self._trajectory_id = trajectory_id
        self._sandboxes = sandboxes
        self._metrics = metrics
        self._contexts = [binding.context for binding in bindings]
        self._tools: list[BaseTool] = [
            binding.registered.tool(binding.registered.config, binding.shared) for binding in bindings
        ]
        self._by_name = {tool.name: tool for tool in self._tools}
        self._access = _Access()

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    async def reset(self) -> None:
        """Begin the trajectory. Raises InvalidRequestError for a context that a tool refuses."""
        for tool, context in zip(self._tools, self._contexts, strict=True):
            await tool.reset(context)
        self._contexts = []

    def actions_in_text(self, text: str) -> list[ToolAction[Any]]:
        """The calls in what the policy wrote, in order of appearance."""
        return compose(text, self._tools)

    def action_of_call(self, call: tool_pb2.ToolCall) -> ToolAction[Any]:
        """A structured call, checked."""
        tool = self._by_name.get(call.tool)
        if tool is None:
            error = f"there is no tool {call.tool[:80]!r}; {nearest(call.tool[:80], self.names)}"
            return ToolAction(call.tool[:80], None, call_id=call.call_id, error=error)
        arguments, error = check_arguments(type(tool), wire.plain(call.arguments))
        return ToolAction(tool.name, arguments, call_id=call.call_id, error=error)

    async def run(
        self,
        turn: int,
        actions: Sequence[ToolAction[Any]],
        seconds: float,
        limits: TurnLimits,
        answer: tool_pb2.ObservationTurn | tool_pb2.ExecuteResponse,
    ) -> None:
        """Execute a turn's calls into `answer.observations` and `answer.done`.

        Raises ExhaustedError when no sandbox could be had, InvalidRequestError when a context turns out to be unusable,
        InfraError when a sandbox could not be prepared; no call of the turn has been executed then.
        """
        await self._prepare(actions[: limits.calls_per_turn])
        context = TurnContext(
            self._trajectory_id, turn, time.monotonic() + seconds, limits.observation_bytes, self._access
        )
        room = wire.Room(limits.observation_bytes, limits.data_bytes, limits.media_bytes)
        for position, action in enumerate(actions):
            begin = time.monotonic()
            if position >= limits.calls_per_turn:
                observation = _invalid(f"not run: a turn has at most {limits.calls_per_turn} calls")
            elif answer.done:
                observation = _invalid("not run: the task was over")
            elif action.error:
                observation = _invalid(action.error)
            else:
                observation = await self._execute(action, context, begin)
            if observation.error == "INFRA":
                logger.warning(
                    "infrastructure failure in tool %s, trajectory %s, turn %d: %s",
                    action.tool,
                    self._trajectory_id,
                    turn,
                    observation.detail,
                )
            target = answer.observations.add()
            target.tool = action.tool
            target.call_id = action.call_id or str(position)
            wire.fill_observation(target, observation, room)
            elapsed = time.monotonic() - begin
            target.elapsed.nanos, target.elapsed.seconds = _split(elapsed)
            if self._metrics is not None:
                name = action.tool if action.tool in self._by_name else "unknown"
                self._metrics.called(name, observation.error, elapsed)
            if observation.done:
                answer.done = True
        # One that died has said so in an observation of this turn: the next turn begins in another.
        if self._access.sandbox is not None and not self._access.sandbox.alive:
            await self._drop_sandbox()

    async def _execute(self, action: ToolAction[Any], context: TurnContext, begin: float) -> ToolObservation:
        tool = self._by_name[action.tool]
        end = context.deadline
        if tool.config.timeout_seconds is not None:
            end = min(end, begin + tool.config.timeout_seconds)
        if begin >= end:
            return ToolObservation.failed("timeout: the calls before used up the turn's time", "TIMEOUT")
        call = context if end == context.deadline else msgspec.structs.replace(context, deadline=end)
        # A sandbox ends its turn itself and keeps the output so far; only when it does not, the call is cancelled.
        grace = GRACE_SECONDS + PAST_SANDBOX_SECONDS if tool.needs_sandbox else tool.grace_seconds
        try:
            async with PatientTimeout(end + grace, CHANCE_SECONDS + PAST_SANDBOX_SECONDS) as scope:
                observation = _checked(await tool.execute(action, call))
            tool.update_state(action, observation)
        except TurnwireError as error:
            return ToolObservation.failed("the tool is not available now", "INFRA", error.message)
        except Exception as error:  # noqa: BLE001 - a tool's bug is not the trajectory's end, and never the agent's fault
            if isinstance(error, TimeoutError) and scope.expired():
                return ToolObservation.failed(f"timeout: stopped after {end - begin:.3g} s", "TIMEOUT")
            return _internal(error, action)
        return observation

    async def _prepare(self, actions: Sequence[ToolAction[Any]]) -> None:
        """Have ready what the calls need: each tool's own means, and a sandbox."""
        called = [self._by_name[name] for name in dict.fromkeys(action.tool for action in actions if not action.error)]
        for tool in called:
            if type(tool).prepare is BaseTool.prepare:
                continue  # a timeout around nothing would be most of a turn's work here
            try:
                async with asyncio.timeout(PREPARE_SECONDS):
                    await tool.prepare()
            except TimeoutError as error:
                raise InfraError(f"tool {tool.name} could not be prepared within {PREPARE_SECONDS:g} s") from error
        if self._access.sandbox is None and any(tool.needs_sandbox for tool in called):
            sandbox = await self._taken()
            try:
                await self._prepare_sandbox(sandbox)
            except BaseException:
                await self._sandboxes.discard(sandbox)
                raise
            self._access.sandbox = sandbox

    async def _prepare_sandbox(self, sandbox: Sandbox) -> None:
        for tool in self._tools:
            if not tool.needs_sandbox:
                continue
            try:
                async with asyncio.timeout(PREPARE_SECONDS):
                    await tool.prepare_sandbox(sandbox)
            except (TimeoutError, SandboxError) as error:
                raise InfraError(f"a sandbox could not be prepared for tool {tool.name}: {error}") from error

    async def _taken(self) -> Sandbox:
        begin = time.monotonic()
        try:
            return await self._sandboxes.take()
        finally:
            if self._metrics is not None:
                self._metrics.waited_for_sandbox(time.monotonic() - begin)

    async def _drop_sandbox(self) -> None:
        sandbox, self._access.sandbox = self._access.sandbox, None
        if sandbox is not None:
            await self._sandboxes.discard(sandbox)

    async def close(self) -> None:
        """Release everything. Never raises."""
        await self._drop_sandbox()
        for tool in self._tools:
            try:
                await tool.close()
            except Exception:  # the others must be closed too
                logger.exception("tool %s could not be closed (trajectory %s)", tool.name, self._trajectory_id)


class _Access:
    """The trajectory's sandbox as tools see it: one piece of work at a time."""

    def __init__(self) -> None:
        self.sandbox: Sandbox | None = None
        self._lock = asyncio.Lock()

    def _taken(self) -> Sandbox:
        if self.sandbox is None:
            raise RuntimeError("only a tool with needs_sandbox = True has a sandbox")
        return self.sandbox

    async def run(self, turn: Turn) -> TurnResult:
        async with self._lock:
            return await self._taken().run(turn)

    async def put_file(self, path: str, data: bytes) -> None:
        async with self._lock:
            await self._taken().put_file(path, data)

    async def get_file(self, path: str, max_bytes: int) -> bytes:
        async with self._lock:
            return await self._taken().get_file(path, max_bytes)


def _checked(observation: Any) -> ToolObservation:
    if not isinstance(observation, ToolObservation):
        raise TypeError(f"execute returned {type(observation).__name__}, not ToolObservation")
    return observation


def _invalid(reason: str) -> ToolObservation:
    return ToolObservation.failed(f"invalid action: {reason}", "INVALID_ACTION")


def _internal(error: Exception, action: ToolAction[Any]) -> ToolObservation:
    opaque = secrets.token_hex(8)
    logger.error("internal error %s in tool %s", opaque, action.tool, exc_info=error)
    return ToolObservation.failed(
        "the tool failed by no fault of yours", "INFRA", f"internal error {opaque}; the service's log has it"
    )


def _split(seconds: float) -> tuple[int, int]:
    return int(seconds % 1 * 1e9), int(seconds)
