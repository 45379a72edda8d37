"""The three real services in the test's process; `service_processes` has them in processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from trainer_harness import run_values

from rollout_service.build import build_service
from rollout_service.config import RolloutServiceConfig
from rollout_service.server import RolloutService
from tool_service.config import ToolServiceConfig
from tool_service.server import ToolServer
from trainer_service.config import TrainerServiceConfig
from trainer_service.server import create_server
from turnwire.client.trainer import TrainerClient
from turnwire.config import convert
from turnwire.serving import Server, ServerConfig
from turnwire.v1 import rollout_pb2_grpc, trainer_pb2

PLUGINS = Path(__file__).parent / "plugins"


def letters_run(model: Path, **sections: Any) -> dict[str, Any]:
    """A run whose reward a random policy can raise."""
    return run_values(model, **{"reward": {"name": "letters", "folders": [str(PLUGINS)]}, **sections})


@contextlib.asynccontextmanager
async def tool_service(port: int = 0) -> AsyncIterator[str]:
    """A tool service with the built-in tools."""
    values = {"server": {"port": port}, "sandbox": {"pool": {"ready": 1}}, "sessions": {"lease_seconds": 1}}
    service = ToolServer(convert(values, ToolServiceConfig))
    server = await service.prepare()
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)
        await service.close()


@contextlib.asynccontextmanager
async def rollout_service(
    model: Path, tools: str, port: int = 0, **settings: Any
) -> AsyncIterator[tuple[str, RolloutService]]:
    """A rollout service with the transformers engine."""
    values = {"tool_target": tools, "engine": {"model": str(model), "threads": 1}, **settings}
    service = build_service(convert(values, RolloutServiceConfig))
    await service.start()
    server = Server(ServerConfig(port=port), ["turnwire.v1.RolloutService"])
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server.grpc)
    await server.start()
    try:
        yield server.address, service
    finally:
        await server.stop(0)
        await service.close()


@contextlib.asynccontextmanager
async def trainer_service(
    rollout: str, folder: Path, tools: str = "", *, resume: bool = False
) -> AsyncIterator[TrainerClient]:
    """A trainer service in this process, and a client of it."""
    config = TrainerServiceConfig(rollout_target=rollout, tool_target=tools, runs_folder=str(folder), resume=resume)
    server, runs = create_server(config)
    await server.start()
    try:
        async with TrainerClient(server.address) as client:
            yield client
    finally:
        await runs.close()
        await server.stop(0)


@contextlib.asynccontextmanager
async def all_services(model: Path, folder: Path) -> AsyncIterator[tuple[TrainerClient, RolloutService]]:
    """All three in this process: a client of the trainer, and the rollout service to lay hands on."""
    async with (
        tool_service() as tools,
        rollout_service(model, tools) as (rollout, service),
        trainer_service(rollout, folder, tools) as client,
    ):
        yield client, service


async def watch(client: TrainerClient, run_id: str, first: int = 0) -> list[trainer_pb2.WatchRunResponse]:
    """All events of a run, to its end."""
    return [event async for event in client.watch_run(run_id, first)]


async def finished(client: TrainerClient, run_id: str, values: dict[str, Any]) -> list[trainer_pb2.WatchRunResponse]:
    """Start a run and wait for its end; the events."""
    await client.start_run(run_id, yaml.safe_dump(values))
    return await watch(client, run_id)


def last_state(events: list[trainer_pb2.WatchRunResponse]) -> tuple[str, str]:
    """How a run ended: its state's name and the detail."""
    state = [event.state for event in events if event.WhichOneof("event") == "state"][-1]
    return trainer_pb2.RunState.Name(state.state).removeprefix("RUN_STATE_"), state.detail


def notices(events: list[trainer_pb2.WatchRunResponse]) -> list[str]:
    """What people were told."""
    return [event.notice.text for event in events if event.WhichOneof("event") == "notice"]
