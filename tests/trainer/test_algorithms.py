"""Every algorithm of verl by name: finite, of the right shape, and blind to what the mask hides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trainer_harness import sequences
from verl.trainer.ppo import core_algos, rollout_corr_helper

from trainer_service import algorithms, names
from trainer_service.algorithms import AdvantageInputs, PolicyLoss
from trainer_service.batch import SequenceBatch
from trainer_service.config import AlgorithmConfig
from turnwire.config import convert
from turnwire.errors import UnsupportedError

RUNNABLE = [name for name, reason in names.ADVANTAGE_ESTIMATORS.items() if not reason]
OPTIONS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.1}}
BATCH = SequenceBatch(sequences(12))
GROUPS = np.arange(12) // 4
REWARDS = torch.tensor([0.0, 1, 0, 1, 1, 1, 0, 0.5, 0, 0, 0, 1])


def settings(**values: Any) -> AlgorithmConfig:
    return convert(values, AlgorithmConfig)


def inputs(noise: float = 0.0, **values: Any) -> AdvantageInputs:
    """What an estimator gets; `noise` is added where the mask is 0, and may have no influence."""
    generator = torch.Generator().manual_seed(1)
    hidden = (1 - BATCH.mask_BR) * noise
    defaults: dict[str, Any] = {
        "rewards_B": REWARDS,
        "mask_BR": BATCH.mask_BR,
        "group_B": GROUPS,
        "old_logprobs_BR": BATCH.rollout_logprobs_BR - hidden,
        "sum_pi_squared_BR": torch.rand(BATCH.mask_BR.shape, generator=generator) * BATCH.mask_BR + hidden,
        "greedy_rewards_B": torch.tensor([0.5, 1.0, 0.0]).repeat_interleave(4),
    }
    return AdvantageInputs(**{**defaults, **values})


def test_the_tables_of_names_are_verls() -> None:
    assert set(names.ADVANTAGE_ESTIMATORS) == set(core_algos.ADV_ESTIMATOR_REGISTRY)
    assert set(names.POLICY_LOSSES) == set(core_algos.POLICY_LOSS_REGISTRY)
    assert set(names.REJECTION_CRITERIA) == rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS


@pytest.mark.parametrize("name", RUNNABLE)
def test_an_estimator_gives_finite_advantages_where_the_policy_acted_and_zero_elsewhere(name: str) -> None:
    result = algorithms.advantages(settings(advantage_estimator=name), inputs())
    assert result.shape == BATCH.mask_BR.shape
    assert torch.isfinite(result).all()
    assert (result[BATCH.mask_BR == 0] == 0).all()
    assert (result != 0).any()


@pytest.mark.parametrize("name", RUNNABLE)
def test_an_estimator_is_blind_to_masked_positions(name: str) -> None:
    config = settings(advantage_estimator=name)
    assert torch.equal(algorithms.advantages(config, inputs()), algorithms.advantages(config, inputs(noise=3.0)))


def test_grpo_is_the_group_normalised_reward() -> None:
    result = algorithms.advantages(settings(), inputs())
    group = REWARDS[:4]
    expected = (group - group.mean()) / (group.std() + 1e-6)
    assert torch.allclose(result.amax(1)[1], expected[1])
    assert torch.allclose(result.amin(1)[0], expected[0])


def test_gdpo_normalises_each_part_of_the_reward() -> None:
    config = settings(advantage_estimator="gdpo", reward_parts=["right", "short"], reward_part_weights=[1.0, 0.5])
    parts = {"right": REWARDS.numpy(), "short": np.linspace(0, 1, 12, dtype=np.float32)}
    with_parts = algorithms.advantages(config, inputs(reward_parts=parts))
    assert not torch.allclose(with_parts, algorithms.advantages(settings(advantage_estimator="gdpo"), inputs()))
    assert (with_parts[BATCH.mask_BR == 0] == 0).all()


def test_an_estimator_that_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="'gae' cannot run here: it needs the values of a trained critic"):
        algorithms.advantages(settings(advantage_estimator="gae"), inputs())


def test_an_estimator_that_asks_for_what_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'remax' asks for 'reward_baselines'"):
        algorithms.advantages(settings(advantage_estimator="remax"), inputs(greedy_rewards_B=None))


def loss_of(name: str, hidden: float = 0.0, **values: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss, its gradient at each logprob, metrics; `hidden` is added to all inputs where the mask is 0."""
    generator = torch.Generator().manual_seed(2)
    mask = BATCH.mask_BR
    noise = (1 - mask) * hidden
    shape = mask.shape
    old = BATCH.rollout_logprobs_BR - noise
    logprobs = (old.detach() + 0.3 * torch.randn(shape, generator=generator) * mask - 0.5 * noise).requires_grad_()
    advantages = torch.randn(len(mask), 1, generator=generator) * mask + noise
    config = settings(policy_loss=name, loss_options=OPTIONS.get(name, {}), **values)
    loss = PolicyLoss(config)
    loss.begin(tokens=int(mask.sum()), rows=len(mask), longest=shape[1])
    torch.manual_seed(0)
    value, metrics = loss(logprobs, old, advantages, mask)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return value.detach(), gradient, metrics


