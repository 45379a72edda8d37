"""The production engine: vLLM's AsyncLLM behind `engines.base.Engine`. Nothing of vLLM's is written again here.

- Generation, continuous batching, the prefix cache and stop strings are vLLM's; logprobs are its `processed_logprobs`.
- Which version sampled a token is vLLM's own record, told with the last delta of a request.
- A weight update in mode KEEP freezes the running requests, clears every cache and goes on: vLLM computes their tokens
  again under the new weights, so a logprob is always that of one forward pass. WAIT lets them finish.
- Weights reach the workers as a file in shared memory, by the transfer engine of `vllm_transfer`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

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
from turnwire.errors import ExhaustedError, InfraError, UnavailableError, WrongOrderError
from turnwire.torch_weights import specs_of, write_file
from turnwire.v1 import rollout_pb2
from turnwire.weights import checksum

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it is ours alone


class VllmEngine:
    """See `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._counters = api.Counters()
        self._numbers = itertools.count()
        self._requests: set[str] = set()
        """At vLLM now."""
        self._paused = self._closing = False
        self._updating = asyncio.Lock()
        self._staging = TemporaryDirectory(prefix="turnwire-weights-", dir=SHARED_MEMORY)
        self._llm: api.AsyncLLM  # these from `start` on
        self._model: api.ModelFacts
        self._weights: WeightInfo

    async def start(self) -> None:
        self._llm = await asyncio.to_thread(api.load, self._config, self._counters)
        self._model = api.facts(self._llm)
        specs = await asyncio.to_thread(lambda: specs_of(api.checkpoint_tensors(self._config)))
        self._weights = WeightInfo(0, checksum(specs), specs)
        await api.begin(self._llm)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        await self._llm.abort(self._requests)
        await asyncio.to_thread(self._llm.shutdown, api.SHUTDOWN_SECONDS)
        del self._llm  # it shuts down once more when it goes, for which it needs a living interpreter
        self._staging.cleanup()

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
        async for output in self._outputs(job.prompt, sampling, job.request_id):
            completion = output.outputs[0]
            yield GenerateDelta(
                np.array(completion.token_ids, np.int32),
                _logprobs(completion, certain),
                tuple(_spans(completion.weight_versions)),
                _stop(completion),
            )

    async def _outputs(self, prompt: Ids, sampling: api.SamplingParams, name: str) -> AsyncIterator[Any]:
        """vLLM's outputs of one request, with errors of ours."""
        request = f"{name}-{next(self._numbers)}"  # the caller's may be there twice
        self._requests.add(request)
        try:
            async for output in self._llm.generate(api.tokens_input(prompt.tolist()), sampling, request):
                if self._closing:
                    raise UnavailableError("the engine is closed")
                yield output
        except api.EngineDeadError as error:
            if self._closing:
                raise UnavailableError("the engine is closed") from error
            raise InfraError("vLLM's engine process has died") from error
        except api.EngineGenerateError as error:
            raise InfraError(f"vLLM failed: {error.__cause__ or error}") from error
        finally:
            self._requests.discard(request)

    def _check(self, job: GenerateJob) -> None:
        if self._closing:
            raise UnavailableError("the engine is closed")
        check_job(job, self._model.longest, self._model.vocabulary)
        if len(self._requests) >= self._config.max_sequences + self._config.max_waiting:
            raise ExhaustedError(f"{len(self._requests)} requests are at the engine", retry_after=RETRY_SECONDS)

    async def score(self, sequences: Sequence[Ids]) -> ScoreResult:
        check_sequences(sequences, self._model.longest, self._model.vocabulary)
        if self._paused:
            raise WrongOrderError("vLLM computes nothing while it is paused; resume first")
        async with self._updating:
            results = await asyncio.gather(*(self._score(sequence) for sequence in sequences))
            return ScoreResult(results, self._weights.version)

    async def _score(self, sequence: Ids) -> Logprobs:
        if len(sequence) == 1:
            return np.zeros(0, np.float32)
        (output,) = [output async for output in self._outputs(sequence, api.scoring_params(), "score")]
        found = zip(sequence[1:].tolist(), output.prompt_logprobs[1:], strict=True)
        return np.array([row[token].logprob for token, row in found], np.float32)

    def release(self, sequence_key: str) -> None:
        """vLLM's prefix cache keeps what fits, whoever asks."""

    # -- control

    async def pause(self) -> None:
        async with self._updating:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self._paused = True

    async def resume(self) -> None:
        async with self._updating:
            self._paused = False
            await self._llm.resume_generation()

    def info(self) -> EngineInfo:
        counters = self._counters
        return EngineInfo(
            kind="vllm",
            model=self._config.model,
            max_model_tokens=self._model.longest,
            vocabulary=self._model.vocabulary,
            end_of_turn_ids=self._model.end_ids,
            paused=self._paused,
            running=counters.running if self._requests else 0,  # vLLM says nothing of a scheduler that is empty
            waiting=counters.waiting,
            tokens_generated=counters.generated,
            tokens_prefilled=counters.prefilled,
        )

    # -- weights

    async def weight_info(self) -> WeightInfo:
        return self._weights

    async def apply_weights(
        self,
        tensors: Mapping[str, torch.Tensor],
        specs: Sequence[rollout_pb2.TensorSpec],
        version: int,
        mode: UpdateMode,
    ) -> float:
        if self._updating.locked() and mode is UpdateMode.WAIT:
            raise WrongOrderError("another update waits for requests to finish")
        path = Path(self._staging.name) / f"{version}.safetensors"
        async with self._updating:
            if version == self._weights.version:
                raise WrongOrderError(f"the weights are at version {version} already")
            if mode is UpdateMode.WAIT and self._paused:
                raise WrongOrderError("the engine is paused, so nothing finishes; resume, or use KEEP")
            await asyncio.to_thread(write_file, path, tensors)
            try:
                return await self._replace(path, specs, version, mode)
            finally:
                path.unlink()

    async def _replace(
        self, path: Path, specs: Sequence[rollout_pb2.TensorSpec], version: int, mode: UpdateMode
    ) -> float:
        if mode is UpdateMode.WAIT:
            await self._llm.pause_generation(mode="wait", clear_cache=True)
        began = time.perf_counter()
        if mode is UpdateMode.KEEP:
            await self._llm.pause_generation(mode="keep", clear_cache=True)
        await api.update(self._llm, path, version)
        self._weights = WeightInfo(version, checksum(specs), list(specs))
        if not self._paused:
            await self._llm.resume_generation()
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
