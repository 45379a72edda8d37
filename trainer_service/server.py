"""TrainerService over gRPC: a thin skin over `Runs`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from trainer_service.config import TrainerServiceConfig
from trainer_service.runs import Runs
from turnwire.serving import Server
from turnwire.v1 import trainer_pb2 as pb
from turnwire.v1 import trainer_pb2_grpc

SERVICE_NAME = "turnwire.v1.TrainerService"

_Context = grpc.aio.ServicerContext[Any, Any]


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Errors of `turnwire.errors` become statuses in the server's interceptor."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def StartRun(self, request: pb.StartRunRequest, context: _Context) -> pb.StartRunResponse:
        run = await self._runs.start(request.run_id, request.config_yaml)
        return pb.StartRunResponse(run=run.message())

    async def WatchRun(self, request: pb.WatchRunRequest, context: _Context) -> AsyncIterator[pb.WatchRunResponse]:
        async for event in self._runs.watch(request.run_id, request.from_sequence):
            yield event

    async def GetRun(self, request: pb.GetRunRequest, context: _Context) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=self._runs.get(request.run_id).message())

    async def ListRuns(self, request: pb.ListRunsRequest, context: _Context) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=[run.message() for run in self._runs.list()])

    async def StopRun(self, request: pb.StopRunRequest, context: _Context) -> pb.StopRunResponse:
        run = await self._runs.stop(request.run_id)
        return pb.StopRunResponse(run=run.message())


def create_server(config: TrainerServiceConfig) -> tuple[Server, Runs]:
    """A server that is not started, and its runs, to be closed at the end. Call it where the event loop runs."""
    server = Server(config.server, [SERVICE_NAME])
    runs = Runs(config)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(TrainerServicer(runs), server.grpc)
    return server, runs
