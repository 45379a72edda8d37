"""All that the vLLM engine takes from vLLM. Where versions of vLLM differ, the difference is met here and nowhere else;
a version that was not tested is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.config.lora import MaxLoRARanks
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from rollout_service.config import EngineConfig, adapter_rank
from rollout_service.engines.base import Sampling
from rollout_service.engines.vllm_transfer import BACKEND, WorkerExtension
from turnwire.errors import ConfigError, InvalidRequestError, Problem
from turnwire.torch_weights import policy_tensors

__all__ = [
    "TESTED",
    "AsyncLLM",
    "Counters",
    "EngineDeadError",
    "EngineGenerateError",
    "LoRARequest",
    "ModelFacts",
    "SamplingParams",
    "adapter_requests",
    "arguments",
    "begin",
    "checkpoint_tensors",
    "death",
    "facts",
    "image_inputs",
    "load",
    "sampling_params",
    "scoring_params",
    "shut_down",
    "tokens_input",
    "update",
]

TESTED = SpecifierSet(">=0.32,<0.33")
"""Versions of vLLM that the tests were run with."""
_SHUTDOWN_SECONDS = 5.0
_DEATH_SECONDS = 0.2
"""Between two looks at whether vLLM lives."""
_CPU_CACHE_BYTES = 4 << 30
"""Where nothing is said. vLLM would take nine tenths of a machine's memory, which other services need as well, and not
start where less is free."""
_CPU_BLOCK_TOKENS = 32
"""vLLM's attention on a CPU takes multiples of it; the default of 128 leaves much of a turn out of the prefix cache."""


@dataclass
class Counters:
    """What vLLM's scheduler has now, and what it did so far."""

    running: int = 0
    waiting: int = 0
    generated: int = 0
    prefilled: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """What requests are checked against. `end_ids`: the tokens that end a turn, as the checkpoint has them."""

    longest: int
    vocabulary: int
    end_ids: frozenset[int]
    modalities: tuple[str, ...]


def load(config: EngineConfig, counters: Counters) -> AsyncLLM:
    """vLLM, started: seconds for a small model, minutes for a large one. `counters` are kept up to date from then on.
    Raises ConfigError for settings or a version of vLLM that cannot be used."""
    if Version(vllm.__version__) not in TESTED:
        raise ConfigError([Problem("engine.kind", f"vLLM {vllm.__version__} is not among the tested ones ({TESTED})")])
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(config)), stat_loggers=[_counting(counters)])
    except (TypeError, ValueError) as error:  # of settings: pydantic's are ValueErrors, unknown names TypeErrors
        raise ConfigError([Problem("engine", f"vLLM refuses these settings: {error}")]) from error


