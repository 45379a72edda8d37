"""Trajectories on the disk, for people: `trajectories/train.jsonl` (a sample of each step) and
`trajectories/eval.jsonl` (all).

`turnwire view` reads them. One JSON object a line:

    {"kind": "train" | "eval",
     "step": 12,                        # updates done before training on it; for eval: before the evaluation
     "trajectory_id": "…", "task_id": "…", "data_source": "demo/sql", "tries": 1,
     "messages": [{"role": "user", "content": "…"}], "ground_truth": …, "tools": ["python", "sql"],
     "final_answer": "391" | null, "stop_reason": "FINAL_ANSWER",
     "reward": 1.0, "reward_parts": {"correct": 1.0}, "advantage": 0.7 | null,   # null: not trained on; "filtered"
     says why "filtered": "" | "all rewards of the group are equal", "seconds": 0.8,                    # as the
     trainer saw it, waiting included "segments": [{"token_ids": [5, 17, …], "tokens": ["<|user|>", "C", …],
     "prompt_length": 21, "loss_mask": [0, …, 1, …], "logprobs": [0.0, …, -0.31, …], "weight_versions": [[21, 34, 3],
     …],      # [start, end) of sampled tokens, updates done (below 0: not ours) "turns": [{"index": 0, "action_start":
     21, "action_end": 34, "observation_end": 41, "generate_stop": "STRING" | "END_OF_TURN" | "LENGTH", "action":
     "<python>17*23</python>", "observation": "391", "observation_full_tokens": 0,   # before a cut; 0: not cut
     "generate_seconds": 0.2, "tool_seconds": 0.01, "results": [{"tool": "python", "error": "", "truncated": false,
     "seconds": 0.004}]}]}]}

`tokens[i]` is the text of token i alone; `loss_mask` is 1 on action tokens. Positions are token positions in the
segment; what lies between `action_end` and `observation_end` is the bridge of the chat template and the observation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import duration_pb2

from trainer_service.groups import Judged
from turnwire.enums import short_name
from turnwire.tensors import from_tensor
from turnwire.v1 import common_pb2, rollout_pb2


class TrajectoryRecorder:
    """Makes records. `decode` turns one token id into its text."""

    def __init__(self, decode: Callable[[int], str], updates_at: Callable[[int], int]) -> None:
        self._decode = decode
        self._updates_at = updates_at
        self._texts: dict[int, str] = {}

    def record(
        self, member: Judged, kind: str, step: int, advantage: float | None = None, filtered: str = ""
    ) -> dict[str, Any]:
        """One line."""
        trajectory, attempt, task = member.sampled.trajectory, member.sampled.attempt, member.task
        texts = iter(attempt.turns)
        segments = []
        for segment in trajectory.segments:
            ids = from_tensor(segment.token_ids).tolist()
            turns = []
            for turn in segment.turns:
                text = next(texts)
                turns.append({**_turn(turn), "action": text.action, "observation": text.observation})
            segments.append(
                {
                    "token_ids": ids,
                    "tokens": [self._text(token) for token in ids],
                    "prompt_length": segment.prompt_length,
                    "loss_mask": from_tensor(segment.loss_mask).tolist(),
                    "logprobs": [round(value, 5) for value in from_tensor(segment.logprobs).tolist()],
                    "weight_versions": [[s.start, s.end, self._updates_at(s.version)] for s in segment.weight_spans],
                    "turns": turns,
                }
            )
        return {
            "kind": kind,
            "step": step,
            "trajectory_id": trajectory.trajectory_id,
            "task_id": task.task_id,
            "data_source": task.data_source,
            "tries": member.sampled.tries,
            "messages": [{"role": message.role, "content": message.content} for message in task.messages],
            "ground_truth": task.ground_truth,
            "tools": list(task.tools),
            "final_answer": attempt.final_answer,
            "stop_reason": attempt.stop_reason,
            "reward": member.score.value,
            "reward_parts": member.score.parts,
            "advantage": None if advantage is None else round(advantage, 5),
            "filtered": filtered,
            "seconds": round(member.sampled.seconds, 4),
            "segments": segments,
        }

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode(token)
        return self._texts[token]


def _turn(turn: rollout_pb2.Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "action_start": turn.action_start,
        "action_end": turn.action_end,
        "observation_end": turn.observation_end,
        "generate_stop": short_name(rollout_pb2.GenerateStop, turn.generate_stop),
        "observation_full_tokens": turn.observation_full_tokens,
        "generate_seconds": _seconds(turn.timings.generate),
        "tool_seconds": _seconds(turn.timings.tool),
        "results": [
            {
                "tool": result.tool,
                "error": short_name(common_pb2.ErrorKind, result.error) if result.error else "",
                "truncated": result.truncated,
                "seconds": _seconds(result.elapsed),
            }
            for result in turn.results
        ],
    }


def _seconds(value: duration_pb2.Duration) -> float:
    return round(value.ToTimedelta().total_seconds(), 6)
