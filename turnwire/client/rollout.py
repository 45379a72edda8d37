"""Client of the rollout service: trajectories as they happen, generation, and the weights of its policy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from turnwire import weights
from turnwire.client.channel import (
    UNARY_TIMEOUT,
    ServiceClient,
    call_error,
    duration,
    struct,
    translate,
    translated_stream,
)
from turnwire.client.tools import Tools, bindings
from turnwire.errors import InvalidRequestError, PermissionDeniedError, TurnwireError, UnauthenticatedError
from turnwire.security.config import PLAINTEXT, ConnectionSecurity
from turnwire.telemetry import tracing
from turnwire.tensors import from_tensor, to_tensor
from turnwire.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc

if TYPE_CHECKING:
    from turnwire.v1.rollout_pb2_grpc import RolloutServiceAsyncStub

Event = rollout_pb2.TurnFinished | rollout_pb2.Trajectory
"""What comes out of a rollout stream: each turn as it happens, and each trajectory when it has ended."""

WeightTensor = tuple[str, common_pb2.DataType.ValueType, Sequence[int], weights.Buffer]
"""Name, type, shape, and the bytes (row-major, little-endian) of one tensor."""

GENERATION_TIMEOUT = 600.0
WEIGHTS_TIMEOUT = 600.0


def rollout_task(
    trajectory_id: str,
    messages: str | Sequence[Mapping[str, Any]],
    tools: Tools = (),
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int = 0,
    seed: int | None = None,
    limits: rollout_pb2.RolloutLimits | None = None,
    answer_tags: tuple[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    adapter: str = "",
) -> rollout_pb2.RolloutTask:
    """A task from plain values: `messages` is the user's text, or a list of `{"role": …, "content": …}`, where the
    content is text, or a list of texts and images (`turnwire.v1.common_pb2.MediaPart`).

    `answer_tags` are the tags around a final answer, as `("<answer>", "</answer>")`; without them a turn without a tool
    call is the final answer. `adapter` is one of the service's LoRA adapters.
    """
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return rollout_pb2.RolloutTask(
        trajectory_id=trajectory_id,
        messages=[rollout_pb2.ChatMessage(role=item["role"], content=_content(item["content"])) for item in chat],
        tools=bindings(tools),
        sampling=common_pb2.SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
        limits=limits,
        final_answer=None
        if answer_tags is None
        else rollout_pb2.FinalAnswer(open=answer_tags[0], close=answer_tags[1]),
        metadata=struct(metadata),
        adapter=adapter,
        traceparent=tracing.traceparent(),
    )


def _content(content: str | Sequence[str | common_pb2.MediaPart]) -> list[common_pb2.ContentPart]:
    parts = [content] if isinstance(content, str) else content
    return [
        common_pb2.ContentPart(text=part) if isinstance(part, str) else common_pb2.ContentPart(image=part)
        for part in parts
    ]


def rollout_limits(
    *,
    max_turns: int = 0,
    max_action_tokens: int = 0,
    max_observation_tokens: int = 0,
    max_trajectory_tokens: int = 0,
    tool_timeout: float | None = None,
    trajectory_timeout: float | None = None,
) -> rollout_pb2.RolloutLimits:
    """Limits of a trajectory; what is left out takes the service's value. Timeouts are seconds."""
    return rollout_pb2.RolloutLimits(
        max_turns=max_turns,
        max_action_tokens=max_action_tokens,
        max_observation_tokens=max_observation_tokens,
        max_trajectory_tokens=max_trajectory_tokens,
        tool_timeout=duration(tool_timeout),
        trajectory_timeout=duration(trajectory_timeout),
    )


