"""verl's names, as a table: configs are checked against it without loading verl, which takes seconds.

A test holds it equal to the registries of the installed verl. A name that cannot run here says why and what can.
"""

from __future__ import annotations

from typing import Final

ADVANTAGE_ESTIMATORS: Final[dict[str, str]] = {
    "grpo": "",
    "grpo_vectorized": "",
    "grpo_passk": "",
    "gdpo": "",
    "rloo": "",
    "rloo_vectorized": "",
    "opo": "",
    "gpg": "",
    "reinforce_plus_plus": "",
    "reinforce_plus_plus_baseline": "",
    "remax": "",
    "optimal_token_baseline": "",
    "tir_optimal_token_baseline": "",
    "gae": "it needs the values of a trained critic, and there is none here; grpo, rloo and others need none",
}
"""Name to the reason why it cannot run here; empty: it can."""

COMPARES_GROUP: Final = frozenset(ADVANTAGE_ESTIMATORS) - {"gae", "reinforce_plus_plus", "remax"}
"""Estimators whose baseline is the rest of the group: a group needs two trajectories."""

NEEDS_TOKEN_STATISTICS: Final = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})
"""Estimators that need the trainer's own logprobs and the sum of squared probabilities before the update."""

NEEDS_GREEDY_BASELINE: Final = frozenset({"remax"})
"""Estimators whose baseline is the reward of a greedy trajectory, sampled for each prompt."""

POLICY_LOSSES: Final[dict[str, str]] = dict.fromkeys(
    (
        "vanilla",
        "dppo_tv",
        "dppo_kl",
        "gspo",
        "sapo",
        "gpg",
        "clip_cov",
        "kl_cov",
        "geo_mean",
        "dro",
        "cispo",
        "bypass_mode",
    ),
    "",
)

LOSS_AGGREGATIONS: Final = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

_KL: Final = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_KINDS: Final[dict[str, str]] = {
    **dict.fromkeys((*_KL, *(f"{kind}+" for kind in _KL)), ""),
    "full": "verl itself does not implement it; k3 is the low-variance estimator",
}

REJECTION_CRITERIA: Final = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)

LOSS_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "sapo": ("tau_pos", "tau_neg"),
    "clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
    "dro": ("dro_beta",),
    "bypass_mode": ("loss_type",),
}
"""Settings that a loss reads beside the clip ratios."""
