"""verl's algorithms by name, and nothing of our own: advantages, policy losses, divergence, rollout correction.

Shapes: B trajectories (segments), R the longest response of the batch. A response is everything after the prompt:
actions and observations. Column 0 is the first action token. `mask_BR` is 1 on tokens that the policy sampled.

Invariant (tests/trainer/test_algorithms.py, for each name): where the mask is 0, advantages are 0, the gradient is
exactly 0, and no value has any influence.

Functions of verl are called by keyword, with what their signature asks for, so that an estimator that verl adds works
as long as it asks for something that is here. Importing this module loads verl, which takes seconds.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

from trainer_service import names
from trainer_service.config import AlgorithmConfig
from turnwire.config import nearest
from turnwire.errors import UnsupportedError


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage estimator may ask for.

    rewards_B: one reward a trajectory. group_B: which prompt's group it belongs to.
    old_logprobs_BR, sum_pi_squared_BR: the trainer's, before the update, for estimators with a baseline per token.
    importance_BR: weights of the rollout correction. kl_BR: divergence to take off the rewards, times its coefficient.
    greedy_rewards_B: reward of the group's greedy trajectory. reward_parts: named parts of the reward, each of shape B.
    """

    rewards_B: Tensor
    mask_BR: Tensor
    group_B: npt.NDArray[np.int64]
    old_logprobs_BR: Tensor | None = None
    sum_pi_squared_BR: Tensor | None = None
    importance_BR: Tensor | None = None
    kl_BR: Tensor | None = None
    greedy_rewards_B: Tensor | None = None
    reward_parts: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)


