"""A trajectory: an append-only run of tokens, and the builder that makes the wire's message from it.

Invariants (DESIGN.md 5.1, 5.2): tokens, loss mask and logprobs have one length; the mask is 1 exactly at the tokens
that the policy sampled; a logprob is 0 where the mask is; the weight spans cover exactly the sampled tokens, in order.
What was appended never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from google.protobuf import struct_pb2
from google.protobuf.duration_pb2 import Duration

from rollout_service.engines.base import GenerateStop, Ids, Logprobs, VersionSpan
from turnwire.tensors import to_tensor
from turnwire.v1 import common_pb2, rollout_pb2

GENERATE_STOPS = {
    GenerateStop.END_OF_TURN: rollout_pb2.GENERATE_STOP_END_OF_TURN,
    GenerateStop.STRING: rollout_pb2.GENERATE_STOP_STRING,
    GenerateStop.LENGTH: rollout_pb2.GENERATE_STOP_LENGTH,
}


@dataclass(frozen=True)
class TurnRecord:
    """One action and what came back. Positions are token positions in the segment, half open."""

    index: int
    action_start: int
    action_end: int
    observation_end: int
    stop: GenerateStop
    results: tuple[rollout_pb2.ToolResult, ...] = ()
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    observation_full_tokens: int = 0


@dataclass
class MultiTurnTrajectory:
    """Tokens of one segment: a prompt, then actions and observations. Grown by `add_turn` alone."""

    prompt: Ids
    turns: list[TurnRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens: list[Ids] = [np.asarray(self.prompt, np.int32)]
        self._logprobs: list[Logprobs] = [np.zeros(len(self.prompt), np.float32)]
        self._mask: list[npt.NDArray[np.uint8]] = [np.zeros(len(self.prompt), np.uint8)]
        self._spans: list[VersionSpan] = []
        self._length = len(self.prompt)

    def __len__(self) -> int:
        return self._length

    def add_turn(
        self,
        action: Ids,
        logprobs: Logprobs,
        spans: Sequence[VersionSpan],
        stop: GenerateStop,
        observation: Ids | None = None,
        *,
        results: Sequence[rollout_pb2.ToolResult] = (),
        generate_seconds: float = 0.0,
        tool_seconds: float = 0.0,
        observation_full_tokens: int = 0,
    ) -> TurnRecord:
        """Append an action (ids, logprobs [N]; spans as positions in the action) and the bridged observation."""
        if len(action) != len(logprobs) or [s.start for s in spans] + [len(action)] != [0] + [s.end for s in spans]:
            raise ValueError(f"{len(action)} ids, {len(logprobs)} logprobs and spans {list(spans)} do not fit")
        start = self._length
        self._append(action, logprobs, 1)
        for span in spans:
            last = self._spans[-1] if self._spans else None
            begin, end = start + span.start, start + span.end
            if last is not None and last.end == begin and last.version == span.version:
                self._spans[-1] = VersionSpan(last.start, end, span.version)
            else:
                self._spans.append(VersionSpan(begin, end, span.version))
        action_end = self._length
        if observation is not None:
            self._append(observation, np.zeros(len(observation), np.float32), 0)
        turn = TurnRecord(
            len(self.turns),
            start,
            action_end,
            self._length,
            stop,
            tuple(results),
            generate_seconds,
            tool_seconds,
            observation_full_tokens,
        )
        self.turns.append(turn)
        return turn

    def _append(self, tokens: Ids, logprobs: Logprobs, mask: int) -> None:
        self._tokens.append(np.asarray(tokens, np.int32))
        self._logprobs.append(np.asarray(logprobs, np.float32))
        self._mask.append(np.full(len(tokens), mask, np.uint8))
        self._length += len(tokens)

    def get_concatenated_tokens(self) -> Ids:
        """int32 [T]: prompt, actions and observations."""
        self._tokens = [np.concatenate(self._tokens)]
        return self._tokens[0]

    def get_loss_mask(self) -> npt.NDArray[np.uint8]:
        """uint8 [T]: 1 where the policy sampled the token."""
        return np.concatenate(self._mask)

    def get_logprobs(self) -> Logprobs:
        """float32 [T]: under the sampling distribution where the mask is 1, else 0."""
        return np.concatenate(self._logprobs)

    def get_weight_spans(self) -> list[VersionSpan]:
        """Weight versions of the sampled tokens, as positions in the segment."""
        return list(self._spans)


class TrajectoryBuilder:
    """Makes the wire's Trajectory. One segment for now; a harness that rewrites its context would `add_segment`."""

    def __init__(self, trajectory_id: str, metadata: struct_pb2.Struct | None = None) -> None:
        self._id = trajectory_id
        self._metadata = metadata
        self._segments: list[MultiTurnTrajectory] = []

    def add_segment(self, segment: MultiTurnTrajectory) -> None:
        """Append a segment; it may still grow until `build`."""
        self._segments.append(segment)

    def build(
        self,
        stop_reason: common_pb2.StopReason.ValueType,
        *,
        elapsed: float,
        error: str = "",
        final_answer: str | None = None,
    ) -> rollout_pb2.Trajectory:
        """The finished trajectory."""
        return rollout_pb2.Trajectory(
            trajectory_id=self._id,
            stop_reason=stop_reason,
            error=error,
            segments=[_segment(segment) for segment in self._segments],
            final_answer=final_answer,
            metadata=self._metadata,
            elapsed=seconds(elapsed),
        )


def seconds(value: float) -> Duration:
    """The wire's Duration."""
    duration = Duration()
    duration.FromNanoseconds(round(value * 1e9))
    return duration


def wire_turn(turn: TurnRecord) -> rollout_pb2.Turn:
    """The wire's Turn."""
    return rollout_pb2.Turn(
        index=turn.index,
        action_start=turn.action_start,
        action_end=turn.action_end,
        observation_end=turn.observation_end,
        generate_stop=GENERATE_STOPS[turn.stop],
        results=turn.results,
        timings=common_pb2.TurnTimings(generate=seconds(turn.generate_seconds), tool=seconds(turn.tool_seconds)),
        observation_full_tokens=turn.observation_full_tokens,
    )


def wire_spans(spans: Sequence[VersionSpan]) -> list[rollout_pb2.WeightSpan]:
    """The wire's WeightSpans."""
    return [rollout_pb2.WeightSpan(start=span.start, end=span.end, version=span.version) for span in spans]


def _segment(segment: MultiTurnTrajectory) -> rollout_pb2.Segment:
    return rollout_pb2.Segment(
        token_ids=to_tensor(segment.get_concatenated_tokens()),
        prompt_length=len(segment.prompt),
        loss_mask=to_tensor(segment.get_loss_mask()),
        logprobs=to_tensor(segment.get_logprobs()),
        weight_spans=wire_spans(segment.get_weight_spans()),
        turns=[wire_turn(turn) for turn in segment.turns],
    )
