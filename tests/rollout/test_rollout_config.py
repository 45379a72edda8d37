"""What `turnwire check` says about a rollout service's config, and the service's process."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import NUMBERS_TURNS, TINY, make_model
from waiting import PROGRAM

from rollout_service.config import RolloutServiceConfig, check
from turnwire import connect
from turnwire.config import convert
from turnwire.errors import ConfigError


def test_good_config_has_no_problems(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    assert check(convert({"engine": {"model": str(folder)}, "tool_target": "127.0.0.1:5"}, RolloutServiceConfig)) == []


def test_every_problem_is_named_with_its_key(tmp_path: Path) -> None:
    values = {
        "engine": {"model": str(tmp_path / "none"), "max_model_tokens": 100},
        "chat": {"template": str(tmp_path / "none.jinja")},
        "tool_target": "localhost",
        "limits": {"max_trajectory_tokens": 200},
        "max_trajectories": 5,
    }
    problems = check(convert(values, RolloutServiceConfig), "services.rollout")
    assert [problem.key.removeprefix("services.rollout.") for problem in problems] == [
        "engine.model",
        "chat.template",
        "tool_target",
        "limits.max_trajectory_tokens",
        "max_trajectories",
    ]


def test_folder_without_a_model_is_a_problem(tmp_path: Path) -> None:
    problems = check(convert({"engine": {"model": str(tmp_path)}}, RolloutServiceConfig))
    assert [problem.message.split(" holds no ")[1].split(";")[0] for problem in problems] == [
        "config.json",
        "tokenizer_config.json",
    ]


def test_cache_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="cached_sequences is 3"):
        convert({"engine": {"model": "x", "cached_sequences": 3}}, RolloutServiceConfig)


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ({"kind": "vllm", "cached_sequences": 300}, "engine.cached_sequences"),
        ({"kind": "vllm", "threads": 1}, "engine.threads"),
        ({"vllm": {"eager": True}}, "engine.vllm"),
    ],
)
def test_a_setting_of_another_engine_is_a_problem(engine: dict[str, Any], key: str) -> None:
    problems = check(convert({"engine": {"model": "hub/model", **engine}}, RolloutServiceConfig))
    assert [problem.key for problem in problems] == [key]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_an_engine_that_is_not_installed_ends_with_what_to_install(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", template=TINY)
    assert "turnwire[rollout-vllm]" in refusal(tmp_path, f"engine: {{kind: vllm, model: {model}}}\n")


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (None, "cannot be read: No such file or directory; save the adapter with peft"),
        ("{", "is not a LoRA adapter's"),
        ('{"peft_type": "IA3"}', "is not a LoRA adapter's: Object missing required field `r`"),
        ('{"r": 0}', "Expected `int` >= 1"),
        ('{"r": 16, "rank_pattern": {"q_proj": 32}}', None),
    ],
)
def test_an_adapter_that_is_none_is_a_problem(tmp_path: Path, written: str | None, says: str | None) -> None:
    if written is not None:
        (tmp_path / "adapter_config.json").write_text(written)
    engine = {"kind": "vllm", "model": "hub/model", "vllm": {"adapters": {"style": str(tmp_path)}}}
    problems = check(convert({"engine": engine}, RolloutServiceConfig))
    assert [problem.key for problem in problems] == ["engine.vllm.adapters.style"] * (says is not None)
    assert all(str(says) in problem.message for problem in problems)


def test_config_is_light() -> None:
    code = "import sys, rollout_service.config; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def serve(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    path = tmp_path / "rollout.yaml"
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "rollout_service", "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refusal(tmp_path: Path, text: str) -> str:
    """What a service says that cannot use its config: the reason, without a traceback."""
    process = serve(tmp_path, text)
    _, errors = process.communicate(timeout=PROGRAM)
    assert process.returncode == 2
    assert "Traceback" not in errors
    return errors


def test_process_serves_until_sigterm(tmp_path: Path) -> None:
    process = serve(tmp_path, f"engine: {{model: {make_model(tmp_path / 'model', template=TINY)}}}\n")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on 127.0.0.1:")
    with connect(rollout=line.split()[-1]) as client:
        assert len(client.rollout.generate([5, 6, 7], 6).token_ids) == 6
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_process_says_what_is_wrong_and_exits_2(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", template=NUMBERS_TURNS)
    errors = refusal(tmp_path, f"engine: {{model: {folder}}}\n")
    assert "chat.template: this chat template cannot be used for turns" in errors
