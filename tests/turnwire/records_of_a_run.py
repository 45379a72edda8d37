"""Two small trajectories in the trainer's format (trainer_service/trajectories.py), for tests of `turnwire view`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def record(
    step: int, number: int, reward: float = 1.0, source: str = "demo/python", kind: str = "train"
) -> dict[str, Any]:
    """A question, a python call, its result, an answer; one token a character but for the role tokens."""
    pieces = [
        ("prompt", ["<|user|>", *"Compute 17*23.", "<|end|>", "<|assistant|>"]),
        ("action", list("<python>17*23</python>")),
        ("bridge", ["<|end|>", "<|tool|>"]),
        ("observation", list("391")),
        ("bridge", ["<|end|>", "<|assistant|>"]),
        ("action", list("<answer>391</answer>")),
    ]
    tokens = [token for _, part in pieces for token in part]
    mask = [int(name == "action") for name, part in pieces for _ in part]
    logprobs = [round(-0.02 - 1.9 * abs(math.sin(i)) * (i % 5 == 0), 3) * flag for i, flag in enumerate(mask)]
    first = len(pieces[0][1])
    ends = [first + len(pieces[1][1]), first + sum(len(part) for _, part in pieces[1:5]), len(tokens)]
    turn = {"generate_stop": "STRING", "observation_full_tokens": 0, "generate_seconds": 0.21, "tool_seconds": 0.0042}
    result = {"tool": "python", "error": "", "truncated": False, "seconds": 0.0031}
    turns = [
        {
            **turn,
            **{"index": 0, "action_start": first, "action_end": ends[0], "observation_end": ends[1]},
            **{"action": "<python>17*23</python>", "observation": "391", "results": [result]},
        },
        {
            **turn,
            **{"index": 1, "action_start": ends[1], "action_end": ends[2], "observation_end": ends[2]},
            **{"action": "<answer>391</answer>", "observation": "", "results": []},
        },
    ]
    segment = {
        "token_ids": [ord(token[-1]) for token in tokens],
        "tokens": tokens,
        "prompt_length": first,
        "loss_mask": mask,
        "logprobs": logprobs,
        "weight_versions": [[first, ends[0], step], [ends[1], ends[2], step]],
        "turns": turns,
    }
    return {
        **{"kind": kind, "step": step, "trajectory_id": f"demo/{number}/0/1", "task_id": f"demo-python-{number}"},
        **{"data_source": source, "tries": 1, "messages": [{"role": "user", "content": "Compute 17*23."}]},
        **{"ground_truth": "391", "tools": ["python"], "final_answer": "391", "stop_reason": "FINAL_ANSWER"},
        **{"reward": reward, "reward_parts": {}, "advantage": 0.7, "filtered": "", "seconds": 0.8},
        "segments": [segment],
    }


def write_run(folder: Path) -> Path:
    """A run's folder with training trajectories of steps 0 and 1, and evaluated ones."""
    trajectories = folder / "trajectories"
    trajectories.mkdir(parents=True)
    train = [record(0, 0), record(0, 1, reward=0.0), record(1, 2), record(1, 3, source="demo/sql")]
    (trajectories / "train.jsonl").write_text("".join(json.dumps(item) + "\n" for item in train) + '{"cut": ')
    (trajectories / "eval.jsonl").write_text(json.dumps(record(1, 9, kind="eval")) + "\n")
    return folder