@dataclass(frozen=True)
class Generation:
    """New tokens: `token_ids` int32 [N] and `logprobs` float32 [N] of the sampling distribution."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    weight_spans: tuple[rollout_pb2.WeightSpan, ...]
    stop: rollout_pb2.GenerateStop.ValueType
    """Unspecified in the parts before the last."""


@dataclass(frozen=True)
class Scores:
    """`logprobs[i]` is float32 [T - 1] of sequence i; `version` are the weights that scored."""

    logprobs: tuple[npt.NDArray[np.float32], ...]
    version: int


class RolloutClient(ServiceClient):
    """Asynchronous client of the rollout service."""

    service = "turnwire.v1.RolloutService"
    title = "rollout service"

    def __init__(self, target: str | grpc.aio.Channel, security: ConnectionSecurity = PLAINTEXT) -> None:
        super().__init__(target, security)
        self._stub: RolloutServiceAsyncStub = rollout_pb2_grpc.RolloutServiceStub(self.channel)

    def rollouts(self) -> RolloutStream:
        """A stream of tasks in and events out. Use it with `async with`."""
        return RolloutStream(self._stub.Rollout(), self.peer)

    async def run(self, tasks: Iterable[rollout_pb2.RolloutTask]) -> AsyncIterator[Event]:
        """The events of these tasks, as they happen; ends when every trajectory has ended."""
        async with self.rollouts() as stream:

            async def feed() -> None:
                for task in tasks:
                    await stream.submit(task)
                await stream.finish()

            feeding = asyncio.create_task(feed())
            try:
                async for event in stream:
                    yield event
                await feeding
            finally:
                feeding.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await feeding

    async def generate_stream(
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
    ) -> AsyncIterator[Generation]:
        """New tokens as they come. The last part carries `stop`.

        `adapter` is one of the service's LoRA adapters; `images` are in the order of their placeholders in the prompt.
        """
        request = rollout_pb2.GenerateRequest(
            request_id=request_id,
            prompt_token_ids=to_tensor(np.asarray(prompt_token_ids, np.int32)),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_strings=stop_strings,
            stop_token_ids=stop_token_ids,
            adapter=adapter,
            images=images,
        )
        call = self._stub.Generate(request, timeout=timeout)
        try:
            async for part in translated_stream(call, self.peer):
                yield Generation(
                    from_tensor(part.token_ids, np.int32),
                    from_tensor(part.logprobs, np.float32),
                    tuple(part.weight_spans),
                    part.stop,
                )
        finally:
            call.cancel()

    async def generate(
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
        """All new tokens at once. `prompt_token_ids` are [T]."""
        parts = [
            part
            async for part in self.generate_stream(
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
        ]
        return Generation(
            np.concatenate([part.token_ids for part in parts] or [np.zeros(0, np.int32)]),
            np.concatenate([part.logprobs for part in parts] or [np.zeros(0, np.float32)]),
            tuple(_joined(span for part in parts for span in part.weight_spans)),
            parts[-1].stop if parts else rollout_pb2.GENERATE_STOP_UNSPECIFIED,
        )

    async def score(
        self, sequences: Iterable[Sequence[int] | npt.NDArray[np.integer[Any]]], timeout: float = GENERATION_TIMEOUT
    ) -> Scores:
        """Log-probability at temperature 1 of each token given those before it. Sequences are [T]."""
        request = rollout_pb2.ScoreRequest(sequences=[to_tensor(np.asarray(item, np.int32)) for item in sequences])
        answer = await self._unary(self._stub.Score(request, timeout=timeout, metadata=tracing.call_metadata()))
        return Scores(tuple(from_tensor(item, np.float32) for item in answer.logprobs), answer.version)

    async def update_weights(
        self,
        source: Path | Iterable[WeightTensor],
        version: int,
        *,
        mode: Literal["keep", "wait"] = "keep",
        specs: Sequence[rollout_pb2.TensorSpec] = (),
        timeout: float = WEIGHTS_TIMEOUT,
    ) -> rollout_pb2.UpdateWeightsResponse:
        """Give the policy new weights: tensors, sent in checksummed chunks, or a safetensors file that both sides see.

        `keep`: requests in flight go on under the new weights. `wait`: they finish first. `specs`: of the tensors,
        computed where they are not given; of a file, what it must hold, which else is taken as it is. The old weights
        stay whole if this fails. Tensors whose stream broke are sent from there on when the same update is asked for
        again.
        """
        update = rollout_pb2.WeightUpdate(
            version=version,
            mode=rollout_pb2.WEIGHT_UPDATE_MODE_KEEP if mode == "keep" else rollout_pb2.WEIGHT_UPDATE_MODE_WAIT,
        )
        if isinstance(source, Path):
            update.file.path = str(await asyncio.to_thread(source.absolute))
            update.tensors.extend(specs)
            return await self._update_weights(update, (), timeout)
        tensors = list(source)
        # The checksums of a large model take a while: not on the event loop.
        update.tensors.extend(
            specs or await asyncio.to_thread(lambda: [weights.tensor_spec(*tensor) for tensor in tensors])
        )
        partial = (await self.get_weight_info()).partial
        mine = (partial.version, partial.checksum) == (version, weights.checksum(update.tensors))
        update.stream.offset = partial.received_bytes if mine else 0
        return await self._update_weights(update, [data for _, _, _, data in tensors], timeout)

    async def _update_weights(
        self, update: rollout_pb2.WeightUpdate, buffers: Sequence[weights.Buffer], timeout: float
    ) -> rollout_pb2.UpdateWeightsResponse:
        call = self._stub.UpdateWeights(timeout=timeout, metadata=tracing.call_metadata())
        try:
            with contextlib.suppress(*_ENDED):  # early: awaiting the call tells why
                await call.write(rollout_pb2.UpdateWeightsRequest(update=update))
                for chunk in weights.chunks(buffers, first=update.stream.offset):
                    await call.write(rollout_pb2.UpdateWeightsRequest(chunk=chunk))
                await call.done_writing()
            return await call
        except grpc.aio.AioRpcError as error:
            raise await self._refusal() or translate(error, self.peer) from error
        finally:
            call.cancel()

    async def _refusal(self) -> TurnwireError | None:
        """Why we may not update weights, if that is so: a write that finds its stream refused loses the reason, an
        update that has nothing to write does not."""
        call = self._stub.UpdateWeights(timeout=UNARY_TIMEOUT)
        try:
            with contextlib.suppress(*_ENDED):
                await call.done_writing()
            await call
        except grpc.aio.AioRpcError as error:
            found = translate(error, self.peer)
            return found if isinstance(found, UnauthenticatedError | PermissionDeniedError) else None
        return None

    async def get_weight_info(self, timeout: float = UNARY_TIMEOUT) -> rollout_pb2.GetWeightInfoResponse:
        """Version, checksum and tensors of the weights that the engine holds."""
        return await self._unary(self._stub.GetWeightInfo(rollout_pb2.GetWeightInfoRequest(), timeout=timeout))

    async def pause(self, timeout: float = UNARY_TIMEOUT) -> None:
        """Hold generation where it stands."""
        await self._unary(self._stub.Pause(rollout_pb2.PauseRequest(), timeout=timeout))

    async def resume(self, timeout: float = UNARY_TIMEOUT) -> None:
        """Go on after `pause`."""
        await self._unary(self._stub.Resume(rollout_pb2.ResumeRequest(), timeout=timeout))

    async def get_server_info(self, timeout: float = UNARY_TIMEOUT) -> rollout_pb2.GetServerInfoResponse:
        """Engine, model, limits and load."""
        return await self._unary(self._stub.GetServerInfo(rollout_pb2.GetServerInfoRequest(), timeout=timeout))


_ENDED = (asyncio.InvalidStateError, grpc.aio.InternalError)
"""What a stream that has ended makes of who still writes, or says that nothing more comes."""


def _joined(spans: Iterable[rollout_pb2.WeightSpan]) -> list[rollout_pb2.WeightSpan]:
    """Neighbouring spans of one version made one."""
    result: list[rollout_pb2.WeightSpan] = []
    for span in spans:
        if result and result[-1].version == span.version and result[-1].end == span.start:
            result[-1].end = span.end
        else:
            result.append(rollout_pb2.WeightSpan(start=span.start, end=span.end, version=span.version))
    return result


class RolloutStream:
    """Tasks in, events out, in any order. Read and submit from different tasks: `submit` waits while the service has as
    many trajectories in flight as it may, and the service waits while its events are not read.

    A lost stream is not taken up again: its trajectories are gone, and what is raised says why.
    """

    def __init__(self, call: Any, peer: str) -> None:
        self._call, self._peer = call, peer
        self._write_lock = asyncio.Lock()

    async def submit(self, task: rollout_pb2.RolloutTask) -> None:
        """Hand in a task; waits while the service takes no more."""
        await self._write(rollout_pb2.RolloutRequest(task=task))

    async def cancel(self, trajectory_id: str) -> None:
        """Ask for the end of a trajectory; it comes out with the stop reason CANCELLED."""
        cancel = rollout_pb2.CancelTrajectory(trajectory_id=trajectory_id)
        await self._write(rollout_pb2.RolloutRequest(cancel=cancel))

    async def finish(self) -> None:
        """No more tasks: the stream ends when the trajectories in flight have ended."""
        async with self._write_lock:
            with contextlib.suppress(*_ENDED):
                await self._call.done_writing()

    async def _write(self, request: rollout_pb2.RolloutRequest) -> None:
        try:
            async with self._write_lock:
                await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._peer) from error
        except asyncio.InvalidStateError as error:
            raise await call_error(self._call, self._peer) from error

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for response in translated_stream(self._call, self._peer):
            kind = response.WhichOneof("event")
            if kind is None:
                raise InvalidRequestError(f"{self._peer} sent an event of a newer version")
            yield getattr(response, kind)

    async def close(self) -> None:
        """End the stream now; trajectories in flight are cancelled."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
