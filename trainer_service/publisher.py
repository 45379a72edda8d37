"""New weights to the engine, and the canary that proves they arrived.

Invariants:

- Each push has a version that the engine has not seen, above what it holds: the run's version is the number of updates
  done, the engine's is that plus an offset fixed when the run starts or resumes.
- The engine's checksum over all tensors must be ours.
- The canary compares log-probabilities of fixed tokens, engine against trainer. Past the tolerance the run stops.
- An engine that comes back with other weights (it restarted) gets the current ones before it generates.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from trainer_service.config import SHARED_MEMORY, WeightsConfig
from trainer_service.policy import Policy
from turnwire.client.rollout import RolloutClient
from turnwire.errors import DeadlineError, ExhaustedError, InternalError, TurnwireError, UnavailableError
from turnwire.torch_weights import specs_of, weight_tensors, write_file
from turnwire.v1 import rollout_pb2
from turnwire.weights import checksum

logger = logging.getLogger(__name__)

T = TypeVar("T")
Compute = Callable[..., Awaitable[Any]]
"""Runs a function in the worker thread."""

_TOLERANCES = {torch.float32: (1e-3, 1e-2), torch.bfloat16: (0.05, 1.0)}


UNREACHABLE = (UnavailableError, DeadlineError, ExhaustedError)
"""What a service that is away or stands still makes of calls, and what passes."""


class WeightsError(TurnwireError):
    """The engine does not compute what the trainer computes."""


@dataclass(frozen=True)
class _Exported:
    """Weights as they were at one version, in memory or in a file, kept for an engine that loses them."""

    version: int
    weights: dict[str, torch.Tensor] | Path
    specs: list[rollout_pb2.TensorSpec]
    checksum: str


class WeightPublisher:
    """Pushes a policy's weights. `step` is always the number of updates done."""

    def __init__(
        self,
        client: RolloutClient,
        policy: Policy,
        config: WeightsConfig,
        *,
        folder: Path,
        compute: Compute,
        notify: Callable[[str], None],
        stopping: asyncio.Event,
    ) -> None:
        """`stopping`: once it is set, a service that cannot be reached is waited for no longer; see `UNREACHABLE`."""
        self._client, self._policy, self._config = client, policy, config
        self._folder = SHARED_MEMORY if config.transport == "shm" else Path(config.folder or folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        which = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]  # runs of two folders share a name
        self._file_prefix = f"{folder.name}-{which}-weights-"
        self.close()  # for a process of this run that was killed
        self._compute, self._notify, self._stopping = compute, notify, stopping
        self._offset = 0
        self._exported: _Exported | None = None
        self._sending = asyncio.Lock()
        rng = np.random.default_rng(0)
        size = int(policy.model.get_input_embeddings().num_embeddings)
        self._canaries = rng.integers(0, size, (config.canary_sequences, config.canary_tokens), dtype=np.int32)

    async def start(self, step: int) -> None:
        """Learn what the engine holds, and choose versions above it; waits until the service is there."""
        info = await self._patiently(self._client.get_weight_info)
        self._offset = max(info.version + 1 - step, 0)
        await self.push(step)

    def updates_at(self, version: int) -> int:
        """Updates that had been done when the engine got this version; below 0 for weights that were not ours."""
        return version - self._offset

    def close(self) -> None:
        """Remove the files."""
        for name in (self._file_prefix, f".{self._file_prefix}"):
            for path in self._folder.glob(f"{name}*.safetensors*"):
                path.unlink()

    async def push(self, step: int) -> dict[str, float]:
        """Send the weights after `step` updates; waits out an unreachable service. Returns metrics."""
        started = time.monotonic()
        exported = await self._compute(self._export, step + self._offset)
        former, self._exported = self._exported, exported
        async with self._sending:
            pause, sent = await self._patiently(lambda: self._send(exported))
        if former is not None and isinstance(former.weights, Path):
            former.weights.unlink(missing_ok=True)
        return {"time/sync_seconds": time.monotonic() - started, "sync/pause_seconds": pause, "sync/bytes": sent}

    async def ensure_current(self) -> None:
        """Give the engine the current weights if it does not hold them."""
        if self._exported is None:
            return
        async with self._sending:  # not while newer ones are on their way
            info, ours = await self._client.get_weight_info(), self._exported
            if (info.version, info.checksum) != (ours.version, ours.checksum):
                self._notify(f"the engine holds version {info.version}; sending it version {ours.version} again")
                await self._send(ours)

    async def canary(self, step: int) -> dict[str, float]:
        """Compare engine and trainer on fixed tokens. Raises WeightsError past the tolerance; returns metrics."""
        if self._config.canary_every == 0 or step % self._config.canary_every:
            return {}
        assert self._exported is not None  # noqa: S101 - `push` came first
        scores = await self._patiently(lambda: self._client.score(list(self._canaries)))
        if scores.version != self._exported.version:  # it restarted since the push
            await self._patiently(self.ensure_current)
            scores = await self._patiently(lambda: self._client.score(list(self._canaries)))
        own = await self._compute(self._policy.score, list(self._canaries))
        gaps = np.abs(np.concatenate(scores.logprobs) - np.concatenate(own))
        mean, worst = float(gaps.mean()), float(gaps.max())
        mean_limit, worst_limit = _TOLERANCES[self._policy.dtype]
        mean_limit, worst_limit = self._config.canary_mean or mean_limit, self._config.canary_worst or worst_limit
        if not (mean <= mean_limit and worst <= worst_limit):  # so that NaN is past it
            info, ours = await self._client.get_weight_info(), self._exported
            raise WeightsError(
                f"after update {step} the engine's logprobs are {mean:.3g} off on average and {worst:.3g} at worst "
                f"(allowed: {mean_limit:g} and {worst_limit:g}). "
                f"Engine: version {info.version}, checksum {info.checksum}; "
                f"trainer: version {ours.version}, checksum {ours.checksum}. Do both have the same model and dtype?"
            )
        share = max(mean / mean_limit, worst / worst_limit)
        return {"canary/mean_gap": mean, "canary/worst_gap": worst, "canary/share_of_limit": share}

    def _export(self, version: int) -> _Exported:
        tensors = self._policy.export()
        specs = specs_of(tensors)
        if self._config.transport == "grpc":
            weights: dict[str, torch.Tensor] | Path = {name: tensor.clone() for name, tensor in tensors.items()}
        else:
            weights = self._folder / f"{self._file_prefix}{version}.safetensors"
            write_file(weights, tensors)
        return _Exported(version, weights, specs, checksum(specs))

    async def _send(self, exported: _Exported) -> tuple[float, float]:
        """Seconds that generation stood still, and bytes."""
        source = exported.weights if isinstance(exported.weights, Path) else weight_tensors(exported.weights)
        answer = await self._client.update_weights(source, exported.version, specs=exported.specs)
        if answer.checksum != exported.checksum:
            text = f"checksum {answer.checksum} at the engine, {exported.checksum} at the trainer"
            raise WeightsError(f"version {exported.version}: {text}")
        return answer.pause.ToTimedelta().total_seconds(), float(answer.bytes)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await a call again and again while the service cannot be reached, or is there and does not answer."""
        delay, told = 0.2, False
        while True:
            try:
                return await call()
            except (*UNREACHABLE, InternalError) as error:
                if self._stopping.is_set() or (isinstance(error, InternalError) and told):
                    raise  # a bug that shows twice is not an accident
                if not told:
                    self._notify(f"weights cannot be sent, waiting: {await self._client.refusal(error) or error}")
                    told = True
                await asyncio.sleep(delay)
                delay = min(3.0, delay * 2)
