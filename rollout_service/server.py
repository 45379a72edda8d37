"""RolloutService over gRPC: a thin layer over the engine, the agent loop and the weight helpers."""

# ruff: noqa: N802 - methods are named as in the contract

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import numpy as np
from prometheus_client.core import Metric

from rollout_service.agent import Agent
from rollout_service.chat import Chat
from rollout_service.config import RolloutServiceConfig
from rollout_service.engines.base import Engine, GenerateJob, Ids, UpdateMode, WeightInfo
from rollout_service.rollouts import Admission, RolloutStream
from rollout_service.staging import Inbox, StagedWeights, staged_file
from rollout_service.task import MAX_STOPS, Task, check_stops, parse_sampling, parse_task
from rollout_service.telemetry import RolloutMetrics, state
from rollout_service.tools import ToolDirectory
from rollout_service.trajectory import GENERATE_STOPS, seconds, wire_spans
from turnwire.client.tools import ToolClient
from turnwire.errors import DeadlineError, ExhaustedError, InvalidRequestError, TurnwireError, WrongOrderError
from turnwire.telemetry.metrics import MetricsServer
from turnwire.tensors import from_tensor, to_tensor
from turnwire.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from turnwire.weights import CorruptTensorError, WeightsError, check_specs, checksum, tensor_bytes

logger = logging.getLogger(__name__)

MAX_SCORED_TOKENS = 1 << 20

DRAIN_SECONDS = 10.0
"""How long the rest of a refused update is still read, and thrown away."""

_MODALITIES = {"text": common_pb2.MODALITY_TEXT, "image": common_pb2.MODALITY_IMAGE}

T = TypeVar("T")

Context = grpc.aio.ServicerContext[Any, Any]


