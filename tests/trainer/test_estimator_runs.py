"""Every advantage estimator in a short run through the three services: the advantages that the run recorded are those
of the estimator's formula, computed here from the rewards that it recorded.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from services import all_services, finished, last_state, letters_run

from trainer_service import names
from trainer_service.ledger import audit
from turnwire.client.trainer import TrainerClient

pytestmark = [
    pytest.mark.needs("isolated-sandbox"),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPTS, GROUP = 4, 4
PARTS, WEIGHTS = ["letters", "length"], [1.0, 0.25]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Batch:
    """What a run wrote about its only step: one entry a trajectory, those of a prompt in one row. Shape (P, G).

    tokens: sampled ones. greedy: reward of the prompt's greedy trajectory, of shape (P, 1).
    """

    rewards: Array
    tokens: Array
    parts: list[Array]
    greedy: Array
    advantages: Array


def read(folder: Path) -> Batch:
    lines = (folder / "trajectories" / "train.jsonl").read_text().splitlines()
    records = sorted(map(json.loads, lines), key=lambda record: record["task_id"])
    greedy = {
        record["task_id"]: record["reward"]
        for record in map(json.loads, (folder / "trajectories" / "eval.jsonl").read_text().splitlines())
    }

    def matrix(value: Callable[[dict[str, Any]], float]) -> Array:
        return np.array([value(record) for record in records], float).reshape(PROMPTS, GROUP)

    return Batch(
        rewards=matrix(lambda record: record["reward"]),
        tokens=matrix(lambda record: sum(sum(segment["loss_mask"]) for segment in record["segments"])),
        parts=[matrix(lambda record, part=part: record["reward_parts"][part]) for part in PARTS],  # type: ignore[misc]
        greedy=matrix(lambda record: greedy[record["task_id"]])[:, :1],
        advantages=matrix(lambda record: record["advantage"]),
    )


def centred(values: Array) -> Array:
    return values - values.mean(axis=1, keepdims=True)


def normalised(values: Array) -> Array:
    return centred(values) / (values.std(axis=1, ddof=1, keepdims=True) + 1e-6)


def whitened(values: Array, tokens: Array) -> Array:
    """Mean 0 and variance 1 over all tokens, each of which has its trajectory's value."""
    mean = np.average(values, weights=tokens)
    variance = np.average((values - mean) ** 2, weights=tokens) * tokens.sum() / (tokens.sum() - 1)
    result: Array = (values - mean) / np.sqrt(variance + 1e-8)
    return result


def best_over_second(rewards: Array) -> Array:
    order = np.sort(rewards, axis=1)
    gap = (order[:, -1:] - order[:, -2:-1]) / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    return np.where(rewards == order[:, -1:], gap, 0.0)


FORMULAS: dict[str, Callable[[Batch], Array]] = {
    "grpo": lambda b: normalised(b.rewards),
    "grpo_vectorized": lambda b: normalised(b.rewards),
    "grpo_passk": lambda b: best_over_second(b.rewards),
    "gdpo": lambda b: whitened(sum(w * normalised(p) for w, p in zip(WEIGHTS, b.parts, strict=True)), b.tokens),  # type: ignore[arg-type]
    "rloo": lambda b: centred(b.rewards) * GROUP / (GROUP - 1),
    "rloo_vectorized": lambda b: centred(b.rewards) * GROUP / (GROUP - 1),
    "opo": lambda b: b.rewards - np.average(b.rewards, axis=1, weights=b.tokens, keepdims=True),
    "gpg": lambda b: centred(b.rewards) * b.rewards.size / max(1, np.count_nonzero(b.rewards)),
    "reinforce_plus_plus": lambda b: whitened(b.rewards, b.tokens),
    "reinforce_plus_plus_baseline": lambda b: whitened(centred(b.rewards), b.tokens),
    "remax": lambda b: b.rewards - b.greedy,
}
"""By the estimators' papers. Those with a baseline for each token have none here: they need more than the rewards."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[TrainerClient, Path]]:
    folder = tmp_path_factory.mktemp("runs")
    async with all_services(model_path, folder) as (client, _):
        yield client, folder


@pytest.mark.parametrize("estimator", [name for name, reason in names.ADVANTAGE_ESTIMATORS.items() if not reason])
async def test_a_run_learns_with_the_estimators_advantages(
    estimator: str, model_path: Path, trainer: tuple[TrainerClient, Path]
) -> None:
    source = {"kind": "procedural", "generator": "demo", "size": PROMPTS}
    arguments = {"domain": "python", "split": "train"}
    algorithm = {"advantage_estimator": estimator}
    if estimator == "gdpo":
        algorithm |= {"reward_parts": PARTS, "reward_part_weights": WEIGHTS}
    values = letters_run(
        model_path,
        # the same tasks, so that each has a greedy trajectory of the untrained policy; a seed hides it from the check
        data={
            "train": [{**source, "arguments": arguments}],
            "eval": [{**source, "arguments": {**arguments, "seed": 0}}],
        },
        algorithm=algorithm,
        evaluation={"sampling": {"temperature": 0.0}, "after": False},
        training={"steps": 1, "prompts_per_step": PROMPTS},
        rollout={"group_size": GROUP},
    )
    client, runs = trainer
    events = await finished(client, estimator, values)
    assert last_state(events) == ("FINISHED", "")
    greedy = PROMPTS if estimator in names.NEEDS_GREEDY_BASELINE else 0
    counts = {"trained": PROMPTS * GROUP, "evaluated": PROMPTS + greedy}
    assert audit(runs / estimator / "ledger.jsonl") == {"counts": counts, "failures": {}, "twice": []}
    batch = read(runs / estimator)
    assert np.abs(batch.advantages).max() > 0.01
    if estimator in names.NEEDS_TOKEN_STATISTICS:
        assert estimator not in FORMULAS
        return
    np.testing.assert_allclose(batch.advantages, FORMULAS[estimator](batch), rtol=1e-3, atol=2e-5)
