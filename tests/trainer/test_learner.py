"""The update itself, through a real model and verl's losses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_harness import judged, run_config, sequences, task

from trainer_service import names
from trainer_service.batch import SequenceBatch, TokenSequence
from trainer_service.experience import select
from trainer_service.groups import Failed, Group
from trainer_service.learner import Experience, Learner, learning_rate
from trainer_service.policy import Policy

REWARDS = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5]
OPTIONS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.1}}


def learner_of(model_path: Path, **sections: Any) -> Learner:
    config = run_config(model_path, **sections)
    torch.manual_seed(0)
    return Learner(config, Policy(config.model))


def experience(rows: list[TokenSequence], rewards: list[float] | None = None) -> Experience:
    chosen = rewards or REWARDS[: len(rows)]
    return Experience(rows, chosen, [row // 4 for row in range(len(rows))], greedy_rewards=[0.5] * len(rows))


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in learner.policy.parameters()])


CORRECTION = {"importance_sampling": "token", "rejection": "seq_mean_k3", "rejection_threshold": 100.0}
"""Of rollouts, on top of recomputed logprobs."""


@pytest.mark.parametrize(
    "sections",
    [
        *(
            {"algorithm__policy_loss": loss, "algorithm__loss_options": OPTIONS.get(loss, {})}
            for loss in names.POLICY_LOSSES
        ),
        {"algorithm__kl": {"coefficient": 0.1}},
        {"algorithm__entropy_coefficient": 0.01},
        {"algorithm__old_logprobs": "recompute", "algorithm__rollout_correction": CORRECTION},
    ],
    ids=lambda sections: "-".join(str(value) for value in sections.values()),
)
def test_logits_of_prompt_and_observation_positions_have_exactly_zero_gradient(
    sections: dict[str, Any], model_path: Path
) -> None:
    learner = learner_of(model_path, **sections)
    seen: list[torch.Tensor] = []

    def watch(module: torch.nn.Module, arguments: object, logits: torch.Tensor) -> None:
        if logits.requires_grad:
            logits.register_hook(lambda gradient: seen.append(gradient.clone()))

    learner.policy.model.lm_head.register_forward_hook(watch)
    rows = sequences(4)
    learner.learn(experience(rows))
    (gradient,) = seen
    micro = SequenceBatch(rows).micro_batches(range(4), 8192, torch.device("cpu"))[0]
    flat = gradient.flatten(0, 1)
    trained = torch.zeros(len(flat), dtype=torch.bool)
    trained[micro.source] = True
    assert (flat[~trained] == 0).all()
    assert (flat[trained] != 0).any()
    first = min(row.prompt_length for row in rows) - 1
    for number, row in enumerate(micro.rows.tolist()):
        acted = set(np.flatnonzero(rows[row].mask).tolist())
        for place in range(micro.kept_logits):
            if (gradient[number, place] != 0).any():
                assert place + first + 1 in acted


def test_masked_logprobs_that_came_over_the_wire_have_no_influence(model_path: Path) -> None:
    rows = sequences(8)
    noisy = [
        TokenSequence(r.token_ids, r.prompt_length, r.mask, np.where(r.mask, r.logprobs, -7).astype(np.float32))
        for r in rows
    ]
    one, other = learner_of(model_path), learner_of(model_path)
    one.learn(experience(rows))
    other.learn(experience(noisy))
    assert torch.equal(weights(one), weights(other))


@pytest.mark.parametrize("budget", [1, 64, 8192])
def test_the_gradient_does_not_depend_on_the_micro_batches(budget: int, model_path: Path) -> None:
    whole = learner_of(model_path)
    pieces = learner_of(model_path, training__tokens_per_micro_batch=budget)
    left, right = whole.learn(experience(sequences(8))), pieces.learn(experience(sequences(8)))
    assert right.metrics["loss"] == pytest.approx(left.metrics["loss"], abs=1e-6)
    assert right.metrics["gradient_norm"] == pytest.approx(left.metrics["gradient_norm"], rel=1e-4)


def test_the_gradient_is_that_of_the_formula_written_out(model_path: Path) -> None:
    """REINFORCE with GRPO advantages, sequence by sequence without padding: what verl's ratio loss is at ratio 1."""
    learner = learner_of(model_path, algorithm__old_logprobs="recompute", optimizer__gradient_clip=0)
    rows = sequences(4)
    scores = torch.tensor(REWARDS[:4])
    advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
    model = Policy(run_config(model_path).model).model
    total = sum(row.sampled_tokens for row in rows)
    for row, advantage in zip(rows, advantages, strict=True):
        ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        loss = -(chosen * torch.from_numpy(row.mask[1:].astype(np.float32))).sum() * advantage / total
        loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    assert learner.learn(experience(rows)).metrics["gradient_norm"] == pytest.approx(float(expected), rel=1e-4)


