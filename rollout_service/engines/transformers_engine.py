"""The embedded engine: continuous batching over a transformers model on the CPU, for a machine without vLLM.

transformers' own continuous batching cannot do this job: it samples all requests from one generator (no seed a
request), has no weight update while requests run, and on the CPU its packed attention is over the whole cache; hence
the batching loop here. The model's code, its weights and its attention layers' projections are transformers' own.

One thread owns the model, the cache and the scheduler; the event loop talks to it through a queue of commands, which it
runs between steps, and hears from it once a step. So there are no locks, and an update is atomic by being a command.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer

from rollout_service.config import EngineConfig, default_threads
from rollout_service.engines.base import (
    EngineInfo,
    GenerateDelta,
    GenerateJob,
    Ids,
    ScoreResult,
    UpdateMode,
    WeightInfo,
)
from rollout_service.engines.requests import Request
from rollout_service.engines.rows import Rows
from rollout_service.engines.runner import Runner
from rollout_service.engines.sampling import sample
from rollout_service.engines.scheduler import Scheduler
from rollout_service.engines.slots import StepLayout
from rollout_service.engines.stops import StopTable
from rollout_service.engines.validation import check_job, check_sequences
from rollout_service.staging import StagedWeights
from turnwire.errors import (
    ExhaustedError,
    InfraError,
    TurnwireError,
    UnavailableError,
    WrongOrderError,
)
from turnwire.torch_weights import specs_of
from turnwire.v1 import rollout_pb2
from turnwire.weights import checksum

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 1.0


class TransformersEngine:
    """See `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._outbox: list[tuple[Request, GenerateDelta | TurnwireError]] = []
        self._paused = self._closing = False
        self._waiting_update: Callable[[], None] | None = None
        self._unadmitted = 0  # requests the thread has not taken into a row; the loop's count
        self._running = self._generated = self._prefilled = self._failures = 0
        self._loop: asyncio.AbstractEventLoop  # these five from `start` on
        self._runner: Runner
        self._stops: StopTable
        self._scheduler: Scheduler
        self._weights: WeightInfo

    # -- on the event loop

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._commands.put(lambda: self._answer(started, self._load))
        self._thread.start()
        await started

    async def close(self) -> None:
        self._closing = True
        self._commands.put(lambda: None)  # it may wait for one
        await asyncio.to_thread(self._thread.join)

    async def generate(self, job: GenerateJob) -> AsyncIterator[GenerateDelta]:
        request = self._accept(job)
        self._commands.put(lambda: self._scheduler.waiting.append(request))
        try:
            while True:
                delta = await request.queue.get()
                if isinstance(delta, TurnwireError):
                    raise delta
                yield delta
                if delta.stop is not None:
                    return
        finally:
            if not request.done:
                self._commands.put(lambda: self._cancel(request))

    def _accept(self, job: GenerateJob) -> Request:
        if self._closing:
            raise UnavailableError("the engine is closed")
        check_job(job, self._runner.longest, self._runner.vocabulary)
        if self._unadmitted >= self._config.max_waiting:
            raise ExhaustedError(f"{self._unadmitted} requests wait for the engine", retry_after=RETRY_SECONDS)
        self._unadmitted += 1
        request = Request(
            job, min(len(job.prompt) + job.max_tokens, self._runner.longest), self._runner.end_ids | job.stop_token_ids
        )
        if job.stop_strings:
            request.matcher = self._stops.matcher(job.stop_strings)
        return request

    async def score(self, sequences: Sequence[Ids]) -> ScoreResult:
        check_sequences(sequences, self._runner.longest, self._runner.vocabulary)
        return await self._ask(lambda: ScoreResult(self._runner.score(sequences), self._weights.version))

    def release(self, sequence_key: str) -> None:
        self._commands.put(lambda: self._scheduler.rows.release(sequence_key))

    async def pause(self) -> None:
        await self._ask(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._ask(lambda: self._set_paused(False))

    def info(self) -> EngineInfo:
        return EngineInfo(
            kind="transformers",
            model=self._config.model,
            max_model_tokens=self._runner.longest,
            vocabulary=self._runner.vocabulary,
            end_of_turn_ids=self._runner.end_ids,
            paused=self._paused,
            running=self._running,
            waiting=self._unadmitted,
            tokens_generated=self._generated,
            tokens_prefilled=self._prefilled,
            failures=self._failures,
        )

    async def weight_info(self) -> WeightInfo:
        return self._weights

    async def apply_weights(self, weights: StagedWeights, version: int, mode: UpdateMode) -> float:
        tensors, specs = weights.tensors(), weights.specs
        applied: asyncio.Future[float] = self._loop.create_future()

        def command() -> None:
            if version == self._weights.version:
                self._give(applied, WrongOrderError(f"the weights are at version {version} already"))
            elif mode is UpdateMode.WAIT and self._paused:
                self._give(applied, WrongOrderError("the engine is paused, so nothing finishes; resume, or use KEEP"))
            elif self._waiting_update is not None:
                self._give(applied, WrongOrderError("another update waits for requests to finish"))
            else:

                def apply() -> None:
                    if not applied.cancelled():  # else the caller has given up while the requests finished
                        self._answer(applied, lambda: self._apply(tensors, specs, version))

                if mode is UpdateMode.WAIT:
                    self._waiting_update = apply
                else:
                    apply()

        self._commands.put(command)
        return await applied

    def _deliver(self, outbox: list[tuple[Request, GenerateDelta | TurnwireError]], admitted: int) -> None:
        self._unadmitted -= admitted
        for request, item in outbox:
            request.queue.put_nowait(item)

    async def _ask(self, function: Callable[[], T]) -> T:
        if self._closing:
            raise UnavailableError("the engine is closed")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._commands.put(lambda: self._answer(answer, function))
        return await answer

    # -- on the engine's thread

    def _answer(self, future: asyncio.Future[T], function: Callable[[], T]) -> None:
        try:
            result: T | Exception = function()
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to who asked
            result = error
        self._give(future, result)

    def _give(self, future: asyncio.Future[Any], result: Any) -> None:
        def settle() -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        self._loop.call_soon_threadsafe(settle)

    def _load(self) -> None:
        torch.set_num_threads(self._config.threads or default_threads())
        self._runner = Runner(self._config)
        # A tokenizer of its own: one that two threads use at once fails now and then.
        tokenizer = AutoTokenizer.from_pretrained(self._config.model)
        self._stops = StopTable(tokenizer, self._runner.vocabulary)
        rows = Rows(self._config.cached_sequences, self._runner.longest, self._runner.cache)
        self._scheduler = Scheduler(rows, self._config.max_sequences, self._config.prefill_tokens_per_step)
        specs = specs_of(self._runner.weights)
        self._weights = WeightInfo(0, checksum(specs), specs)

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._closing:
                try:
                    if self._obey() and not self._paused and not self._closing:
                        self._step()
                except Exception as error:  # whatever broke, the requests must hear of it
                    logger.exception("a step failed")
                    self._failures += 1
                    self._fail_all(InfraError(f"the engine failed: {error}"))
                    self._scheduler.rows.invalidate()
            self._fail_all(UnavailableError("the engine is closed"))

    def _obey(self) -> bool:
        """Run the commands that are there; wait for one where there is nothing else to do."""
        busy = self._running or self._unadmitted or self._waiting_update
        if self._paused or not busy:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()
        return hasattr(self, "_scheduler")

    def _step(self) -> None:
        scheduler, rows = self._scheduler, self._scheduler.rows
        waiting = len(scheduler.waiting)
        if self._waiting_update is None:
            scheduler.admit()
        elif not rows.active:
            apply, self._waiting_update = self._waiting_update, None
            apply()
            return
        admitted = waiting - len(scheduler.waiting)
        step = scheduler.plan()
        if step is not None:
            lengths = rows.cached[step.decode_rows] + 1
            layout = StepLayout(
                rows.cache, step.decode_rows, lengths, step.chunks, self._runner.groups, self._runner.dtype
            )
            logits = self._runner.forward(step.ids, step.positions, step.wanted, layout)
            chosen = step.sample_rows
            tokens, logprobs = sample(
                logits, rows.temperature[chosen], rows.top_k[chosen], rows.top_p[chosen], scheduler.draw(step)
            )
            self._generated += len(chosen)
            self._prefilled += step.prefilled
            for row in scheduler.advance(step, tokens, logprobs):
                self._finish(row)
            for row in chosen.tolist():
                request = rows.request[row]
                if request is not None and request.job.stream:
                    self._outbox.append((request, request.delta(*scheduler.generated(row), None)))
        self._running = rows.active
        self._send(admitted)

    def _finish(self, row: int) -> None:
        request = self._scheduler.rows.request_of(row)
        request.done = True
        self._outbox.append((request, request.delta(*self._scheduler.generated(row), request.stop)))
        self._scheduler.rows.leave(row)

    def _send(self, admitted: int) -> None:
        if self._outbox or admitted:
            self._loop.call_soon_threadsafe(self._deliver, self._outbox, admitted)
            self._outbox = []

    def _cancel(self, request: Request) -> None:
        if request.done:
            return
        request.done = True
        rows = self._scheduler.rows
        if request in rows.request:
            rows.leave(rows.request.index(request))
            self._running = rows.active
        else:
            self._scheduler.waiting.remove(request)
            self._send(1)

    def _fail_all(self, error: TurnwireError) -> None:
        if not hasattr(self, "_scheduler"):
            return
        rows, waiting = self._scheduler.rows, self._scheduler.waiting
        failed = rows.requests()
        for row, request in enumerate(rows.request):
            if request is not None:
                rows.leave(row)
        if self._closing:
            failed += waiting
            self._send(len(waiting))
            waiting.clear()
        for request in failed:
            request.done = True
            self._outbox.append((request, error))
        self._running = 0
        self._send(0)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _apply(
        self, tensors: Mapping[str, torch.Tensor], specs: Sequence[rollout_pb2.TensorSpec], version: int
    ) -> float:
        began = time.perf_counter()
        self._runner.load(tensors)
        self._scheduler.new_weights(version)
        self._weights = WeightInfo(version, checksum(specs), list(specs))
        return time.perf_counter() - began
