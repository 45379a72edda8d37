"""Run by vLLM's own interpreter: `LLM.generate` of the requests on stdin; tokens and seconds go to a file.

The settings are those that the rollout service gives to vLLM.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from vllm import LLM

from rollout_service.config import EngineConfig
from rollout_service.engines import vllm_api
from rollout_service.engines.base import Sampling
from turnwire.config import convert


def main() -> None:
    asked = json.load(sys.stdin)
    llm = LLM(**vllm_api.arguments(convert(asked["engine"], EngineConfig, "stdin")))
    requests = [
        (
            {"prompt_token_ids": prompt},
            vllm_api.sampling_params(
                Sampling(seed=seed),
                max_tokens=asked["max_tokens"],
                stop_strings=(),
                stop_token_ids=frozenset(),
                stream=False,
            ),
        )
        for seed, prompt in enumerate(asked["prompts"])
    ]
    llm.generate(*zip(*requests[:2], strict=True), use_tqdm=False)  # warm up
    begin = time.perf_counter()
    outputs = llm.generate(*map(list, zip(*requests, strict=True)), use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    Path(asked["output"]).write_text(json.dumps([tokens, seconds]), encoding="ascii")  # vLLM writes to stdout


if __name__ == "__main__":
    main()
