"""Where benchmarks find vLLM, which is installed in an environment of its own."""

from __future__ import annotations

from pathlib import Path

VLLM_PYTHON = Path(".venv-vllm/bin/python")
"""Made by `make vllm`."""


class NoVllmError(Exception):
    """There is no environment with vLLM."""


def vllm_python() -> str:
    """The interpreter beside which vLLM is installed. Raises NoVllmError."""
    if not VLLM_PYTHON.exists():
        raise NoVllmError(f"there is no {VLLM_PYTHON}; `make vllm` makes it")
    return str(VLLM_PYTHON.absolute())
