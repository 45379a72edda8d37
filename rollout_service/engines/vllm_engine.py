"""The production engine: vLLM's AsyncLLM behind `engines.base.Engine`. Nothing of vLLM's is written again here.

- Generation, continuous batching, the prefix cache and stop strings are vLLM's; logprobs are its `processed_logprobs`.
- Which version sampled a token is vLLM's own record, told with the last delta of a request.
- A weight update in mode KEEP freezes the running requests, clears every cache and goes on: vLLM computes their tokens
  again under the new weights, so a logprob is always that of one forward pass. WAIT lets them finish.
- Weights reach the workers as a file that is held open, by the transfer engine of `vllm_transfer`.
- vLLM runs in processes of its own. When one dies, the requests it had fail (InfraError), vLLM is started again with
  the current weights, and requests that come meanwhile wait for it. So it is, too, where an update fails half-way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from rollout_service.config import EngineConfig
from rollout_service.engines import vllm_api as api
from rollout_service.engines.base import (
    EngineInfo,
    GenerateDelta,
    GenerateJob,
    GenerateStop,
    Ids,
    Logprobs,
    ScoreResult,
    UpdateMode,
    VersionSpan,
    WeightInfo,
)
from rollout_service.engines.validation import check_job, check_sequences
from rollout_service.media import decode_images
from rollout_service.staging import StagedWeights
from turnwire.errors import ExhaustedError, InfraError, InvalidRequestError, UnavailableError, WrongOrderError
from turnwire.torch_weights import specs_of
from turnwire.v1 import common_pb2
from turnwire.weights import checksum

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 1.0
_FIRST_RESTART, _LAST_RESTART = 1.0, 60.0
"""Seconds between attempts to start vLLM again."""


class VllmEngine:
    """See `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._adapters = api.adapter_requests(config)
        self._counters = api.Counters()
        self._numbers = itertools.count()
        self._requests: set[str] = set()
        """At vLLM now."""
        self._paused = False
        self._closing = asyncio.Event()
        self._failures = 0
        self._serving = asyncio.Event()
        """vLLM runs, with the current weights; or all is over."""
        self._changing = asyncio.Lock()
        """Held by what must not meet: updates, pauses, scores, restarts."""
        self._updates: set[asyncio.Task[float]] = set()
        self._staged: StagedWeights | None = None
        """The current weights, for a vLLM that is started again; none: the checkpoint's."""
        self._llm: api.AsyncLLM  # these from `start` on
        self._model: api.ModelFacts
        self._weights: WeightInfo
        self._keeper: asyncio.Task[None]

    async def start(self) -> None:
        specs = await asyncio.to_thread(lambda: specs_of(api.checkpoint_tensors(self._config)))
        self._weights = WeightInfo(0, checksum(specs), specs)
        await self._launch()
        self._keeper = asyncio.create_task(self._keep_running())

    async def _launch(self) -> None:
        """Start vLLM with the current weights. It is shut down where that fails."""
        self._llm = await asyncio.to_thread(api.load, self._config, self._counters)
        try:
            self._model = api.facts(self._llm)
            await self._while_alive(api.begin(self._llm, self._adapters.values()))
            if self._staged is not None:
                await asyncio.to_thread(self._staged.verify)
                await self._while_alive(api.update(self._llm, self._staged.path, self._weights.version))
            if self._paused:
                await self._while_alive(self._llm.pause_generation(mode="keep", clear_cache=False))
        except BaseException:  # also where the start is given up
            await asyncio.to_thread(api.shut_down, self._llm)
            raise
        self._serving.set()

    async def _keep_running(self) -> None:
        """Start vLLM again whenever it has died."""
        while not self._closing.is_set():
            await api.death(self._llm)
            if self._closing.is_set():
                return
            self._serving.clear()
            self._failures += 1
            logger.error("vLLM has died; starting it again, with weights of version %d", self._weights.version)
            async with self._changing:
                await self._launch_again()

    async def _launch_again(self) -> None:
        delay = _FIRST_RESTART
        await asyncio.to_thread(api.shut_down, self._llm)  # what is left of it
        while not self._closing.is_set():
            try:
                await self._launch()
            except Exception:  # whatever keeps it from starting may pass: memory, a device in use, a disk
                logger.exception("vLLM did not start; trying again in %g s", delay)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._closing.wait()
                delay = min(_LAST_RESTART, 2 * delay)
            else:
                logger.info("vLLM runs again, with weights of version %d", self._weights.version)
                return

    async def _while_alive(self, call: Coroutine[Any, Any, T]) -> T:
        """What a call of vLLM gives. vLLM itself never answers one that its process died under: raises InfraError."""
        calling, death = asyncio.ensure_future(call), asyncio.ensure_future(api.death(self._llm))
        try:
            await asyncio.wait((calling, death), return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise InfraError("vLLM's engine process has died")
        except api.EngineDeadError as error:
            raise InfraError("vLLM's engine process has died") from error
        finally:
            calling.cancel()
            death.cancel()

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """One at a time, and while vLLM runs. Raises UnavailableError where the engine was closed."""
        while True:
            await self._serving.wait()
            async with self._changing:
                if self._closing.is_set():
                    raise UnavailableError("the engine is closed")
                if self._serving.is_set():
                    yield
                    return

    async def _end(self) -> None:
        """End vLLM. It would never answer the requests that it has, so they are ended first."""
        if not self._closing.is_set():
            self._serving.clear()
        await self._llm.abort(self._requests)
        await asyncio.to_thread(api.shut_down, self._llm)

    async def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._serving.set()
        await self._end()
        await self._keeper  # it may have been starting another
        await self._end()
        del self._llm  # it shuts down once more when it goes, for which it needs a living interpreter
        if self._staged is not None:
            self._staged.close()

    # -- generation

    async def generate(self, job: GenerateJob) -> AsyncIterator[GenerateDelta]:
        self._check(job)
        sampling = api.sampling_params(
            job.sampling,
            max_tokens=min(job.max_tokens, self._model.longest - len(job.prompt)),
            stop_strings=job.stop_strings,
            stop_token_ids=job.stop_token_ids | self._model.end_ids,
            stream=job.stream,
        )
        certain = job.sampling.temperature == 0.0
        async for output in self._outputs(
            job.prompt, sampling, job.request_id, self._adapters.get(job.adapter), job.images
        ):
            completion = output.outputs[0]
            yield GenerateDelta(
                np.array(completion.token_ids, np.int32),
                _logprobs(completion, certain),
                tuple(_spans(completion.weight_versions)),
                _stop(completion),
                len(output.prompt_token_ids) - len(job.prompt),
            )

    async def _outputs(
        self,
        prompt: Ids,
        sampling: api.SamplingParams,
        name: str,
        adapter: api.LoRARequest | None = None,
        images: Sequence[common_pb2.MediaPart] = (),
        *,
        waits: bool = True,
    ) -> AsyncIterator[Any]:
        """vLLM's outputs of one request, with errors of ours. `waits`: for a vLLM that is being started."""
        request = f"{name}-{next(self._numbers)}"  # the caller's may be there twice
        self._requests.add(request)
        try:
            if waits:
                await self._serving.wait()
            if self._closing.is_set():
                raise UnavailableError("the engine is closed")
            llm = self._llm
            inputs = api.tokens_input(prompt.tolist()) if not images else await self._with_images(prompt, images)
            async for output in llm.generate(inputs, sampling, request, lora_request=adapter):
                if self._closing.is_set():
                    raise UnavailableError("the engine is closed")
                yield output
        except api.EngineDeadError as error:
            if self._closing.is_set():
                raise UnavailableError("the engine is closed") from error
            if llm is self._llm:
                self._serving.clear()  # the next ones wait
            raise InfraError("vLLM's engine process has died") from error
        except api.EngineGenerateError as error:
            raise InfraError(f"vLLM failed: {error.__cause__ or error}") from error
        finally:
            self._requests.discard(request)

    async def _with_images(self, prompt: Ids, images: Sequence[common_pb2.MediaPart]) -> Any:
        decoded = await asyncio.to_thread(decode_images, images)
        inputs = await api.image_inputs(self._llm, prompt.tolist(), decoded)
        if (size := len(inputs["prompt_token_ids"])) >= self._model.longest:
            raise InvalidRequestError(
                f"with its images the prompt has {size} tokens; it must leave room in {self._model.longest}"
            )
        return inputs

    def _check(self, job: GenerateJob) -> None:
        if self._closing.is_set():
            raise UnavailableError("the engine is closed")
        check_job(job, self._model.longest, self._model.vocabulary, self._adapters, self._model.modalities)
        if len(self._requests) >= self._config.max_sequences + self._config.max_waiting:
            raise ExhaustedError(f"{len(self._requests)} requests are at the engine", retry_after=RETRY_SECONDS)

    async def score(self, sequences: Sequence[Ids]) -> ScoreResult:
        longest = self._model.longest - 1  # vLLM scores a prompt only where it may add a token to it
        check_sequences(sequences, longest, self._model.vocabulary)
        if self._paused:
            raise WrongOrderError("vLLM computes nothing while it is paused; resume first")
        async with self._alone():
            results = await asyncio.gather(*(self._score(sequence) for sequence in sequences))
            return ScoreResult(results, self._weights.version)

    async def _score(self, sequence: Ids) -> Logprobs:
        if len(sequence) == 1:
            return np.zeros(0, np.float32)
        (output,) = [output async for output in self._outputs(sequence, api.scoring_params(), "score", waits=False)]
        found = zip(sequence[1:].tolist(), output.prompt_logprobs[1:], strict=True)
        return np.array([row[token].logprob for token, row in found], np.float32)

    def release(self, sequence_key: str) -> None:
        """vLLM's prefix cache keeps what fits, whoever asks."""

    # -- control

    async def pause(self) -> None:
        async with self._alone():
            await self._while_alive(self._llm.pause_generation(mode="keep", clear_cache=False))
            self._paused = True

    async def resume(self) -> None:
        async with self._alone():
            self._paused = False
            await self._while_alive(self._llm.resume_generation())

    def info(self) -> EngineInfo:
        counters = self._counters
        return EngineInfo(
            kind="vllm",
            model=self._config.model,
            max_model_tokens=self._model.longest,
            vocabulary=self._model.vocabulary,
            end_of_turn_ids=self._model.end_ids,
            adapters=tuple(self._adapters),
            modalities=self._model.modalities,
            paused=self._paused,
            running=counters.running if self._requests else 0,  # vLLM says nothing of a scheduler that is empty
            waiting=counters.waiting,
            tokens_generated=counters.generated,
            tokens_prefilled=counters.prefilled,
            failures=self._failures,
            trouble="" if self._serving.is_set() else "vLLM has died and is being started again",
        )

    # -- weights

    async def weight_info(self) -> WeightInfo:
        return self._weights

    async def apply_weights(self, weights: StagedWeights, version: int, mode: UpdateMode) -> float:
        if self._changing.locked() and mode is UpdateMode.WAIT:
            raise WrongOrderError("another update waits for requests to finish")
        begun = asyncio.Event()
        updating = asyncio.create_task(self._update(weights.share(), version, mode, begun))
        self._updates.add(updating)
        updating.add_done_callback(self._updates.discard)
        try:
            return await asyncio.shield(updating)
        except asyncio.CancelledError:
            if not begun.is_set():  # vLLM must not be left with half of it
                updating.cancel()
            raise

    async def _update(self, staged: StagedWeights, version: int, mode: UpdateMode, begun: asyncio.Event) -> float:
        try:
            async with self._alone():
                self._check_update(version, mode)
                if mode is UpdateMode.WAIT:
                    await self._drain()
                begun.set()
                return await self._replace(staged, version, mode)
        except BaseException:  # also where it is given up
            staged.close()
            raise

    def _check_update(self, version: int, mode: UpdateMode) -> None:
        if version == self._weights.version:
            raise WrongOrderError(f"the weights are at version {version} already")
        if mode is UpdateMode.WAIT and self._paused:
            raise WrongOrderError("the engine is paused, so nothing finishes; resume, or use KEEP")

    async def _drain(self) -> None:
        """Let the requests in flight finish, and hold others."""
        try:
            await self._while_alive(self._llm.pause_generation(mode="wait", clear_cache=True))
        except asyncio.CancelledError:
            with contextlib.suppress(InfraError):
                await self._while_alive(self._llm.resume_generation())
            raise

    async def _replace(self, staged: StagedWeights, version: int, mode: UpdateMode) -> float:
        """Keeps `staged`. Where it fails vLLM is ended, and so started again with the weights that it had."""
        began = time.perf_counter()
        try:
            if mode is UpdateMode.KEEP:
                await self._while_alive(self._llm.pause_generation(mode="keep", clear_cache=True))
            await self._while_alive(api.update(self._llm, staged.path, version))
            if not self._paused:
                await self._while_alive(self._llm.resume_generation())
        except Exception as error:  # of any kind: vLLM passes on what its workers raise
            await self._end()
            raise InfraError(
                f"version {version} could not be put in place, vLLM is started again with {self._weights.version}: "
                f"{error}"
            ) from error
        former, self._staged = self._staged, staged
        if former is not None:
            former.close()
        self._weights = WeightInfo(version, checksum(staged.specs), staged.specs)
        return time.perf_counter() - began


def _logprobs(completion: Any, certain: bool) -> Logprobs:
    """Of the tokens that were sampled. A greedy choice is certain: vLLM gives what a draw would have had."""
    if certain:
        return np.zeros(len(completion.token_ids), np.float32)
    rows = zip(completion.token_ids, completion.logprobs, strict=True)
    return np.array([row[token].logprob for token, row in rows], np.float32)


def _stop(completion: Any) -> GenerateStop | None:
    if completion.finish_reason is None:
        return None
    if completion.finish_reason == "length":
        return GenerateStop.LENGTH
    if completion.finish_reason == "stop":
        return GenerateStop.STRING if isinstance(completion.stop_reason, str) else GenerateStop.END_OF_TURN
    raise InfraError(f"vLLM ended a request as {completion.finish_reason}")


def _spans(versions: Sequence[Any] | None) -> list[VersionSpan]:
    return [VersionSpan(span.start, span.end, int(span.version)) for span in versions or () if span.end > span.start]