def arguments(config: EngineConfig) -> dict[str, Any]:
    """Of vLLM's AsyncEngineArgs, and of its LLM. Raises ConfigError."""
    own = config.vllm
    found: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "max_model_len": config.max_model_tokens,
        "max_num_seqs": config.max_sequences,
        "tensor_parallel_size": own.tensor_parallel,
        "data_parallel_size": own.data_parallel,
        "enforce_eager": own.eager,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # else the checkpoint's own sampling defaults would be mixed in
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
    }
    defaults: dict[str, Any] = {"enable_prefix_caching": True}
    if own.kv_cache_gib is not None:
        found["kv_cache_memory_bytes"] = int(own.kv_cache_gib * 2**30)
    if current_platform.is_cpu():
        if "gpu_memory_utilization" not in own.options:  # which vLLM reads only where no bytes are given
            defaults["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
        found["block_size"] = _CPU_BLOCK_TOKENS
        # A seeded request whose prompt is computed in pieces ends vLLM's worker: after each piece it rewinds the
        # request's generator, which cannot be done to a CPU's.
        found["enable_chunked_prefill"] = False
    if own.adapters:
        found.update(_adapter_arguments(own.adapters))
    if clash := sorted(own.options.keys() & found.keys()):
        raise ConfigError([Problem("engine.vllm.options", f"{', '.join(clash)}: set by Turnwire's own settings")])
    return {**defaults, **found, **own.options}


def _adapter_arguments(adapters: Mapping[str, str]) -> dict[str, Any]:
    rank = max(adapter_rank(Path(folder)) for folder in adapters.values())
    # vLLM's operations for CPUs take the last place for a request without an adapter: one is left empty, which adds 0.
    places = len(adapters) + (1 if current_platform.is_cpu() else 0)
    sizes = [size for size in get_args(MaxLoRARanks) if size >= rank]
    return {"enable_lora": True, "max_loras": places, "max_lora_rank": sizes[0] if sizes else rank}


def adapter_requests(config: EngineConfig) -> dict[str, LoRARequest]:
    """By name, what a request with the adapter brings."""
    return {
        name: LoRARequest(name, number, str(Path(folder).absolute()))
        for number, (name, folder) in enumerate(config.vllm.adapters.items(), 1)
    }


def _counting(counters: Counters) -> type[StatLoggerBase]:
    class Counting(StatLoggerBase):  # type: ignore[misc] # vLLM is another environment's
        """vLLM makes it, with arguments of its own."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if iteration_stats is not None:
                counters.generated += iteration_stats.num_generation_tokens
                counters.prefilled += iteration_stats.prompt_token_stats.computed
            if scheduler_stats is not None:
                counters.running, counters.waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs

        def log_engine_initialized(self) -> None:
            pass

    return Counting


def facts(llm: AsyncLLM) -> ModelFacts:
    """Of the loaded model."""
    model = llm.model_config
    ends = model.try_get_generation_config().get("eos_token_id", model.hf_text_config.eos_token_id)
    ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
    processor = llm.renderer.mm_processor
    seen = ("image",) if processor is not None and "image" in processor.info.supported_mm_limits else ()
    return ModelFacts(model.max_model_len, model.get_vocab_size(), frozenset(ids), ("text", *seen))


def checkpoint_tensors(config: EngineConfig) -> dict[str, torch.Tensor]:
    """The policy's tensors, under the names and in the type in which a trainer sends them."""
    sees = type(AutoConfig.from_pretrained(config.model)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return policy_tensors(kind.from_pretrained(config.model, dtype=getattr(torch, config.dtype)))


async def image_inputs(llm: AsyncLLM, prompt: Sequence[int], images: Sequence[Image.Image]) -> Any:
    """What vLLM generates from: the prompt, in which each image's placeholder has become the image's own tokens. Raises
    InvalidRequestError where images and placeholders do not fit."""
    given = parse_model_prompt(
        llm.model_config, {"prompt_token_ids": list(prompt), "multi_modal_data": {"image": list(images)}}
    )
    try:
        # Past the cache that sends an image to vLLM's other process once: a request fails there whose image came with
        # one that was refused, or is still on its way. What was computed of the image is kept all the same.
        (rendered,) = await llm.renderer.render_cmpl_async([given], skip_mm_cache=True)
    except (AssertionError, RuntimeError, ValueError) as error:  # there is no one kind
        raise InvalidRequestError(f"vLLM does not take these images with this prompt: {error}") from error
    return rendered


async def begin(llm: AsyncLLM, adapters: Iterable[LoRARequest]) -> None:
    """Make ready for updates, at version 0, and load the adapters. Raises ConfigError for one that does not load."""
    await llm.init_weight_transfer_engine(WeightTransferInitRequest())
    await llm.update_weight_version("0")
    for adapter in adapters:
        try:
            await llm.add_lora(adapter)
        except EngineDeadError:
            raise
        except Exception as error:  # of any kind: vLLM passes on what its workers raise
            problem = Problem(f"engine.vllm.adapters.{adapter.lora_name}", f"vLLM does not load it: {error}")
            raise ConfigError([problem]) from error


async def death(llm: AsyncLLM) -> None:
    """Wait until vLLM does not run any more: a process of it died, or it was shut down."""
    while not llm.errored:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(_DEATH_SECONDS)


def shut_down(llm: AsyncLLM) -> None:
    """End its processes. Idempotent."""
    llm.shutdown(_SHUTDOWN_SECONDS)


async def update(llm: AsyncLLM, path: Path, version: int) -> None:
    """Load new weights from a file, while nothing is computed."""
    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info={"path": str(path)}))
    await llm.finish_weight_update(str(version))


def sampling_params(
    sampling: Sampling, *, max_tokens: int, stop_strings: Sequence[str], stop_token_ids: frozenset[int], stream: bool
) -> SamplingParams:
    """One request's, with the logprob of each sampled token."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=max_tokens,
        logprobs=0,
        stop=list(stop_strings),
        stop_token_ids=sorted(stop_token_ids),
        ignore_eos=True,  # which would be the tokenizer's; the model's are among `stop_token_ids`
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        detokenize=bool(stop_strings),
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """Of a request that asks for the logprobs of its prompt alone."""
    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