@pytest.mark.parametrize("name", names.POLICY_LOSSES)
def test_a_loss_is_finite_and_its_gradient_is_exactly_zero_at_masked_positions(name: str) -> None:
    loss, gradient, metrics = loss_of(name)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert (gradient[BATCH.mask_BR == 0] == 0).all()
    assert (gradient[BATCH.mask_BR == 1] != 0).any()
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", names.POLICY_LOSSES)
def test_a_loss_is_blind_to_masked_positions(name: str) -> None:
    loss, gradient, _ = loss_of(name)
    other_loss, other_gradient, _ = loss_of(name, hidden=2.0)
    assert torch.allclose(loss, other_loss, rtol=1e-6)
    assert torch.allclose(gradient, other_gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("aggregation", names.LOSS_AGGREGATIONS)
@pytest.mark.parametrize("name", [name for name in names.POLICY_LOSSES if name not in ("clip_cov", "kl_cov")])
def test_the_losses_of_micro_batches_add_up_to_the_loss_of_the_batch(name: str, aggregation: str) -> None:
    mask = BATCH.mask_BR
    old = BATCH.rollout_logprobs_BR
    logprobs = old + 0.2 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(3)) * mask
    advantages = torch.linspace(-1, 1, len(mask))[:, None] * mask
    config = settings(policy_loss=name, loss_aggregation=aggregation, loss_options=OPTIONS.get(name, {}))
    loss = PolicyLoss(config)
    loss.begin(tokens=int(mask.sum()), rows=len(mask), longest=mask.shape[1])
    whole, _ = loss(logprobs, old, advantages, mask)
    parts = sum(
        loss(logprobs[i : i + 5], old[i : i + 5], advantages[i : i + 5], mask[i : i + 5])[0] for i in (0, 5, 10)
    )
    assert torch.allclose(whole, torch.as_tensor(parts), rtol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind, reason in names.KL_KINDS.items() if not reason])
def test_a_divergence_is_zero_for_the_same_policy_and_finite_otherwise(kind: str) -> None:
    config = settings(kl={"kind": kind, "coefficient": 0.1})
    own = BATCH.rollout_logprobs_BR
    assert (algorithms.divergence(config, own, own) == 0).all()
    assert torch.isfinite(algorithms.divergence(config, own, own - 0.5)).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_of_equal_policies_are_one(level: str) -> None:
    config = settings(old_logprobs="recompute", rollout_correction={"importance_sampling": level})
    own = BATCH.rollout_logprobs_BR
    result = algorithms.correction(config, own, own, BATCH.mask_BR)
    assert result.weights_BR is not None
    assert torch.allclose(result.weights_BR, BATCH.mask_BR)


@pytest.mark.parametrize("criterion", names.REJECTION_CRITERIA)
def test_rejection_masks_what_is_too_far_from_the_sampling_policy(criterion: str) -> None:
    config = settings(
        old_logprobs="recompute",
        rollout_correction={"rejection": criterion, "rejection_threshold": 1.5 if criterion.endswith("k1") else 0.5},
    )
    rollout = BATCH.rollout_logprobs_BR
    far = rollout.clone()
    far[0] += 3 * BATCH.mask_BR[0]
    result = algorithms.correction(config, far, rollout, BATCH.mask_BR)
    assert result.mask_BR[0].sum() == 0
    assert torch.equal(result.mask_BR[1:], BATCH.mask_BR[1:])
