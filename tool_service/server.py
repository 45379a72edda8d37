"""The gRPC face of the tool service: messages in and out; what they mean is in `sessions` and `session`."""

# ruff: noqa: N802 - methods are named as in the contract

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc.aio
from google.protobuf import timestamp_pb2
from opentelemetry.trace import Span

from tool_service import wire
from tool_service.config import ToolServiceConfig
from tool_service.registry import RegisteredTool, ToolRegistry, load_registry
from tool_service.sandbox.patience import PatientTimeout
from tool_service.sandboxes import Sandboxes
from tool_service.session import Session, Stream, TurnTask, run_action
from tool_service.sessions import Sessions, narrowed
from tool_service.telemetry import ToolMetrics, state
from turnwire.errors import DeadlineError, InvalidRequestError, TurnwireError, WrongOrderError
from turnwire.serving import Server
from turnwire.telemetry import logs, tracing
from turnwire.v1 import tool_pb2, tool_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = tool_pb2.DESCRIPTOR.services_by_name["ToolService"].full_name

HEALTH_SECONDS = 5.0
"""How long a tool may take to say how it is."""

PASSES_BEFORE_WAITING = 3
"""Passes of the event loop that a turn is given before it is waited for. One that waits for nothing is over after the
first; in the others messages of other streams gather, which at 64 streams saves a fifth of the CPU."""
BEFORE_READING_AHEAD_SECONDS = 0.1
"""How long a turn is then waited for alone, before its stream is read beside it: a read that has begun and goes on
after the turn costs a tenth of a turn in a sandbox."""

Context = grpc.aio.ServicerContext[Any, Any]


