"""Client of the trainer service: start, watch and stop runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc.aio

from turnwire.client.channel import UNARY_TIMEOUT, Backoff, ServiceClient, translated_stream
from turnwire.errors import CancelledByPeerError, UnavailableError
from turnwire.security.config import PLAINTEXT, ConnectionSecurity
from turnwire.v1 import trainer_pb2, trainer_pb2_grpc

if TYPE_CHECKING:
    from turnwire.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

START_TIMEOUT = 120.0
STOP_TIMEOUT = 600.0

ENDED = frozenset({trainer_pb2.RUN_STATE_FINISHED, trainer_pb2.RUN_STATE_STOPPED, trainer_pb2.RUN_STATE_FAILED})
"""States that a run does not leave by itself."""


class TrainerClient(ServiceClient):
    """Asynchronous client of the trainer service."""

    service = "turnwire.v1.TrainerService"
    title = "trainer service"

    def __init__(self, target: str | grpc.aio.Channel, security: ConnectionSecurity = PLAINTEXT) -> None:
        super().__init__(target, security)
        self._stub: TrainerServiceAsyncStub = trainer_pb2_grpc.TrainerServiceStub(self.channel)

    async def start_run(self, run_id: str, config_yaml: str, timeout: float = START_TIMEOUT) -> trainer_pb2.Run:
        """Start a run, or resume it where a run of this id has ended. Raises ConfigError with all that is wrong."""
        request = trainer_pb2.StartRunRequest(run_id=run_id, config_yaml=config_yaml)
        return (await self._unary(self._stub.StartRun(request, timeout=timeout))).run

    async def watch_run(
        self, run_id: str, from_sequence: int = 0, *, patience: float = 60.0
    ) -> AsyncIterator[trainer_pb2.WatchRunResponse]:
        """The run's events from `from_sequence` on (0: all that are kept), then live, until the run ends.

        A lost connection is taken up again after the last event seen, for `patience` seconds; then UnavailableError.
        """
        backoff = Backoff(patience)
        while True:
            request = trainer_pb2.WatchRunRequest(run_id=run_id, from_sequence=from_sequence)
            call = self._stub.WatchRun(request)
            try:
                async for event in translated_stream(call, self.peer):
                    backoff = Backoff(patience)
                    from_sequence = event.sequence + 1
                    yield event
            except (UnavailableError, CancelledByPeerError) as error:
                await backoff.pause(error)
            else:
                return
            finally:
                call.cancel()

    async def get_run(self, run_id: str, timeout: float = UNARY_TIMEOUT) -> trainer_pb2.Run:
        """State of a run. Raises NotFoundError."""
        return (await self._unary(self._stub.GetRun(trainer_pb2.GetRunRequest(run_id=run_id), timeout=timeout))).run

    async def list_runs(self, timeout: float = UNARY_TIMEOUT) -> list[trainer_pb2.Run]:
        """All runs in the trainer's folder of runs."""
        return list((await self._unary(self._stub.ListRuns(trainer_pb2.ListRunsRequest(), timeout=timeout))).runs)

    async def stop_run(self, run_id: str, timeout: float = STOP_TIMEOUT) -> trainer_pb2.Run:
        """End a run after its current step, with a checkpoint."""
        return (await self._unary(self._stub.StopRun(trainer_pb2.StopRunRequest(run_id=run_id), timeout=timeout))).run
