"""Tests share two cores with whatever else runs: one thread each, for threads that wait for a core cost all of it."""

import importlib.util
from pathlib import Path

import torch

torch.set_num_threads(1)

# vLLM is never in the trainer's environment. Where it has one of its own, `make test` runs its tests there.
if importlib.util.find_spec("vllm") is None and Path(".venv-vllm").is_dir():
    collect_ignore_glob = ["test_vllm_*.py"]