class ToolService(tool_pb2_grpc.ToolServiceServicer):
    """The methods of `turnwire.v1.ToolService`."""

    def __init__(
        self,
        config: ToolServiceConfig,
        registry: ToolRegistry,
        shared: dict[str, Any],
        sandboxes: Sandboxes,
        sessions: Sessions,
    ) -> None:
        self._config = config
        self._registry = registry
        self._shared = shared
        self._sandboxes = sandboxes
        self._sessions = sessions
        self._started_at = time.time()

    async def ListTools(self, request: tool_pb2.ListToolsRequest, context: Context) -> tool_pb2.ListToolsResponse:
        tools = self._registry.list_tools()
        no_sandbox = await self._sandboxes.health() if self._sandboxes.started else ""
        response = tool_pb2.ListToolsResponse()
        for tool in tools:
            health = no_sandbox if tool.tool.needs_sandbox else ""
            self._describe(tool, health or await self._health(tool), response.tools.add())
        return response

    async def _health(self, tool: RegisteredTool) -> str:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                return await tool.tool.health(tool.config, self._shared.get(tool.name))
        except TimeoutError:
            return f"its health check did not end within {HEALTH_SECONDS:g} s"
        except Exception as error:  # a tool that cannot say how it is, is not well
            logger.exception("health of tool %s", tool.name)
            return f"{type(error).__name__}: {error}"

    def _describe(self, tool: RegisteredTool, health: str, info: tool_pb2.ToolInfo) -> None:
        limits = self._config.limits
        longest = min(tool.config.timeout_seconds or limits.max_turn_timeout_seconds, limits.max_turn_timeout_seconds)
        info.name, info.description, info.source = tool.name, tool.tool.description, tool.source
        wire.fill_struct(info.arguments_schema, tool.arguments_schema)
        wire.fill_struct(info.context_schema, tool.context_schema)
        info.modalities.extend(wire.MODALITIES[modality] for modality in tool.tool.modalities)
        info.stop_strings.extend(tool.stop_strings)
        info.sandbox_tier = self._sandboxes.tier if tool.tool.needs_sandbox else ""
        info.default_timeout.CopyFrom(wire.duration(min(limits.turn_timeout_seconds, longest)))
        info.max_timeout.CopyFrom(wire.duration(longest))
        info.healthy, info.health_detail = not health, health

    # The stubs know only async generators; grpc.aio also takes a coroutine that reads and writes by hand, which costs
    # less a turn, and whose read can be given up.
    async def Interact(self, requests: Any, context: Context) -> None:  # type: ignore[override]
        with tracing.begin("session", tracing.caller_of(context.invocation_metadata())) as span:
            await self._interact(context, span)

    async def _interact(self, context: Context, span: Span) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a handler runs in a task")
        stream = Stream(task, context.read, context.write)
        session: Session | None = None
        try:
            first = await self._first(stream)
            logs.trajectory_id.set(first.trajectory_id)
            tracing.describe(span, trajectory_id=first.trajectory_id, tools=[tool.name for tool in first.tools])
            session, resumed = await self._sessions.open(first, stream)
            opened = tool_pb2.Opened(
                resumed=resumed,
                turns_done=session.turns_done,
                lease=wire.duration(self._config.sessions.lease_seconds),
            )
            await stream.write(tool_pb2.InteractResponse(opened=opened))
            await self._turns(session, stream)
        except asyncio.CancelledError:
            if stream.error is None or stream.writing:
                raise  # the client is gone, or does not read
            task.uncancel()
            raise stream.error from None
        finally:
            stream.stop_reading()
            if session is not None:
                session.detach(stream)

    async def _first(self, stream: Stream) -> tool_pb2.Open:
        seconds = self._config.sessions.open_timeout_seconds
        try:
            async with PatientTimeout(time.monotonic() + seconds):
                request = await stream.read()
        except TimeoutError:
            raise DeadlineError(f"no Open within {seconds:g} s (sessions.open_timeout_seconds)") from None
        if request is grpc.aio.EOF:
            raise InvalidRequestError("the stream ended before its Open")
        if request.WhichOneof("message") != "open":
            raise WrongOrderError("the first message of a stream must be Open")
        message: tool_pb2.Open = request.open
        return message

    async def _turns(self, session: Session, stream: Stream) -> None:
        turn: TurnTask | None = None
        asked = 0  # times that the client has sent the turn; each gets the answer
        while True:
            if turn is not None and turn.done():
                answer = turn.result()
                if isinstance(answer, TurnwireError):
                    raise answer
                for _ in range(asked):
                    await stream.write(answer)
                turn, asked = None, 0
            request = await stream.read(turn)
            if request is None:
                continue
            if request is grpc.aio.EOF:
                return  # without Close: the session is left to its lease
            kind = request.WhichOneof("message")
            if kind == "action":
                turn, asked = session.act(request.action), asked + 1
                for _ in range(PASSES_BEFORE_WAITING):
                    await asyncio.sleep(0)
                if not turn.done():
                    await asyncio.wait((turn,), timeout=BEFORE_READING_AHEAD_SECONDS)
            elif kind == "close":
                await asyncio.shield(self._sessions.release(session))
                closed = tool_pb2.Closed(turns_done=session.turns_done)
                await stream.write(tool_pb2.InteractResponse(closed=closed))
                return
            elif kind == "open":
                raise WrongOrderError("a stream has one Open")
            else:
                raise InvalidRequestError("the message holds neither an action nor Close")

    async def Execute(self, request: tool_pb2.ExecuteRequest, context: Context) -> tool_pb2.ExecuteResponse:
        if request.WhichOneof("action") is None:
            raise InvalidRequestError("ExecuteRequest has neither text nor call")
        asked = tool_pb2.TrajectoryLimits(max_observation_bytes=request.max_observation_bytes)
        limits = narrowed(self._config.limits, asked)
        seconds = limits.turn_timeout_seconds
        if request.HasField("timeout"):
            seconds = min(wire.seconds_of(request.timeout, "timeout"), limits.max_turn_timeout_seconds)
        if request.WhichOneof("action") == "call" and not request.call.tool:
            request.call.tool = request.tool.name
        response = tool_pb2.ExecuteResponse()

        async def work() -> None:
            tools = self._sessions.toolset("", [request.tool])
            try:
                await tools.reset()
                await run_action(tools, request, seconds, limits, response)
            finally:
                await asyncio.shield(self._sessions.spawn_release(tools))

        await self._sessions.single_call(work)
        return response

    async def GetStatus(self, request: tool_pb2.GetStatusRequest, context: Context) -> tool_pb2.GetStatusResponse:
        started_at = timestamp_pb2.Timestamp()
        started_at.FromNanoseconds(int(self._started_at * 1e9))
        sessions = self._sessions
        return tool_pb2.GetStatusResponse(
            started_at=started_at,
            draining=sessions.draining,
            sessions_open=sessions.open_count,
            sessions_leased=sessions.leased,
            sessions_max=self._config.sessions.max_sessions,
            turns_running=sessions.counters.running,
            turns_total=sessions.counters.total,
            pools=[self._sandboxes.status()] if self._sandboxes.started else [],
        )


