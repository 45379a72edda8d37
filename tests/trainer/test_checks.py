"""What `turnwire check` says about a run's config: the key, what is wrong, what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_harness import DEMO, run_config, run_values
from waiting import PROGRAM

from trainer_service import names
from trainer_service.config import RunConfig, check, warnings
from turnwire.config import convert
from turnwire.errors import ConfigError


def said(model_path: Path, served: list[str] | None = None, **sections: Any) -> list[str]:
    return [str(problem) for problem in check(run_config(model_path, **sections), served)]


def test_a_good_config_has_no_problem(model_path: Path) -> None:
    assert said(model_path, ["python", "sql", "search"]) == []
    for estimator, reason in names.ADVANTAGE_ESTIMATORS.items():
        assert bool(said(model_path, algorithm__advantage_estimator=estimator)) == bool(reason)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"algorithm__advantage_estimator": "grop"},
            "algorithm.advantage_estimator: unknown: 'grop'; did you mean 'grpo'?",
        ),
        ({"algorithm__advantage_estimator": "gae"}, "'gae' cannot run here: it needs the values of a trained critic"),
        ({"algorithm__policy_loss": "gsop"}, "algorithm.policy_loss: unknown: 'gsop'; did you mean 'gspo'?"),
        ({"algorithm__loss_aggregation": "token_mean"}, "did you mean 'token-mean'?"),
        ({"algorithm__kl": {"kind": "full"}}, "algorithm.kl.kind: 'full' cannot run here: verl itself does not"),
        ({"weights": {"folder": "x"}}, "weights.folder: is not read by the transport grpc"),
        ({"weights": {"transport": "shm", "folder": "x"}}, "weights.folder: is not read by the transport shm"),
        ({"algorithm__policy_loss": "dro"}, "algorithm.loss_options.dro_beta: the loss dro needs it"),
        ({"algorithm__loss_options": {"tau_pos": 1.0}}, "the loss vanilla does not read it"),
        ({"algorithm__rollout_correction": {}}, "set old_logprobs to `recompute`, or remove this"),
        (
            {"algorithm": {"old_logprobs": "recompute", "rollout_correction": {"rejection": "token_k1"}}},
            "rejection and rejection_threshold go together",
        ),
        (
            {
                "algorithm": {
                    "old_logprobs": "recompute",
                    "rollout_correction": {"rejection": "tokn_k1", "rejection_threshold": "x"},
                }
            },
            "did you mean 'token_k1'?",
        ),
        ({"rollout__group_size": 1}, "rollout.group_size: grpo compares the trajectories of a prompt: at least 2"),
        ({"rollout__sampling": {"temperature": 0}}, "training needs trajectories that differ"),
        ({"reward": {"name": "exactmatch"}}, "reward.name: unknown reward 'exactmatch'; did you mean 'exact_match'?"),
        ({"data__train": [{"kind": "jsonl", "path": "nothing.jsonl"}]}, "data.train.0.path: there is no file"),
        ({"model": {"path": "./nothing"}}, "model.path: there is no model in"),
        ({"data__eval": [{**DEMO[1], "start": 49}]}, "data.eval.0: has tasks that data.train.1 trains on"),
        ({"reward": {"name": "numeric"}}, "data.train.2: task demo-search-"),
        ({"tools": ["pyton"]}, "tools: no tool 'pyton' is served; did you mean 'python'?"),
    ],
)
def test_a_problem_is_named_with_its_key_and_its_fix(sections: dict[str, Any], expected: str, model_path: Path) -> None:
    found = said(model_path, ["python", "sql", "search"], **sections)
    assert any(expected in problem for problem in found), found


def test_tools_that_tasks_name_must_be_served(model_path: Path) -> None:
    found = said(model_path, ["python", "sql"])
    assert any("data.train.2: its tasks use the tool 'search', which is not served" in problem for problem in found)


def test_all_problems_are_said_at_once(model_path: Path) -> None:
    found = said(model_path, rollout__group_size=1, reward={"name": "x"}, algorithm__policy_loss="y")
    assert len(found) == 3


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"data__train": [{**DEMO[0], "size": None}]}, "a procedural source needs `size`"),
        ({"data__train": [{"kind": "parquet"}]}, "a parquet source needs `path`"),
        ({"data__train": [{"kind": "jsonl", "path": "x", "generator": "demo"}]}, "reads no `generator`"),
        ({"data__train": [{"kind": "csv", "path": "x"}]}, "data.train.0.kind"),
        ({"training": {"prompts_per_step": 0}}, "training.prompts_per_step"),
        ({"optimizer": {"learning_rte": 1}}, "did you mean 'learning_rate'?"),
    ],
)
def test_types_and_ranges_are_checked_while_reading(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(run_values("x", **sections), RunConfig)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"rollout__max_in_flight": 8}, "rollout.max_in_flight: 8 trajectories at once; below 16"),
        ({"rollout__sampling": {"top_p": 0.9}}, "rollout.sampling: the engine's logprobs"),
        (
            {"rollout__max_staleness": 1, "algorithm__old_logprobs": "recompute"},
            "algorithm.old_logprobs: with max_staleness above 0",
        ),
        ({"algorithm__kl": {"coefficient": 0.1, "kind": "k1"}}, "algorithm.kl.kind: the gradient of k1"),
        ({"data__eval": [], "evaluation": {"every": 5}}, "evaluation.every: there is nothing to evaluate on"),
        ({"weights": {"canary_every": 0}}, "weights.canary_every: nothing would notice"),
    ],
)
def test_doubtful_settings_are_warnings(sections: dict[str, Any], expected: str, model_path: Path) -> None:
    found = [str(problem) for problem in warnings(run_config(model_path, **sections))]
    assert any(expected in problem for problem in found), found


def test_a_check_loads_neither_torch_nor_verl(model_path: Path) -> None:
    light = (
        "import sys; from trainer_service.config import RunConfig, check; from turnwire.config import convert\n"
        "import json; check(convert(json.loads(sys.argv[1]), RunConfig))\n"
        "assert not {'torch', 'verl', 'transformers'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", light, json.dumps(run_values(model_path))], check=True, timeout=PROGRAM)
