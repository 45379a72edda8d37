"""Updates, and what came of them: what one process and several ranks are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trainer_harness import run_config, sequences

from trainer_service.config import RunConfig
from trainer_service.learner import Experience, build
from trainer_service.ranks import ALONE, Ranks

REWARDS = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.0, 0.25]


def case_config(model: Path, sections: dict[str, Any]) -> RunConfig:
    """The first batch has three micro-batches, which two ranks cannot share evenly."""
    steady = {"learning_rate": 0.01, "eps": 0.1}  # so that rounding in the gradient is not a change of sign
    return run_config(model, **{"training__tokens_per_micro_batch": 120, "optimizer": steady, **sections})


def experience(seed: int) -> Experience:
    """A batch of ten sequences in groups of five."""
    groups = [row // 5 for row in range(len(REWARDS))]
    return Experience(sequences(len(REWARDS), seed), REWARDS, groups, greedy_rewards=[0.5] * len(REWARDS))


def resume(config: RunConfig, folder: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Go on from the checkpoint in `folder` with the second update."""
    learner = build(config, folder / "model", ranks)
    learner.restore(torch.load(folder / "learner.pt", weights_only=True))
    second = learner.learn(experience(1))
    return {
        "metrics": {name: value for name, value in second.metrics.items() if not name.startswith("time/")},
        "advantages": second.advantages,
        "weights": {name: tensor.clone() for name, tensor in learner.policy.export().items()},
        "optimizer": learner.state()["optimizer"],
        "scores": learner.policy.score([sequences(1)[0].token_ids]),
    }


def learn(config: RunConfig, folder: Path, ranks: Ranks = ALONE) -> None:
    """Two updates, with a checkpoint between them; then the second once more, from the checkpoint."""
    learner = build(config, None, ranks)
    first = learner.learn(experience(0))
    learner.policy.save(folder / "model")
    torch.save(learner.state(), folder / "learner.pt")
    second = learner.learn(experience(1))
    weights = {name: tensor.clone() for name, tensor in learner.policy.export().items()}
    first_metrics = {name: value for name, value in first.metrics.items() if not name.startswith("time/")}
    outcome = {"first": first_metrics, "loss": second.metrics["loss"], "weights": weights}
    torch.save({**outcome, "resumed": resume(config, folder, ranks)}, folder / "outcome.pt")
