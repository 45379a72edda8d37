"""Blocking twins of the clients, for scripts and notebooks. Each call runs on a private event loop in a thread.

The signatures are those of the asynchronous clients. A KeyboardInterrupt cancels the call that is waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from turnwire.client.channel import UNARY_TIMEOUT
from turnwire.client.connection import AsyncConnection, connect_async
from turnwire.client.rollout import (
    GENERATION_TIMEOUT,
    WEIGHTS_TIMEOUT,
    Event,
    Generation,
    RolloutClient,
    Scores,
    WeightTensor,
)
from turnwire.client.tools import ToolClient, Tools, ToolSession
from turnwire.client.trainer import START_TIMEOUT, STOP_TIMEOUT, TrainerClient
from turnwire.security.config import PLAINTEXT, ConnectionSecurity
from turnwire.v1 import common_pb2, rollout_pb2, tool_pb2, trainer_pb2

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turnwire-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and wait for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, stream: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous generator, which is closed when the caller stops early."""

        async def step() -> T:
            return await anext(stream)

        async def close() -> None:
            if hasattr(stream, "aclose"):
                await stream.aclose()

        try:
            while True:
                try:
                    item = self.run(step())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self.run(close())

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingToolSession:
    """Blocking twin of `ToolSession`."""

    def __init__(self, session: ToolSession, loop: LoopThread) -> None:
        self._session, self._loop = session, loop
        self.trajectory_id = session.trajectory_id

    @property
    def turns_done(self) -> int:
        """Turns answered."""
        return self._session.turns_done

    def act(self, action: str | Sequence[tool_pb2.ToolCall], timeout: float | None = None) -> tool_pb2.ObservationTurn:
        """Send one turn, and wait for its observations."""
        return self._loop.run(self._session.act(action, timeout))

    def close(self) -> None:
        """Release everything the trajectory holds."""
        self._loop.run(self._session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BlockingToolClient:
    """Blocking twin of `ToolClient`."""

    def __init__(self, client: ToolClient, loop: LoopThread) -> None:
        self._client, self._loop = client, loop

    def list_tools(self, timeout: float = UNARY_TIMEOUT) -> list[tool_pb2.ToolInfo]:
        """What is registered, and whether it is healthy."""
        return self._loop.run(self._client.list_tools(timeout))

    def get_status(self, timeout: float = UNARY_TIMEOUT) -> tool_pb2.GetStatusResponse:
        """Sessions, turns, sandbox pools."""
        return self._loop.run(self._client.get_status(timeout))

    def execute(
        self,
        tool: str,
        action: str | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        max_observation_bytes: int = 0,
    ) -> tool_pb2.ExecuteResponse:
        """One action with no state kept."""
        return self._loop.run(
            self._client.execute(
                tool,
                action,
                arguments=arguments,
                context=context,
                timeout=timeout,
                max_observation_bytes=max_observation_bytes,
            )
        )

    def open(
        self,
        trajectory_id: str,
        tools: Tools,
        limits: tool_pb2.TrajectoryLimits | None = None,
        *,
        patience: float = 60.0,
    ) -> BlockingToolSession:
        """Open a trajectory's session; use it with `with`."""
        session = self._loop.run(self._client.open(trajectory_id, tools, limits, patience=patience))
        return BlockingToolSession(session, self._loop)


class BlockingRolloutClient:
    """Blocking twin of `RolloutClient`."""

    def __init__(self, client: RolloutClient, loop: LoopThread) -> None:
        self._client, self._loop = client, loop

    def run(self, tasks: Iterable[rollout_pb2.RolloutTask]) -> Iterator[Event]:
        """The events of these tasks, as they happen; ends when every trajectory has ended."""
        return self._loop.iterate(self._client.run(tasks))

    def generate(
        self,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        max_tokens: int,
        *,
        sampling: common_pb2.SamplingParams | None = None,
        stop_strings: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        request_id: str = "",
        adapter: str = "",
        images: Sequence[common_pb2.MediaPart] = (),
        timeout: float = GENERATION_TIMEOUT,
    ) -> Generation:
        """All new tokens at once."""
        return self._loop.run(
            self._client.generate(
                prompt_token_ids,
                max_tokens,
                sampling=sampling,
                stop_strings=stop_strings,
                stop_token_ids=stop_token_ids,
                request_id=request_id,
                adapter=adapter,
                images=images,
                timeout=timeout,
            )
        )

    def score(
        self, sequences: Iterable[Sequence[int] | npt.NDArray[np.integer[Any]]], timeout: float = GENERATION_TIMEOUT
    ) -> Scores:
        """Log-probability at temperature 1 of each token given those before it."""
        return self._loop.run(self._client.score(sequences, timeout))

    def update_weights(
        self,
        source: Path | Iterable[WeightTensor],
        version: int,
        *,
        mode: Literal["keep", "wait"] = "keep",
        specs: Sequence[rollout_pb2.TensorSpec] = (),
        timeout: float = WEIGHTS_TIMEOUT,
    ) -> rollout_pb2.UpdateWeightsResponse:
        """Give the policy new weights."""
        return self._loop.run(self._client.update_weights(source, version, mode=mode, specs=specs, timeout=timeout))

    def get_weight_info(self, timeout: float = UNARY_TIMEOUT) -> rollout_pb2.GetWeightInfoResponse:
        """Version, checksum and tensors of the weights that the engine holds."""
        return self._loop.run(self._client.get_weight_info(timeout))

    def pause(self, timeout: float = UNARY_TIMEOUT) -> None:
        """Hold generation where it stands."""
        self._loop.run(self._client.pause(timeout))

    def resume(self, timeout: float = UNARY_TIMEOUT) -> None:
        """Go on after `pause`."""
        self._loop.run(self._client.resume(timeout))

    def get_server_info(self, timeout: float = UNARY_TIMEOUT) -> rollout_pb2.GetServerInfoResponse:
        """Engine, model, limits and load."""
        return self._loop.run(self._client.get_server_info(timeout))


class BlockingTrainerClient:
    """Blocking twin of `TrainerClient`."""

    def __init__(self, client: TrainerClient, loop: LoopThread) -> None:
        self._client, self._loop = client, loop

    def start_run(self, run_id: str, config_yaml: str, timeout: float = START_TIMEOUT) -> trainer_pb2.Run:
        """Start a run, or resume it where a run of this id has ended."""
        return self._loop.run(self._client.start_run(run_id, config_yaml, timeout))

    def watch_run(
        self, run_id: str, from_sequence: int = 0, *, patience: float = 60.0
    ) -> Iterator[trainer_pb2.WatchRunResponse]:
        """The run's events from `from_sequence` on, then live, until the run ends."""
        return self._loop.iterate(self._client.watch_run(run_id, from_sequence, patience=patience))

    def get_run(self, run_id: str, timeout: float = UNARY_TIMEOUT) -> trainer_pb2.Run:
        """State of a run."""
        return self._loop.run(self._client.get_run(run_id, timeout))

    def list_runs(self, timeout: float = UNARY_TIMEOUT) -> list[trainer_pb2.Run]:
        """All runs in the trainer's folder of runs."""
        return self._loop.run(self._client.list_runs(timeout))

    def stop_run(self, run_id: str, timeout: float = STOP_TIMEOUT) -> trainer_pb2.Run:
        """End a run after its current step, with a checkpoint."""
        return self._loop.run(self._client.stop_run(run_id, timeout))


class Connection:
    """Blocking clients of the services whose addresses were given. Use it with `with`, or `close` it."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._loop = LoopThread()
        try:
            self._loop.run(connection.__aenter__())
        except BaseException:
            self._loop.stop()
            raise

    @property
    def tools(self) -> BlockingToolClient:
        """Client of the tool service."""
        return BlockingToolClient(self._connection.tools, self._loop)

    @property
    def rollout(self) -> BlockingRolloutClient:
        """Client of the rollout service."""
        return BlockingRolloutClient(self._connection.rollout, self._loop)

    @property
    def trainer(self) -> BlockingTrainerClient:
        """Client of the trainer service."""
        return BlockingTrainerClient(self._connection.trainer, self._loop)

    def close(self) -> None:
        """Close all channels, and end the thread."""
        self._loop.run(self._connection.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def connect(
    *,
    tools: str | None = None,
    rollout: str | None = None,
    trainer: str | None = None,
    security: ConnectionSecurity = PLAINTEXT,
    timeout: float = 10.0,
) -> Connection:
    """Blocking clients for `host:port` addresses: `with turnwire.connect(tools="127.0.0.1:50051") as there:`.

    `security`: how the services are known, and what is shown to them; without it, plaintext.
    Raises UnavailableError if a service does not serve within `timeout` seconds.
    """
    return Connection(connect_async(tools=tools, rollout=rollout, trainer=trainer, security=security, timeout=timeout))
