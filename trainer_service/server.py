"""TrainerService over gRPC: a thin skin over `Runs`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc.aio

from trainer_service.config import TrainerServiceConfig
from trainer_service.runs import Runs
from trainer_service.telemetry import state
from turnwire.errors import InvalidRequestError
from turnwire.serving import Server
from turnwire.v1 import trainer_pb2 as pb
from turnwire.v1 import trainer_pb2_grpc

if TYPE_CHECKING:
    from trainer_service.ranks import Ranks

SERVICE_NAME = "turnwire.v1.TrainerService"

_Context = grpc.aio.ServicerContext[Any, Any]


MAX_CONFIG_BYTES = 128 * 1024
"""It is parsed on the event loop, while other clients wait."""

MAX_RUN_ID = 100


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Errors of `turnwire.errors` become statuses in the server's interceptor."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._starting = asyncio.Lock()

    async def StartRun(self, request: pb.StartRunRequest, context: _Context) -> pb.StartRunResponse:
        run_id = _run_id(request)
        if (size := len(request.config_yaml.encode())) > MAX_CONFIG_BYTES:
            raise InvalidRequestError(f"config_yaml has {size} bytes; it may have {MAX_CONFIG_BYTES}")
        async with self._starting:  # what a start finds out about other runs must still hold when its run begins
            run = await self._runs.start(run_id, request.config_yaml)
        return pb.StartRunResponse(run=run.message())

    async def WatchRun(self, request: pb.WatchRunRequest, context: _Context) -> AsyncIterator[pb.WatchRunResponse]:
        async for event in self._runs.watch(_run_id(request), request.from_sequence):
            yield event

    async def GetRun(self, request: pb.GetRunRequest, context: _Context) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=self._runs.get(_run_id(request)).message())

    async def ListRuns(self, request: pb.ListRunsRequest, context: _Context) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=[run.message() for run in self._runs.list()])

    async def StopRun(self, request: pb.StopRunRequest, context: _Context) -> pb.StopRunResponse:
        run = await self._runs.stop(_run_id(request))
        return pb.StopRunResponse(run=run.message())


def _run_id(request: pb.StartRunRequest | pb.WatchRunRequest | pb.GetRunRequest | pb.StopRunRequest) -> str:
    """The run that a request names. Which ids there may be is for `Runs` to say; this one keeps messages short."""
    if (size := len(request.run_id)) > MAX_RUN_ID:
        raise InvalidRequestError(f"run_id has {size} characters; it may have {MAX_RUN_ID}")
    return request.run_id


def create_server(config: TrainerServiceConfig, ranks: Ranks | None = None) -> tuple[Server, Runs]:
    """A server that is not started, and its runs, to be closed at the end. Call it where the event loop runs.

    `ranks`: the processes that work together, seen from rank 0; None: this one alone.
    """
    server = Server(config.server, [SERVICE_NAME])
    runs = Runs(config, ranks)
    if server.metrics is not None:
        server.metrics.export(lambda: state(runs))
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(TrainerServicer(runs), server.grpc)
    return server, runs
