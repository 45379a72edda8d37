"""One batch, one or more optimizer steps: advantages, loss, gradient, step. All of it runs in the trainer's worker
thread.

`learn` leaves no trace of what it was not given: trajectories that infrastructure failed are not among its rows, so
they are in neither the loss nor a group's baseline.

Of several ranks (see `ranks`) each knows the whole batch and computes its share of the micro-batches; what they find is
added up, so that the update is that of one process.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer_service import algorithms, names
from trainer_service.batch import MicroBatch, SequenceBatch, TokenSequence
from trainer_service.config import AlgorithmConfig, OptimizerConfig, RunConfig
from trainer_service.policy import Policy
from trainer_service.ranks import ALONE, Ranks, building, together
from trainer_service.sharding import spread_optimizer, whole_optimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experience:
    """A batch to learn from, one entry a sequence: its reward, its group, the reward of the group's greedy trajectory
    (where the estimator asks for one), and the named parts of its reward."""

    sequences: Sequence[TokenSequence]
    rewards: Sequence[float]
    groups: Sequence[int]
    greedy_rewards: Sequence[float] | None = None
    reward_parts: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True)
class Learned:
    """What an update did: its metrics, and the mean advantage of each sequence, for people to look at."""

    metrics: dict[str, float]
    advantages: list[float]


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps - 1))
    falling = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * falling)


def build(config: RunConfig, path: Path | None = None, ranks: Ranks = ALONE) -> Learner:
    """Policy, reference and optimizer of a run, on every rank. `path`: the policy of a checkpoint."""
    with building(ranks, config, path):
        if config.training.threads is not None:
            torch.set_num_threads(config.training.threads)
        torch.manual_seed(config.seed)
        return Learner(config, Policy(config.model, path, ranks))


class Learner:
    """Policy, reference and optimizer of a run."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self._config = config
        self._algorithm: AlgorithmConfig = config.algorithm
        self.policy, self.ranks = policy, policy.ranks
        self._loss = algorithms.PolicyLoss(config.algorithm)
        self._reference = Policy(config.model, ranks=self.ranks) if config.algorithm.kl.coefficient > 0 else None
        if self._reference is not None:
            self._reference.model.requires_grad_(False)
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self.steps_done = 0

    @together("learn")
    def learn(self, experience: Experience) -> Learned:
        """Update the policy on a batch, once or more."""
        if self.ranks.rank:  # rank 0's random state is in the checkpoints; the others' follows from the step
            torch.manual_seed((self._config.seed << 32) + self.steps_done * self.ranks.size + self.ranks.rank)
        times: dict[str, float] = defaultdict(float)
        batch = SequenceBatch(experience.sequences)
        prepared = self._prepare(batch, experience, times)
        metrics: dict[str, list[tuple[float, float]]] = defaultdict(list)
        rows = [row for row, sequence in enumerate(batch.sequences) if sequence.sampled_tokens]
        pieces = np.array_split(np.array(rows, int), self._algorithm.mini_batches)
        for _ in range(self._algorithm.epochs):
            for piece in pieces:
                if len(piece):
                    self._step(batch, prepared, [int(row) for row in piece], metrics, times)
        advantages_BR, mask_BR = prepared.advantages, batch.mask_BR
        result = {name: sum(v * w for v, w in pairs) / sum(w for _, w in pairs) for name, pairs in metrics.items()}
        tokens = mask_BR.sum(1).clamp(min=1)
        return Learned(
            {**prepared.metrics, **result, **{f"time/{name}_seconds": seconds for name, seconds in times.items()}},
            ((advantages_BR * mask_BR).sum(1) / tokens).tolist(),
        )

    # -- before the update

    def _prepare(self, batch: SequenceBatch, experience: Experience, times: dict[str, float]) -> _Prepared:
        """Everything that is fixed during the update."""
        settings = self._algorithm
        statistics = settings.advantage_estimator in names.NEEDS_TOKEN_STATISTICS
        in_reward = self._reference is not None and settings.kl.placement == "reward"
        recompute = settings.old_logprobs == "recompute"
        several = settings.mini_batches * settings.epochs > 1
        correct = settings.rollout_correction is not None and settings.policy_loss != "bypass_mode"
        own = squares = reference = None
        if statistics or in_reward or correct or (recompute and several):
            own, squares = self._evaluate(self.policy, batch, times, squared=statistics)
        if self._reference is not None:
            reference, _ = self._evaluate(self._reference, batch, times)
        corrected = None
        if correct and own is not None:
            corrected = algorithms.correction(settings, own, batch.rollout_logprobs_BR, batch.mask_BR)
        greedy = experience.greedy_rewards
        inputs = algorithms.AdvantageInputs(
            rewards_B=torch.tensor(experience.rewards, dtype=torch.float32),
            mask_BR=batch.mask_BR,
            group_B=np.asarray(experience.groups, np.int64),
            old_logprobs_BR=own,
            sum_pi_squared_BR=squares,
            importance_BR=corrected.weights_BR if corrected else None,
            kl_BR=self._penalty(own, reference) if in_reward else None,
            greedy_rewards_B=None if greedy is None else torch.tensor(greedy, dtype=torch.float32),
            reward_parts=experience.reward_parts,
        )
        return _Prepared(
            advantages=algorithms.advantages(settings, inputs),
            mask=corrected.mask_BR if corrected else batch.mask_BR,
            old=own if recompute else batch.rollout_logprobs_BR,
            reference=reference,
            importance=corrected.weights_BR if corrected else None,
            metrics=corrected.metrics if corrected else {},
        )

    def _penalty(self, own: Tensor | None, reference: Tensor | None) -> Tensor:
        assert own is not None and reference is not None  # noqa: S101, PT018 - in_reward computed both
        return self._algorithm.kl.coefficient * algorithms.divergence(self._algorithm, own, reference)

    @torch.no_grad()
    def _evaluate(
        self, policy: Policy, batch: SequenceBatch, times: dict[str, float], squared: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs (B, R) under a policy, and sums of squared probabilities if asked for."""
        started = time.perf_counter()
        logprobs_BR = torch.zeros_like(batch.mask_BR)
        squares_BR = torch.zeros_like(batch.mask_BR) if squared else None
        for micro, counts in self._micro_batches(batch, range(len(batch.sequences))):
            values = policy.values(micro, self._config.rollout.sampling.temperature, squared=squared)
            if not counts:
                continue
            micro.gather_into(logprobs_BR, values.logprobs)
            if squares_BR is not None and values.sum_pi_squared is not None:
                micro.gather_into(squares_BR, values.sum_pi_squared)
        self.ranks.add_up(logprobs_BR)
        if squares_BR is not None:
            self.ranks.add_up(squares_BR)
        times["forward"] += time.perf_counter() - started
        return logprobs_BR, squares_BR

    def _micro_batches(self, batch: SequenceBatch, rows: Sequence[int]) -> list[tuple[MicroBatch, bool]]:
        """This rank's, each with whether it counts: see `Ranks.deal`."""
        tokens = self._config.training.tokens_per_micro_batch
        return self.ranks.deal(batch.micro_batches(rows, tokens, self.policy.device, shares=self.ranks.size))

    # -- the update

    def _step(
        self,
        batch: SequenceBatch,
        prepared: _Prepared,
        rows: list[int],
        metrics: dict[str, list[tuple[float, float]]],
        times: dict[str, float],
    ) -> None:
        """One optimizer step on some rows; their micro-batches' gradients add up."""
        self._loss.begin(
            tokens=int(batch.mask_BR[rows].sum()),
            rows=len(rows),
            longest=max(batch.sequences[row].response_length for row in rows),
        )
        total, found = 0.0, []
        for micro, counts in self._micro_batches(batch, rows):
            started = time.perf_counter()
            loss, seen = self._micro_loss(micro, batch, prepared)
            if not counts:  # it has its part in the collectives, and none in the result
                loss, seen = loss * 0.0, {}
            self._wait()
            middle = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            self._wait()
            times["forward"] += middle - started
            times["backward"] += time.perf_counter() - middle
            total += float(loss.detach())
            weight = float(micro.slice(batch.mask_BR).sum())
            found += [(name, value, weight) for name, value in seen.items()]
        started = time.perf_counter()
        parts = self.ranks.gather((total, found))
        for name, value, weight in (entry for _, found in parts for entry in found):
            metrics[name].append((value, weight))
        metrics["loss"].append((sum(total for total, _ in parts), 1.0))
        self._apply(metrics)
        times["optimizer"] += time.perf_counter() - started

    def _apply(self, metrics: dict[str, list[tuple[float, float]]]) -> None:
        settings = self._config.optimizer
        steps = self._config.training.steps * self._algorithm.mini_batches * self._algorithm.epochs
        rate = learning_rate(settings, self.steps_done, steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parameters = self.policy.parameters()
        norm = torch.nn.utils.get_total_norm([item.grad for item in parameters if item.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(parameters, settings.gradient_clip or math.inf, norm)
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        else:  # as verl does: one bad batch must not ruin the weights
            logger.warning("the gradient is not finite: this update is left out")
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        metrics["learning_rate"].append((rate, 1.0))
        metrics["update_skipped"].append((0.0 if finite else 1.0, 1.0))
        if finite:
            metrics["gradient_norm"].append((float(norm), 1.0))

    def _micro_loss(
        self, micro: MicroBatch, batch: SequenceBatch, prepared: _Prepared
    ) -> tuple[Tensor, dict[str, float]]:
        settings = self._algorithm
        values = self.policy.values(
            micro, self._config.rollout.sampling.temperature, entropy_gradient=settings.entropy_coefficient > 0
        )
        mask, rollout = micro.slice(prepared.mask), micro.slice(batch.rollout_logprobs_BR)
        old = values.logprobs.detach() if prepared.old is None else micro.slice(prepared.old)
        importance = None if prepared.importance is None else micro.slice(prepared.importance)
        advantages = micro.slice(prepared.advantages)
        loss, verl_metrics = self._loss(values.logprobs, old, advantages, mask, importance)
        metrics = {_METRIC_NAMES.get(name, name): value for name, value in verl_metrics.items()}
        if settings.entropy_coefficient > 0:
            loss = loss - settings.entropy_coefficient * self._loss.aggregate(values.entropy, mask)
        if prepared.reference is not None:
            penalty = algorithms.divergence(settings, values.logprobs, micro.slice(prepared.reference)) * mask
            if settings.kl.placement == "loss":
                loss = loss + settings.kl.coefficient * self._loss.aggregate(penalty, mask)
            metrics["kl/reference"] = _mean(penalty, mask)
        sampled = micro.slice(batch.mask_BR)
        gap = (values.logprobs.detach() - rollout).abs() * sampled
        metrics["entropy"] = _mean(values.entropy, sampled)
        metrics["logprob_gap/mean"] = _mean(gap, sampled)
        return loss, metrics

    def _wait(self) -> None:
        """So that the split between forward and backward is right on a GPU too."""
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)

    # -- for checkpoints

    @together("state")
    def state(self) -> dict[str, Any]:
        """Optimizer, its step count, random state; the weights are the policy's. The same for any number of ranks."""
        state = {
            "optimizer": whole_optimizer(self.optimizer),
            "steps_done": self.steps_done,
            "rng": torch.get_rng_state(),
        }
        if self.policy.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.policy.device)
        return state

    @together("restore", send=False)
    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from `state`, which other ranks than 0 do not have."""
        spread_optimizer(self.optimizer, state and state["optimizer"], self.ranks)
        self.steps_done = self.ranks.from_first(lambda: int(state["steps_done"]) if state else 0)
        if state is None:
            return
        torch.set_rng_state(state["rng"])
        if self.policy.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.policy.device)


@dataclass(frozen=True)
class _Prepared:
    """What stays fixed during an update, in matrices of shape (B, R). `old` None: the current logprobs serve."""

    advantages: Tensor
    mask: Tensor
    old: Tensor | None
    reference: Tensor | None
    importance: Tensor | None
    metrics: dict[str, float]


_METRIC_NAMES = {
    "actor/pg_clipfrac": "clip_fraction",
    "actor/pg_clipfrac_lower": "clip_fraction_lower",
    "actor/ppo_kl": "kl/old",
}


def _mean(values: Tensor, mask: Tensor) -> float:
    return float((values.detach() * mask).sum() / mask.sum().clamp(min=1))