class ToolServer:
    """Everything of the service in one process, in the order in which it must start and stop.

    Used by `__main__`, and by tests in their own process: `async with ToolServer(config) as target`.
    """

    def __init__(self, config: ToolServiceConfig) -> None:
        """Raises ConfigError for tools that cannot be served."""
        self.config = config
        self.registry = load_registry(config)
        self.sandboxes = Sandboxes(config.sandbox)
        self._shared: dict[str, Any] = {}
        self.sessions = Sessions(config.sessions, config.limits, self.registry, self._shared, self.sandboxes)
        self.server: Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def prepare(self) -> Server:
        """Start sandboxes and tools, and make the server, which is then to be started. After an error `close`."""
        if any(tool.tool.needs_sandbox for tool in self.registry.list_tools()):
            await self.sandboxes.start()
        for tool in self.registry.list_tools():
            self._shared[tool.name] = await self._set_up(tool)
        self.sessions.start()
        self.server = Server(self.config.server, [SERVICE_NAME])
        if self.server.metrics is not None:
            self.sessions.metrics = ToolMetrics(self.server.metrics)
            self.server.metrics.export(lambda: state(self.sessions, self.sandboxes))
        service = ToolService(self.config, self.registry, self._shared, self.sandboxes, self.sessions)
        tool_pb2_grpc.add_ToolServiceServicer_to_server(service, self.server.grpc)
        if self.sandboxes.started:
            self._watching = asyncio.create_task(self.server.follow(lambda: self.sandboxes.trouble))
        return self.server

    async def _set_up(self, tool: RegisteredTool) -> Any:
        try:
            return await tool.tool.setup(tool.config)
        except TurnwireError:
            raise
        except Exception as error:  # a plugin's own code: whatever it raised, the operator must learn which tool it was
            raise RuntimeError(
                f"tool {tool.name} ({tool.source}) failed to set up; mend it, or leave it out: "
                f"plugins.exclude: [{tool.name}]"
            ) from error

    async def start(self) -> str:
        """Serve; returns host:port."""
        server = await self.prepare()
        await server.start()
        return server.address

    async def drain(self) -> None:
        """Take in no more trajectories. Idempotent."""
        self.sessions.draining = True
        if self._watching is not None:
            self._watching.cancel()

    async def close(self) -> None:
        """Release everything. The server must have been stopped."""
        await self.drain()
        await self.sessions.close()
        for tool in self.registry.list_tools():
            if tool.name in self._shared:
                await tool.tool.teardown(self._shared[tool.name])
        await self.sandboxes.close()

    async def __aenter__(self) -> str:
        try:
            return await self.start()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *reason: object) -> None:
        await self.stop(0)

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain, stop serving, release everything."""
        await self.drain()
        if self.server is not None:
            await self.server.stop(drain_seconds)
        await self.close()