def test_logprobs_are_those_under_the_sampling_temperature(model_path: Path) -> None:
    policy = Policy(run_config(model_path).model)
    rows = sequences(3)
    micro = SequenceBatch(rows).micro_batches([0, 1, 2], 8192, policy.device)[0]
    with torch.no_grad():
        values = policy.values(micro, 0.7).logprobs
        for number, row in enumerate(micro.rows.tolist()):
            ids = torch.from_numpy(rows[row].token_ids.astype(np.int64))[None]
            logits = policy.model(input_ids=ids).logits[0, :-1] / 0.7
            logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
            start = rows[row].prompt_length
            expected = logprobs[start - 1 :] * torch.from_numpy(rows[row].mask[start:].astype(np.float32))
            assert torch.allclose(values[number, : len(expected)], expected, atol=1e-5)


@pytest.mark.parametrize("estimator", [name for name, reason in names.ADVANTAGE_ESTIMATORS.items() if not reason])
def test_every_estimator_trains(estimator: str, model_path: Path) -> None:
    learner = learner_of(model_path, algorithm__advantage_estimator=estimator)
    before = weights(learner)
    metrics = learner.learn(experience(sequences(8))).metrics
    assert np.isfinite(list(metrics.values())).all()
    assert not torch.equal(before, weights(learner))


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm__kl": {"coefficient": 0.1}},
        {"algorithm__kl": {"coefficient": 0.1, "placement": "reward"}},
        {"algorithm__entropy_coefficient": 0.01},
        {"algorithm__mini_batches": 2, "algorithm__epochs": 2, "algorithm__old_logprobs": "recompute"},
        {
            "algorithm__old_logprobs": "recompute",
            "algorithm__rollout_correction": CORRECTION,
        },
        {
            "algorithm__policy_loss": "bypass_mode",
            "algorithm__loss_options": {"loss_type": "reinforce"},
            "algorithm__rollout_correction": {"importance_sampling": "sequence"},
        },
        {"model__gradient_checkpointing": True},
    ],
)
def test_every_part_of_the_update_can_be_switched_on(sections: dict[str, Any], model_path: Path) -> None:
    learner = learner_of(model_path, **sections)
    before = weights(learner)
    metrics = learner.learn(experience(sequences(8))).metrics
    assert np.isfinite(list(metrics.values())).all()
    assert not torch.equal(before, weights(learner))


def test_recomputed_old_logprobs_start_at_a_ratio_of_one_and_rollout_ones_at_the_engines(model_path: Path) -> None:
    recomputed = learner_of(model_path, algorithm__old_logprobs="recompute").learn(experience(sequences(4))).metrics
    sampled = learner_of(model_path).learn(experience(sequences(4))).metrics
    assert recomputed["kl/old"] == 0
    assert abs(sampled["kl/old"]) > 0.1


def test_what_infrastructure_failed_is_in_neither_the_loss_nor_the_baseline(model_path: Path) -> None:
    rows = sequences(8)
    members = [judged(row, reward, f"k{n}") for n, (row, reward) in enumerate(zip(rows, REWARDS, strict=True))]
    lost = Failed("lost", task(), "infrastructure: the sandbox died")
    with_failures = [Group(0, task(), (lost, *members[:4])), Group(1, task(), (*members[4:], lost, lost))]
    without = [Group(0, task(), tuple(members[:4])), Group(1, task(), tuple(members[4:]))]
    learners = []
    for groups in (with_failures, without):
        selection = select(run_config().algorithm, groups)
        assert selection.experience is not None
        learner = learner_of(model_path)
        learner.learn(selection.experience)
        learners.append(learner)
    assert torch.equal(weights(learners[0]), weights(learners[1]))


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(model_path: Path) -> None:
    learner = learner_of(model_path)
    before = weights(learner)
    metrics = learner.learn(experience(sequences(4), [float("inf"), 1.0, 0.0, 0.0])).metrics
    assert metrics["update_skipped"] == 1
    assert torch.equal(before, weights(learner))


def test_a_learner_restored_from_its_state_goes_on_the_same(model_path: Path) -> None:
    one, other = learner_of(model_path), learner_of(model_path)
    one.learn(experience(sequences(8)))
    other.policy.model.load_state_dict(one.policy.model.state_dict())
    other.restore(copy.deepcopy(one.state()))
    for learner in (one, other):
        learner.learn(experience(sequences(8, seed=1)))
    assert torch.equal(weights(one), weights(other))


def test_the_learning_rate_warms_up_and_falls() -> None:
    config = run_config(optimizer={"learning_rate": 1.0, "warmup_steps": 2, "schedule": "linear"}).optimizer
    rates = [learning_rate(config, step, 6) for step in range(6)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2] == 1.0
    assert rates[-1] == 0.0
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    cosine = run_config(optimizer={"learning_rate": 1.0, "schedule": "cosine", "final_fraction": 0.1}).optimizer
    assert learning_rate(cosine, 9, 10) == pytest.approx(0.1)
