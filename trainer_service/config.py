"""What can be set: the trainer service, and one training run.

Light on purpose (msgspec only): the command line and the service read it before torch or verl are loaded. Types and
ranges are checked while a file is read; `check` then says what is wrong across fields and outside of the file, and
`warnings` says what will run but likely not as hoped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trainer_service.ranges import AboveZero, Count, Fraction, NonNegative, Positive, Seconds, Seed
from trainer_service.tasks_config import DataConfig, RewardConfig
from turnwire.errors import Problem
from turnwire.security.check import check_client, check_server
from turnwire.security.config import PLAINTEXT, ConnectionSecurity
from turnwire.serving import ServerConfig


class TrainerServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The service's process.

    server: where it listens.
    rollout_target: `host:port` of the rollout service that its runs generate with.
    tool_target: `host:port` of the tool service, for rewards that run something there, as `unit_tests`.
    client: how both are known, and what is shown to them; its token needs the role `trainer`.
    runs_folder: where each run gets a folder of its own.
    resume: whether a run that was live when the service ended goes on by itself once the service is back. Else it has
        failed (or, where the service was told to end, stopped) until someone starts it again.
    rank_timeout_seconds: of several processes (torchrun), how long one may keep the others waiting within an update
        before the service ends: more than the slowest micro-batch takes.
    """

    server: ServerConfig = ServerConfig()
    rollout_target: str = "127.0.0.1:50052"
    tool_target: str = "127.0.0.1:50051"
    client: ConnectionSecurity = PLAINTEXT
    runs_folder: str = "runs"
    resume: bool = False
    rank_timeout_seconds: Seconds = 600.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The policy to train.

    path: folder of a transformers checkpoint, or its name on a hub. The rollout engine must hold the same architecture.
    made_by: the command that makes that folder, for who has not made it yet.
    dtype: what the model computes in; `auto` is float32 on a CPU and bfloat16 on a GPU. The trained weights are always
        kept in float32, and sent to the engine in this type.
    attention: the transformers attention implementation, as `sdpa`, `eager` or `flash_attention_2`.
    device: `auto` takes the first GPU, if there is one.
    gradient_checkpointing: trade a second forward pass for activation memory.
    """

    path: str
    made_by: str = ""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: str = "sdpa"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False


class KLConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The penalty for leaving the starting policy.

    coefficient: 0 is off, and then no reference model is loaded.
    kind: verl's estimator of the divergence: k1, abs, k2, k3 (or kl, mse, low_var_kl), with `+` for the gradient of k2.
    placement: added to the loss, or taken off each token's reward.
    """

    coefficient: NonNegative = 0.0
    kind: str = "k3"
    placement: Literal["loss", "reward"] = "loss"


class RolloutCorrectionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """verl's correction for the gap between the policy that sampled and the one that trains.

    importance_sampling: weights per token or per sequence; unset is off.
    importance_threshold: weights are cut above it; `lower_upper` drops those outside instead.
    normalize: scale the weights to a mean of 1.
    rejection: criteria separated by commas, as `token_k1,seq_mean_k3`; unset is off.
    rejection_threshold: one for all criteria, or one each separated by commas (k1: `lower_upper`).
    """

    importance_sampling: Literal["token", "sequence"] | None = None
    importance_threshold: float | str = 2.0
    normalize: bool = False
    rejection: str | None = None
    rejection_threshold: float | str | None = None


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The mathematics, by verl's names.

    advantage_estimator, policy_loss, loss_aggregation: `turnwire check` lists the names.
    normalize_by_std: divide group advantages by their standard deviation (GRPO); off is Dr. GRPO.
    gamma: discount per token, for estimators that have one.
    clip_ratio_low, clip_ratio_high: how far a token's probability ratio may fall below or rise above 1.
    clip_ratio_c: the lower bound of dual clipping.
    loss_scale_factor: the constant of `seq-mean-token-sum-norm`; unset: the longest response of the batch.
    entropy_coefficient: weight of the entropy bonus; 0 is off.
    kl: the penalty for leaving the starting policy.
    old_logprobs: the denominator of the probability ratio. `rollout` takes what the engine sampled with: the behaviour
        policy, right at any staleness and free. `recompute` takes the trainer's own, before the update: the ratio then
        starts at exactly 1, costs nothing at one update a batch, and leaves the gap to the engine to
        `rollout_correction`.
    rollout_correction: importance weights and rejection between the engine's logprobs and the recomputed ones.
    filter_zero_variance: leave groups whose rewards are all equal out of the update. They carry no signal.
    mini_batches: optimizer steps per pass over a batch.
    epochs: passes over a batch.
    loss_options: settings that single losses read: tau_pos, tau_neg (sapo), clip_cov_ratio, clip_cov_lb, clip_cov_ub,
        kl_cov_ratio, ppo_kl_coef, dro_beta, loss_type (bypass_mode: ppo_clip or reinforce).
    reward_parts, reward_part_weights: the parts of the reward that `gdpo` normalises one by one, and their weights.
    """

    advantage_estimator: str = "grpo"
    policy_loss: str = "vanilla"
    loss_aggregation: str = "token-mean"
    normalize_by_std: bool = True
    gamma: Fraction = 1.0
    clip_ratio_low: AboveZero = 0.2
    clip_ratio_high: AboveZero = 0.2
    clip_ratio_c: Annotated[float, Meta(gt=1)] = 3.0
    loss_scale_factor: Positive | None = None
    entropy_coefficient: NonNegative = 0.0
    kl: KLConfig = KLConfig()
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    rollout_correction: RolloutCorrectionConfig | None = None
    filter_zero_variance: bool = False
    mini_batches: Positive = 1
    epochs: Positive = 1
    loss_options: dict[str, float | str] = {}
    reward_parts: list[str] = []
    reward_part_weights: list[float] = []


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. temperature 0 is greedy; top_k 0 is off."""

    temperature: NonNegative = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Count = 0


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one trajectory; an unset one is the rollout service's.

    max_turns: actions. max_action_tokens: of one action. max_observation_tokens: of one observation, the rest is cut.
    max_trajectory_tokens: prompt, actions and observations together.
    tool_timeout_seconds: one tool turn. trajectory_timeout_seconds: all of it.
    """

    max_turns: Positive | None = None
    max_action_tokens: Positive | None = None
    max_observation_tokens: Positive | None = None
    max_trajectory_tokens: Positive | None = None
    tool_timeout_seconds: Seconds | None = None
    trajectory_timeout_seconds: Seconds | None = None


class FinalAnswerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tags around a final answer."""

    open: str = "<answer>"
    close: str = "</answer>"


class RetryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What happens when our infrastructure fails a trajectory (never a reward of 0).

    attempts: tries of one trajectory, counted while others succeed.
    first_delay_seconds, max_delay_seconds: the pause before a retry, doubling from the one to the other.
    patience_seconds: how long a trajectory is retried while none succeeds: an outage to be waited out.
    """

    attempts: Positive = 5
    first_delay_seconds: Seconds = 0.5
    max_delay_seconds: Seconds = 10.0
    patience_seconds: Seconds = 600.0


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How trajectories are generated.

    group_size: trajectories per prompt; group estimators compare them.
    sampling, limits: of each trajectory.
    final_answer: tags of the final answer; unset: a turn without a tool call is the answer.
    max_in_flight: trajectories at once.
    max_staleness: updates that may pass between sampling and training. 0 waits for each batch, and makes a run
        reproducible; 1 and more generate during the update.
    retry: what is done when infrastructure fails.
    """

    group_size: Positive = 8
    sampling: SamplingConfig = SamplingConfig()
    limits: LimitsConfig = LimitsConfig()
    final_answer: FinalAnswerConfig | None = None
    max_in_flight: Positive = 64
    max_staleness: Count = 0
    retry: RetryConfig = RetryConfig()


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW.

    learning_rate: after the warm-up. betas, eps, weight_decay: AdamW's.
    warmup_steps: optimizer steps from 0 to the full rate.
    schedule: after the warm-up: `constant`, or down to `final_fraction` of the rate at the last step.
    gradient_clip: largest norm of the gradient; 0 is off.
    """

    learning_rate: AboveZero = 1e-5
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: AboveZero = 1e-8
    weight_decay: NonNegative = 0.0
    warmup_steps: Count = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: Fraction = 0.0
    gradient_clip: NonNegative = 1.0


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How long, and in which pieces.

    steps: batches to train on; 0 only evaluates.
    prompts_per_step: groups in a batch; times `rollout.group_size` is the number of trajectories.
    tokens_per_micro_batch: padded tokens in one forward pass; bounds activation memory.
    threads: CPU threads of the trainer; unset: torch's default.
    """

    steps: Count
    prompts_per_step: Positive = 32
    tokens_per_micro_batch: Positive = 8192
    threads: Positive | None = None


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation on `data.eval`, through the same rollouts as training.

    every: steps between evaluations; 0: only before and after.
    before, after: evaluate the policy as it starts, and as it ends.
    tasks: tasks of each source; unset: all.
    samples: trajectories per task; accuracy is their mean reward.
    sampling: unset: as in training; temperature 0 is greedy.
    """

    every: Count = 0
    before: bool = True
    after: bool = True
    tasks: Positive | None = None
    samples: Positive = 1
    sampling: SamplingConfig | None = None


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files there bear the names of their run


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How new weights reach the engine.

    transport: `grpc` sends them in checksummed chunks, and goes on where a connection broke; `shm` writes a safetensors
        file to shared memory, for services on one host; `file` to a folder that both sides see.
    folder: of `file`; unset: the run's folder.
    canary_every: steps between comparisons of the engine's logprobs with the trainer's on fixed tokens; 0 is off.
    canary_sequences, canary_tokens: how many sequences, of how many tokens.
    canary_mean, canary_worst: the largest gap of log-probability, on average and at one token; past it the run stops.
        Unset: 0.001 and 0.01 in float32, 0.05 and 1 in bfloat16.
    """

    transport: Literal["grpc", "shm", "file"] = "grpc"
    folder: str | None = None
    canary_every: Count = 1
    canary_sequences: Positive = 4
    canary_tokens: Annotated[int, Meta(ge=2)] = 32
    canary_mean: AboveZero | None = None
    canary_worst: AboveZero | None = None


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """every: steps between checkpoints; 0: only the last. keep: how many stay on the disk."""

    every: Count = 10
    keep: Positive = 2


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """tensorboard: also write event files. trajectories_per_step: how many are kept in trajectories/train.jsonl."""

    tensorboard: bool = True
    trajectories_per_step: Count = 16


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One training run: what `TrainerService.StartRun` takes as YAML.

    name: for people. seed: of everything drawn at random.
    tools: names of the tools in play, for tasks that name none themselves.
    """

    name: str
    seed: Seed = 0
    model: ModelConfig
    data: DataConfig
    tools: list[str] = []
    reward: RewardConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()


def check_service(config: TrainerServiceConfig) -> list[Problem]:
    """Everything that is wrong with the service's config beyond its types."""
    return [
        *check_server(config.server.tls, config.server.tokens),
        *check_client(config.client, [config.rollout_target, config.tool_target]),
    ]


def check(
    config: RunConfig,
    served_tools: Collection[str] | None = None,
    check_context: Callable[[str, dict[str, Any]], None] | None = None,
) -> list[Problem]:
    """Everything that is wrong with a run's config beyond its types. `served_tools`: what the tool service has, if
    known. `check_context`: raises InvalidRequestError for a context that a served tool would refuse.
    """
    from trainer_service import checks  # noqa: PLC0415 - loads rewards and data; this module stays light

    return checks.problems(config, served_tools, check_context)


def warnings(config: RunConfig) -> list[Problem]:
    """What will run, but likely not as hoped."""
    from trainer_service import checks  # noqa: PLC0415 - as above

    return checks.warnings(config)
