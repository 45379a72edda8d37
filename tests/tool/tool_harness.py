"""A real tool service in the test's process, with a client that says exactly what the test wants it to say."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from waiting import PATIENCE, eventually, no_more

from tool_service.config import ToolServiceConfig
from tool_service.server import ToolServer
from tool_service.wire import fill_struct
from turnwire.config import convert
from turnwire.v1 import common_pb2, tool_pb2, tool_pb2_grpc

PLUGINS = Path(__file__).parent / "plugins"
NO_SANDBOX = ("bash", "python", "sql", "unit_tests")


def config_of(exclude: tuple[str, ...] = NO_SANDBOX, **sections: Any) -> ToolServiceConfig:
    """A config with the probe tools and a short lease; without sandboxed tools unless asked for."""
    values: dict[str, Any] = {
        "plugins": {"directories": [str(PLUGINS)], "exclude": list(exclude)},
        "sandbox": {"pool": {"ready": 1}},
        "sessions": {"lease_seconds": 0.3},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return convert(values, ToolServiceConfig)


class Service:
    """A running service and a stub for it."""

    def __init__(self, server: ToolServer, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self.stub: Any = tool_pb2_grpc.ToolServiceStub(channel)

    async def status(self) -> tool_pb2.GetStatusResponse:
        return await self.stub.GetStatus(tool_pb2.GetStatusRequest(), timeout=PATIENCE)

    async def sessions(self) -> int:
        status = await self.status()
        return status.sessions_open + status.sessions_leased

    async def runs(self, turns: int) -> None:
        """Wait until so many turns run."""

        async def so_many() -> bool:
            return (await self.status()).turns_running == turns

        await eventually(so_many)

    async def leases(self, sessions: int) -> None:
        """Wait until so many sessions have no stream."""

        async def so_many() -> bool:
            return (await self.status()).sessions_leased == sessions

        await eventually(so_many)

    def probe(self, name: str) -> Any:
        """The class of one of the test's own tools, in plugins/, with what it counts."""
        return self.server.registry.get_tool(name).tool

    async def call(self, tool: str, text: str, context: Mapping[str, Any] | None = None, **fields: Any) -> Any:
        """Execute one action that stands between the tool's tags; its only observation."""
        request = tool_pb2.ExecuteRequest(tool=binding(tool, context), text=f"<{tool}>{text}</{tool}>", **fields)
        (observation,) = (await self.stub.Execute(request, timeout=PATIENCE)).observations
        return observation


class Trajectory:
    """One Interact stream."""

    def __init__(self, service: Service, trajectory_id: str = "t", key: str = "k") -> None:
        self.service, self.id, self.key = service, trajectory_id, key
        self.call = service.stub.Interact()

    async def send(self, **message: Any) -> None:
        await self.call.write(tool_pb2.InteractRequest(**message))

    async def receive(self, patience: float = PATIENCE) -> tool_pb2.InteractResponse:
        """The next message. Raises AioRpcError when the stream ends with an error, EOFError when it ends without."""
        response = await asyncio.wait_for(self.call.read(), patience)
        if response is grpc.aio.EOF:
            raise EOFError
        return response

    async def open(self, *tools: str | common_pb2.ToolBinding, turns_done: int = 0, **limits: Any) -> tool_pb2.Opened:
        bound = [tool if isinstance(tool, common_pb2.ToolBinding) else binding(tool) for tool in tools]
        message = tool_pb2.Open(
            trajectory_id=self.id,
            session_key=self.key,
            tools=bound,
            turns_done=turns_done,
            limits=tool_pb2.TrajectoryLimits(**limits),
        )
        await self.send(open=message)
        return (await self.receive()).opened

    async def act(self, turn: int, text: str, patience: float = PATIENCE, **fields: Any) -> tool_pb2.ObservationTurn:
        await self.send(action=tool_pb2.ActionTurn(turn=turn, text=text, **fields))
        return (await self.receive(patience)).observation

    async def close(self) -> tool_pb2.Closed:
        await self.send(close=tool_pb2.Close())
        closed = (await self.receive()).closed
        assert await self.call.read() is grpc.aio.EOF
        return closed

    async def code(self) -> grpc.StatusCode:
        """The status with which the stream ends."""
        return await asyncio.wait_for(self.call.code(), PATIENCE)


def binding(tool: str, context: Mapping[str, Any] | None = None) -> common_pb2.ToolBinding:
    bound = common_pb2.ToolBinding(name=tool)
    fill_struct(bound.context, context or {})
    return bound


def texts(answer: Any) -> list[str]:
    """The texts of an answer's observations."""
    return [text_of(observation) for observation in answer.observations]


def text_of(observation: tool_pb2.Observation) -> str:
    return "".join(part.text for part in observation.content)


def error_of(observation: tool_pb2.Observation) -> str:
    """The error's name without its prefix; empty for an ordinary result."""
    name = common_pb2.ErrorKind.Name(observation.error)
    return "" if observation.error == 0 else name.removeprefix("ERROR_KIND_")


def retry_seconds(error: grpc.aio.AioRpcError) -> float:
    """The delay after which a refused caller is told to come back."""
    status = rpc_status.from_call(error)
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    return retry.retry_delay.ToTimedelta().total_seconds()


@contextlib.asynccontextmanager
async def running(config: ToolServiceConfig) -> AsyncIterator[Service]:
    """Serve on a free port. On leaving, nothing of the service may be left in this process."""
    tasks = set(asyncio.all_tasks())
    processes = children()
    server = ToolServer(config)
    address = await server.start()
    channel = grpc.aio.insecure_channel(address)
    try:
        yield Service(server, channel)
    finally:
        await channel.close()
        await server.stop(0)
    await eventually(lambda: not {task for task in asyncio.all_tasks() - tasks if "tool_service" in repr(task)})
    await eventually(lambda: children() <= processes)


@contextlib.asynccontextmanager
async def nothing_left(service: Service) -> AsyncIterator[None]:
    """What happens inside must leave no session, sandbox, task, descriptor or process behind."""
    before = await _footprint(service)  # the first makes the connection, and whatever grpc makes once
    while (again := await _footprint(service)) != before:  # the test before may still be ending
        before = again
        await asyncio.sleep(0.05)
    yield
    await no_more(before, lambda: _footprint(service))


async def _footprint(service: Service) -> dict[str, int]:
    status = await service.status()
    return {
        "sessions": status.sessions_open + status.sessions_leased,
        "turns running": status.turns_running,
        "sandboxes in use": sum(pool.in_use for pool in status.pools),
        "sandboxes not ready": -sum(pool.ready for pool in status.pools),
        "waiting for a sandbox": sum(pool.waiting for pool in status.pools),
        "tasks": len(asyncio.all_tasks()),
        "descriptors": len(os.listdir("/proc/self/fd")) - _kept_connections(service),
        "processes": len(children()),
    }


def _kept_connections(service: Service) -> int:
    """Those of the Docker SDK to its engine: it keeps as many for later as it once used at the same time."""
    engine = getattr(service.server.sandboxes._backend, "_engine", None)
    if engine is None:  # another backend
        return 0
    pools = engine.client.get_adapter(engine.client.base_url).pools
    kept = [one for url in pools.keys() for one in pools[url].pool.queue]  # noqa: SIM118 - no mapping, and no iteration
    return sum(one is not None and one.sock is not None for one in kept)


def children() -> set[int]:
    """Processes below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}