def advantages(settings: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """Advantages of shape (B, R), 0 where the mask is 0. Raises UnsupportedError for an estimator that cannot run
    here.
    """
    name = settings.advantage_estimator
    reason = names.ADVANTAGE_ESTIMATORS.get(name)
    if reason:
        raise UnsupportedError(f"the advantage estimator {name!r} cannot run here: {reason}")
    if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
        raise UnsupportedError(f"unknown advantage estimator; {nearest(name, list(core_algos.ADV_ESTIMATOR_REGISTRY))}")
    available = _available(settings, inputs)
    estimator = core_algos.get_adv_estimator_fn(name)
    arguments = {}
    for parameter in inspect.signature(estimator).parameters.values():
        if available.get(parameter.name) is not None:
            arguments[parameter.name] = available[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise UnsupportedError(f"the advantage estimator {name!r} asks for {parameter.name!r}, which is not here")
    advantages_BR, _ = estimator(**arguments)
    return torch.where(inputs.mask_BR > 0, advantages_BR, 0.0).to(torch.float32)


def _available(settings: AlgorithmConfig, inputs: AdvantageInputs) -> dict[str, Any]:
    """Everything an estimator may ask for, under verl's names."""
    mask_BR = inputs.mask_BR
    rewards_BR = torch.zeros(mask_BR.shape, dtype=torch.float32)
    rewards_BR[torch.arange(len(mask_BR)), last_action(mask_BR)] = inputs.rewards_B.to(torch.float32)
    if inputs.kl_BR is not None:
        rewards_BR = rewards_BR - inputs.kl_BR * mask_BR
    config = AlgoConfig(
        gamma=settings.gamma,
        adv_estimator=settings.advantage_estimator,
        norm_adv_by_std_in_grpo=settings.normalize_by_std,
        gdpo_reward_keys=settings.reward_parts or None,
        gdpo_reward_weights=settings.reward_part_weights or None,
    )
    available: dict[str, Any] = {
        "token_level_rewards": rewards_BR,
        "response_mask": mask_BR,
        "index": inputs.group_B,
        "config": config,
        "norm_adv_by_std_in_grpo": settings.normalize_by_std,
        "gamma": settings.gamma,
        "old_log_probs": inputs.old_logprobs_BR,
        "sum_pi_squared": inputs.sum_pi_squared_BR,
        "rollout_is_weights": inputs.importance_BR,
        "reward_baselines": inputs.greedy_rewards_B,
    }
    if settings.reward_parts:
        # gdpo finds the end of a response through the attention mask that follows the prompt's columns.
        response_BR = (torch.arange(mask_BR.shape[1]) <= last_action(mask_BR)[:, None]).to(torch.int64)
        prompts = torch.zeros(len(mask_BR), 1, dtype=torch.int64)
        available["batch"] = {"prompts": prompts, "attention_mask": torch.cat([prompts + 1, response_BR], dim=1)}
        available["non_tensor_batch"] = inputs.reward_parts
    return available


def last_action(mask_BR: Tensor) -> Tensor:
    """Column of each trajectory's last sampled token: where its reward stands. 0 if it has none."""
    columns = torch.arange(mask_BR.shape[1], device=mask_BR.device)
    return torch.where(mask_BR > 0, columns, 0).amax(dim=1)


@dataclass(frozen=True)
class Correction:
    """What the rollout correction says: importance weights (or none), the mask without rejected tokens, metrics."""

    weights_BR: Tensor | None
    mask_BR: Tensor
    metrics: dict[str, float]


def correction(settings: AlgorithmConfig, logprobs_BR: Tensor, rollout_BR: Tensor, mask_BR: Tensor) -> Correction:
    """verl's correction for the gap between the engine's logprobs and the trainer's."""
    chosen = settings.rollout_correction
    assert chosen is not None  # noqa: S101 - the caller asks only when it is configured
    proto, corrected, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=logprobs_BR,
        rollout_log_prob=rollout_BR,
        response_mask=mask_BR,
        rollout_is=chosen.importance_sampling,
        rollout_is_threshold=chosen.importance_threshold,
        rollout_is_batch_normalize=chosen.normalize,
        rollout_rs=chosen.rejection,
        rollout_rs_threshold=chosen.rejection_threshold,
    )
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    return Correction(weights, corrected, {name: float(value) for name, value in metrics.items()})


def divergence(settings: AlgorithmConfig, logprobs: Tensor, reference: Tensor) -> Tensor:
    """The configured estimator of the divergence from the reference, per token, in the shape of its arguments."""
    result: Tensor = core_algos.kl_penalty(logprob=logprobs, ref_logprob=reference, kl_penalty=settings.kl.kind)
    return result


class PolicyLoss:
    """One of verl's policy losses with the run's settings.

    `begin` is called with the sizes of what one optimizer step sees, so that the losses of its micro-batches add up to
    the loss of the whole. Losses that rank tokens of a batch (clip_cov, kl_cov) rank within a micro-batch, as in verl.
    """

    def __init__(self, settings: AlgorithmConfig) -> None:
        self._settings = settings
        self._loss = core_algos.get_policy_loss_fn(settings.policy_loss)
        options = dict(settings.loss_options)
        chosen = settings.rollout_correction
        bypass = RolloutCorrectionConfig(
            rollout_is=chosen.importance_sampling if chosen else None,
            rollout_is_threshold=chosen.importance_threshold if chosen else 2.0,
            rollout_is_batch_normalize=chosen.normalize if chosen else False,
            rollout_rs=chosen.rejection if chosen else None,
            rollout_rs_threshold=chosen.rejection_threshold if chosen else None,
            loss_type=options.pop("loss_type", "ppo_clip"),
        )
        tau = {name: options.pop(name) for name in ("tau_pos", "tau_neg") if name in options}
        self._config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio=settings.clip_ratio_low,
            clip_ratio_low=settings.clip_ratio_low,
            clip_ratio_high=settings.clip_ratio_high,
            clip_ratio_c=settings.clip_ratio_c,
            loss_agg_mode=settings.loss_aggregation,
            policy_loss=PolicyLossConfig(loss_mode=settings.policy_loss, rollout_correction=bypass, **options),
            **tau,
        )
        self._rows = 1

    def begin(self, *, tokens: int, rows: int, longest: int) -> None:
        """Sampled tokens, trajectories and the longest response of the coming optimizer step."""
        self._rows = rows
        self._config.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=tokens,
            global_batch_size=rows,
            loss_scale_factor=self._settings.loss_scale_factor or longest,
        )

    def __call__(
        self,
        logprobs_BR: Tensor,
        old_logprobs_BR: Tensor,
        advantages_BR: Tensor,
        mask_BR: Tensor,
        importance_BR: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """This micro-batch's part of the step's loss, and verl's metrics of it."""
        loss, metrics = self._loss(
            old_log_prob=old_logprobs_BR,
            log_prob=logprobs_BR,
            advantages=advantages_BR,
            response_mask=mask_BR,
            loss_agg_mode=self._settings.loss_aggregation,
            config=self._config,
            rollout_is_weights=importance_BR,
        )
        if self._settings.policy_loss == "geo_mean":  # the one loss that takes the plain mean of its rows
            loss = loss * (len(mask_BR) / self._rows)
        return loss, {name: float(value) for name, value in metrics.items()}

    def aggregate(self, values_BR: Tensor, mask_BR: Tensor) -> Tensor:
        """This micro-batch's part of a per-token value (divergence, entropy), aggregated as the loss is."""
        result: Tensor = core_algos.agg_loss(
            loss_mat=values_BR,
            loss_mask=mask_BR,
            loss_agg_mode=self._settings.loss_aggregation,
            **self._config.global_batch_info,
        )
        return result
