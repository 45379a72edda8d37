"""The engine protocol: read this first, it explains all engines.

`tests/rollout/engine_conformance.py` holds each engine to it.

What every engine keeps:

1. Token ids in, token ids out. Nothing is decoded and tokenized again.
2. A token's logprob is that of the distribution it was sampled from: float32 logits, divided by the temperature, then
   cut to the top k, then to the top p. Greedy choice (temperature 0) is certain: 0.
3. Each sampled token is under exactly one weight version, and its logprob is that of a forward pass under this version
   over all tokens before it, also when the weights changed in the middle of a request.
4. With a seed, a request gives the same tokens whatever else is in the batch (up to float rounding at the edge of a
   token's probability).
5. A weight update is all or nothing: `apply_weights` gets tensors that are complete and verified
   (`rollout_service.staging`), and no step sees half of them.
6. What fails inside ends as `InfraError` at each request it hit, never as a short or made-up answer.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from turnwire.errors import InvalidRequestError

if TYPE_CHECKING:
    from rollout_service.staging import StagedWeights
    from turnwire.v1 import common_pb2, rollout_pb2

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


class GenerateStop(enum.Enum):
    """Why a generation ended."""

    END_OF_TURN = "end_of_turn"
    """The model's end-of-turn token, or one of the request's stop token ids. It is the last token."""
    STRING = "string"
    """A stop string. The token that completed it is the last token, whole."""
    LENGTH = "length"
    """`max_tokens`, or the engine's longest sequence."""


class UpdateMode(enum.Enum):
    """What happens to requests in flight when weights change."""

    KEEP = "keep"
    """They go on under the new weights and keep their tokens."""
    WAIT = "wait"
    """They finish first; new ones wait."""


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 is off; no seed: not reproducible."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not 1e-3 <= self.temperature <= 100.0:  # below, logits would overflow
            raise InvalidRequestError(
                f"temperature is {self.temperature}; it must be in [0.001, 100], or 0, which is greedy"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise InvalidRequestError(f"top_k is {self.top_k}; it must be 0 (off) or positive")


@dataclass(frozen=True)
class GenerateJob:
    """One request.

    prompt: int32 [T], at least one token, less than the engine's longest sequence.
    stop_token_ids: beside the model's end-of-turn tokens.
    sequence_key: requests with the same key are one growing sequence. The engine keeps its cache for the next one,
        whose prompt extends what is there, until `release`. Only a hint: the answer is the same without.
    stream: give tokens as they come; else all in one delta at the end.
    adapter: the LoRA adapter to generate with, one of `EngineInfo.adapters`; empty: none.
    images: in the order of their placeholders in the prompt, each one token there. The answer's tokens are what the
        policy sampled after the prompt in which each placeholder had become the image's own tokens.
    """

    request_id: str
    prompt: Ids
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    sequence_key: str | None = None
    stream: bool = False
    adapter: str = ""
    images: tuple[common_pb2.MediaPart, ...] = ()


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a generation were sampled under `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class GenerateDelta:
    """New tokens since the last delta. Spans are positions in the whole generation; an engine may tell them all at the
    end. The last delta has `stop`. `image_tokens`: how many more tokens the prompt had once its images were in it."""

    token_ids: Ids
    logprobs: Logprobs
    spans: tuple[VersionSpan, ...]
    stop: GenerateStop | None = None
    image_tokens: int = 0


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is and does now. Totals are since its start."""

    kind: str
    model: str
    max_model_tokens: int
    vocabulary: int
    end_of_turn_ids: frozenset[int]
    adapters: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ("text",)
    """"text", and "image" where the model reads images."""
    paused: bool = False
    running: int = 0
    waiting: int = 0
    tokens_generated: int = 0
    tokens_prefilled: int = 0
    """Prompt and observation tokens computed; what a cache answered is not among them."""
    failures: int = 0
    """Steps or processes that failed and took their requests with them."""
    trouble: str = ""
    """Why it generates nothing now though it is not paused; requests wait."""


@dataclass(frozen=True)
class WeightInfo:
    """The weights in use."""

    version: int
    checksum: str
    specs: Sequence[rollout_pb2.TensorSpec] = field(repr=False)


@dataclass(frozen=True)
class ScoreResult:
    """float32 [T - 1] a sequence, at temperature 1, and the version they were computed under."""

    logprobs: list[Logprobs]
    version: int


class Engine(Protocol):
    """One policy model that generates. All methods are called from one event loop; none blocks it."""

    async def start(self) -> None:
        """Load the model. Raises ConfigError where it cannot be used, with the reason."""

    async def close(self) -> None:
        """Fail what is in flight (UnavailableError) and free everything."""

    def generate(self, job: GenerateJob) -> AsyncIterator[GenerateDelta]:
        """Generate until a stop. Closing the iterator cancels the request.

        Raises InvalidRequestError for a prompt or job that cannot be, ExhaustedError when too many wait, InfraError
        when the engine failed.
        """

    async def score(self, sequences: Sequence[Ids]) -> ScoreResult:
        """Logprobs at temperature 1 of each token given those before it. Raises WrongOrderError where the engine is
        paused and computes nothing then."""

    def release(self, sequence_key: str) -> None:
        """No further request comes for this key: its cache may go."""

    async def pause(self) -> None:
        """Hold generation where it stands; returns when no step runs. Requests keep their tokens."""

    async def resume(self) -> None:
        """Go on."""

    def info(self) -> EngineInfo:
        """What it is and does now."""

    async def weight_info(self) -> WeightInfo:
        """Version, checksum and the spec of every tensor that an update must bring."""

    async def apply_weights(self, weights: StagedWeights, version: int, mode: UpdateMode) -> float:
        """Put new weights in place between two steps; returns the seconds that generation stood still.

        `weights` has passed `turnwire.weights.check_specs` against `weight_info().specs`, and stays the caller's, who
        closes it: an engine that needs them later takes its own `StagedWeights.share()`. Raises WrongOrderError for the
        current version, or for WAIT while paused.
        """