class RolloutService(rollout_pb2_grpc.RolloutServiceServicer):
    """See protos/turnwire/v1/rollout.proto. `start` before serving, `close` after."""

    def __init__(self, config: RolloutServiceConfig, engine: Engine, chat: Chat) -> None:
        self._config = config
        self._engine = engine
        self._chat = chat
        self._updating = False
        self._inbox = Inbox(config.update_idle_seconds)

    async def start(self, metrics: MetricsServer | None = None) -> None:
        """Load the engine. Raises ConfigError where it cannot run. `metrics`: where the service's are shown."""
        await self._engine.start()
        self._tools = ToolClient(self._config.tool_target, self._config.client) if self._config.tool_target else None
        self._directory = ToolDirectory(self._tools) if self._tools is not None else None
        if self._directory is not None:
            await self._directory.start()
        self._metrics = None if metrics is None else RolloutMetrics(metrics)
        self._agent = Agent(self._engine, self._chat, self._directory, self._metrics)
        self._admission = Admission(self._config.max_trajectories)
        self._version = (await self._engine.weight_info()).version
        if metrics is not None:
            metrics.export(self._state)
        self._longest = self._engine.info().max_model_tokens

    @property
    def trouble(self) -> str:
        """Why nothing is generated now, or nothing that uses tools, if that is so."""
        return self._engine.info().trouble or self._tools_trouble

    @property
    def _tools_trouble(self) -> str:
        return "" if self._directory is None else self._directory.trouble

    def _state(self) -> Iterable[Metric]:
        return state(self._engine.info(), self._admission, self._config.max_trajectories, self._version)

    async def drain(self) -> None:
        """Take no further tasks; what runs goes on."""
        self._admission.drain()

    async def close(self) -> None:
        """End everything."""
        self._inbox.drop()
        await self._engine.close()
        if self._directory is not None:
            await self._directory.close()
        if self._tools is not None:
            await self._tools.close()

    # -- trajectories

    async def Rollout(self, request_iterator: AsyncIterable[rollout_pb2.RolloutRequest], context: Context) -> None:  # type: ignore[override]
        """See the proto."""
        most, idle = self._config.max_trajectories_per_stream, self._config.stream_idle_seconds
        stream = RolloutStream(self._agent, self._tools, self._admission, self._parse, most=most, idle=idle)
        await stream.run(request_iterator, context.write)

    def _parse(self, message: rollout_pb2.RolloutTask) -> tuple[Task, Ids]:
        try:
            has_tools = self._tools is not None
            task = parse_task(message, self._config.limits, self._engine.info(), has_tools)
            if task.tools and self._tools_trouble:
                raise WrongOrderError(self._tools_trouble)
            return task, self._chat.prompt(task.messages)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"task {message.trajectory_id[:100]!r}: {error.message}") from error

    # -- generation

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """See the proto."""
        check_stops("stop_strings", request.stop_strings)
        _check_stop_ids(request.stop_token_ids, self._engine.info().vocabulary)
        job = GenerateJob(
            request.request_id,
            _ids(request.prompt_token_ids),
            request.max_tokens,
            parse_sampling(request.sampling),
            tuple(request.stop_strings),
            frozenset(request.stop_token_ids),
            stream=True,
            adapter=request.adapter,
            images=tuple(request.images),
        )
        async for delta in self._engine.generate(job):
            yield rollout_pb2.GenerateResponse(
                token_ids=to_tensor(delta.token_ids),
                logprobs=to_tensor(delta.logprobs),
                weight_spans=wire_spans(delta.spans),
                stop=rollout_pb2.GENERATE_STOP_UNSPECIFIED if delta.stop is None else GENERATE_STOPS[delta.stop],
            )

    async def Score(self, request: rollout_pb2.ScoreRequest, context: Context) -> rollout_pb2.ScoreResponse:
        """See the proto."""
        sequences = [_ids(sequence) for sequence in request.sequences]
        if sum(map(len, sequences)) > MAX_SCORED_TOKENS:
            raise ExhaustedError(f"at most {MAX_SCORED_TOKENS} tokens are scored at once")
        result = await self._engine.score(sequences)
        return rollout_pb2.ScoreResponse(logprobs=[to_tensor(item) for item in result.logprobs], version=result.version)

    # -- weights

    async def UpdateWeights(
        self, request_iterator: AsyncIterable[rollout_pb2.UpdateWeightsRequest], context: Context
    ) -> rollout_pb2.UpdateWeightsResponse:
        """See the proto."""
        requests = aiter(request_iterator)
        try:
            if self._updating:
                raise ExhaustedError("another update is in progress", retry_after=1.0)
            self._updating, begin = True, time.monotonic()
            try:
                answer = await self._update(_talking(requests, self._config.update_idle_seconds))
            finally:
                self._updating = False
            self._version = answer.version
            if self._metrics is not None:
                pause = answer.pause.ToTimedelta().total_seconds()
                self._metrics.updated(time.monotonic() - begin, pause)
            return answer  # noqa: TRY300 - what is raised before it is drained
        except DeadlineError:
            raise
        except TurnwireError:
            # A client that is cut off while it writes sees an internal error of gRPC instead of the status.
            with contextlib.suppress(TimeoutError, TurnwireError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    async for _ in requests:
                        pass
            raise

    async def _update(
        self, requests: AsyncIterator[rollout_pb2.UpdateWeightsRequest]
    ) -> rollout_pb2.UpdateWeightsResponse:
        first = await anext(requests, None)
        if first is None or not first.HasField("update"):
            raise WrongOrderError("the first message must be a WeightUpdate")
        update, current = first.update, await self._engine.weight_info()
        if update.mode not in rollout_pb2.WeightUpdateMode.values():
            raise InvalidRequestError(f"this service has no weight update mode {update.mode}")
        source = update.WhichOneof("source")
        if source == "stream":
            check_specs(current.specs, update.tensors)
            staged = await self._receive(update, requests)
        elif source == "file":
            staged = await asyncio.to_thread(staged_file, Path(update.file.path))
        else:
            raise InvalidRequestError("WeightUpdate names no source")
        try:
            if source == "file":
                check_specs(current.specs, staged.specs)
                _check_file(staged.specs, list(update.tensors))
            return await self._put_in_place(staged, update, current)
        finally:
            staged.close()

    async def _put_in_place(
        self, staged: StagedWeights, update: rollout_pb2.WeightUpdate, current: WeightInfo
    ) -> rollout_pb2.UpdateWeightsResponse:
        total, pause = checksum(staged.specs), 0.0
        if update.version != current.version:
            mode = UpdateMode.WAIT if update.mode == rollout_pb2.WEIGHT_UPDATE_MODE_WAIT else UpdateMode.KEEP
            pause = await self._engine.apply_weights(staged, update.version, mode)
            logger.info("weights are at version %d, checksum %s", update.version, total)
        elif total != current.checksum:
            raise WrongOrderError(
                f"version {update.version} is in use with other weights; give new ones another version"
            )
        size = sum(tensor_bytes(spec.dtype, spec.shape) for spec in staged.specs)
        return rollout_pb2.UpdateWeightsResponse(
            version=update.version, checksum=total, pause=seconds(pause), bytes=size
        )

    async def _receive(
        self, update: rollout_pb2.WeightUpdate, requests: AsyncIterator[rollout_pb2.UpdateWeightsRequest]
    ) -> StagedWeights:
        incoming = self._inbox.open(update.version, update.tensors, update.stream.offset)
        try:
            async for request in requests:
                incoming.add(_chunk(request))
        except (WeightsError, WrongOrderError):
            self._inbox.drop()
            raise
        except BaseException:  # the stream broke
            self._inbox.keep()
            raise
        return self._inbox.finish()

    async def GetWeightInfo(
        self, request: rollout_pb2.GetWeightInfoRequest, context: Context
    ) -> rollout_pb2.GetWeightInfoResponse:
        """See the proto."""
        info = await self._engine.weight_info()
        return rollout_pb2.GetWeightInfoResponse(
            version=info.version, checksum=info.checksum, tensors=info.specs, partial=self._inbox.partial()
        )

    # -- control

    async def Pause(self, request: rollout_pb2.PauseRequest, context: Context) -> rollout_pb2.PauseResponse:
        """See the proto."""
        await self._engine.pause()
        return rollout_pb2.PauseResponse()

    async def Resume(self, request: rollout_pb2.ResumeRequest, context: Context) -> rollout_pb2.ResumeResponse:
        """See the proto."""
        await self._engine.resume()
        return rollout_pb2.ResumeResponse()

    async def GetServerInfo(
        self, request: rollout_pb2.GetServerInfoRequest, context: Context
    ) -> rollout_pb2.GetServerInfoResponse:
        """See the proto."""
        info, limits = self._engine.info(), self._config.limits
        return rollout_pb2.GetServerInfoResponse(
            engine=info.kind,
            model=info.model,
            paused=info.paused,
            max_trajectories_per_stream=self._config.max_trajectories_per_stream,
            max_trajectories=self._config.max_trajectories,
            trajectories_running=self._admission.running,
            requests_running=info.running,
            requests_waiting=info.waiting,
            tokens_generated_total=info.tokens_generated,
            tokens_prefilled_total=info.tokens_prefilled,
            max_model_tokens=info.max_model_tokens,
            adapters=info.adapters,
            modalities=[_MODALITIES[name] for name in info.modalities],
            default_limits=rollout_pb2.RolloutLimits(
                max_turns=limits.max_turns,
                max_action_tokens=limits.max_action_tokens,
                max_observation_tokens=limits.max_observation_tokens,
                max_trajectory_tokens=min(limits.max_trajectory_tokens or self._longest, self._longest),
                tool_timeout=seconds(limits.tool_timeout_seconds),
                trajectory_timeout=seconds(limits.trajectory_timeout_seconds),
            ),
        )


def _check_stop_ids(ids: Sequence[int], vocabulary: int) -> None:
    if len(ids) > MAX_STOPS or any(not 0 <= number < vocabulary for number in ids):
        raise InvalidRequestError(f"stop_token_ids may be {MAX_STOPS} ids in [0, {vocabulary})")


async def _talking(requests: AsyncIterator[T], seconds: float) -> AsyncIterator[T]:
    """The same, as long as no request is waited for longer than this. Raises DeadlineError."""
    while True:
        try:
            async with asyncio.timeout(seconds):
                request = await anext(requests)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise DeadlineError(
                f"nothing came for {seconds:g} s (update_idle_seconds); the update is dropped"
            ) from error
        yield request


def _ids(tensor: Any) -> Ids:
    ids: Ids = from_tensor(tensor, np.int32)
    if ids.ndim != 1:
        raise InvalidRequestError(f"token ids have shape {ids.shape}; they must be one row")
    return ids


def _chunk(request: rollout_pb2.UpdateWeightsRequest) -> rollout_pb2.WeightChunk:
    if not request.HasField("chunk"):
        raise WrongOrderError("after the WeightUpdate only WeightChunks may come")
    return request.chunk


def _check_file(found: list[rollout_pb2.TensorSpec], told: list[rollout_pb2.TensorSpec]) -> None:
    """Where the sender said what the file should hold, it must hold that."""
    if not told:
        return
    check_specs(found, told)
    crcs = {spec.name: spec.crc32 for spec in found}
    for spec in told:
        if crcs[spec.name] != spec.crc32:
            raise CorruptTensorError(f"{spec.name}: the file's CRC-32 is {crcs[spec.name]:08x}, not {spec.crc32:08x}")
