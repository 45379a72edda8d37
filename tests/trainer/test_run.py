"""Whole runs through the three real services."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from run_files import lines, steps
from services import (
    all_services,
    finished,
    last_state,
    letters_run,
    watch,
)
from staged import staged
from waiting import PATIENCE

from rollout_service.staging import StagedWeights
from trainer_service.ledger import audit

pytestmark = pytest.mark.needs("isolated-sandbox")


EXPECTED = {
    *("reward/demo/sql", "reward/mean", "tool_use/demo/sql", "tool_use/mean", "tokens_per_second", "staleness/mean"),
    *(f"time/{part}_seconds" for part in ("step", "waiting", "forward", "backward", "sync")),
    *("loss", "tokens/mask_fraction", "entropy", "canary/mean_gap", "gradient_norm", "clip_fraction", "kl/old"),
}


async def test_a_run_trains_evaluates_and_leaves_everything_behind(model_path: Path, tmp_path: Path) -> None:
    values = letters_run(
        model_path,
        evaluation={"every": 2},
        optimizer={"learning_rate": 0.01},
        metrics={"tensorboard": True, "trajectories_per_step": 5},
    )
    async with all_services(model_path, tmp_path) as (client, _):
        events = await finished(client, "one", values)
        run = await client.get_run("one")
    folder = tmp_path / "one"
    assert last_state(events) == ("FINISHED", "")
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert (run.step, run.total_steps, run.folder) == (3, 3, str(folder))
    for name in ("config.yaml", "summary.json", "learning_curves.png", "tensorboard", "checkpoints/step-000003/model"):
        assert (folder / name).exists(), name
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["accuracy"]) == {"demo/python", "demo/sql", "demo/search"}
    assert set(summary["evaluations"]) == {"0", "2", "3"}
    for source, accuracy in summary["accuracy"].items():
        assert accuracy == {when: summary["evaluations"][at][source] for when, at in (("before", "0"), ("after", "3"))}
    assert summary["seed"] == 0
    assert summary["seconds"] > sum(entry["time/step_seconds"] for entry in steps(folder))
    assert summary["ledger"] == {"trained": 48, "filtered": 0, "evaluated": 36, "failed": 0, "failures": {}}
    assert audit(folder / "ledger.jsonl") == {"counts": {"trained": 48, "evaluated": 36}, "failures": {}, "twice": []}
    step = steps(folder)[0]
    assert set(step) >= EXPECTED
    assert step["logprob_gap/mean"] < 1e-4
    assert step["canary/worst_gap"] < 1e-4
    train = list(lines(folder / "trajectories" / "train.jsonl"))
    assert len(train) == 15
    for record in train:
        for segment in record["segments"]:
            length = len(segment["token_ids"])
            assert length == len(segment["tokens"]) == len(segment["loss_mask"]) == len(segment["logprobs"])
            assert sum(segment["loss_mask"]) == sum(end - start for start, end, _ in segment["weight_versions"])
            assert {version for _, _, version in segment["weight_versions"]} == {record["step"]}
            for turn in segment["turns"]:
                assert all(segment["loss_mask"][turn["action_start"] : turn["action_end"]])
                assert not any(segment["loss_mask"][turn["action_end"] : turn["observation_end"]])
    assert len(list(lines(folder / "trajectories" / "eval.jsonl"))) == 36


async def test_a_policy_learns_what_it_is_rewarded_for(model_path: Path, tmp_path: Path) -> None:
    values = letters_run(model_path, training={"steps": 12}, optimizer={"learning_rate": 0.02}, data__eval=[])
    async with all_services(model_path, tmp_path) as (client, _):
        await finished(client, "one", values)
    rewards = [entry["reward/mean"] for entry in steps(tmp_path / "one")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


async def test_tasks_that_the_tools_refuse_stop_the_run_at_once(model_path: Path, tmp_path: Path) -> None:
    row = {
        "data_source": "x",
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"ground_truth": "1"},
        "extra_info": {"index": 0},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    data = {"train": [{"kind": "parquet", "path": str(tmp_path / "train.parquet")}], "eval": []}
    values = letters_run(model_path, data=data, tools=["pythn"], rollout={"retry": {"patience_seconds": 600}})
    async with all_services(model_path, tmp_path / "runs") as (client, _):
        events = await asyncio.wait_for(finished(client, "run", values), PATIENCE)
    state, detail = last_state(events)
    assert state == "FAILED"
    assert detail.startswith("step 1: 16 of 16 trajectories failed; the first: invalid task: unknown tool 'pythn'")
    books = audit(tmp_path / "runs" / "run" / "ledger.jsonl")
    assert books["counts"] == {"failed": 16}
    assert all(reason.startswith("invalid task: unknown tool 'pythn'") for reason in books["failures"])


async def test_the_canary_stops_a_run_whose_engine_has_other_weights(model_path: Path, tmp_path: Path) -> None:
    values = letters_run(model_path, training={"steps": 50}, data__eval=[])
    async with all_services(model_path, tmp_path) as (client, service):
        apply = service._engine.apply_weights

        async def corrupted(weights: StagedWeights, *arguments: Any) -> float:
            tensors = dict(weights.tensors())
            name = next(name for name in tensors if "mlp" in name)
            with contextlib.closing(staged({**tensors, name: tensors[name] + 0.5})) as wrong:
                wrong.specs = weights.specs
                return await apply(wrong, *arguments)

        await client.start_run("run", yaml.safe_dump(values))
        async for event in client.watch_run("run"):
            if event.WhichOneof("event") == "step" and event.step.step == 1:
                service._engine.apply_weights = corrupted  # type: ignore[method-assign]
        run = await client.get_run("run")
    assert run.step < 50
    assert "the engine's logprobs are" in run.error
    assert "checksum" in run.error


@pytest.mark.parametrize("max_staleness", [1, 2])
async def test_stale_trajectories_are_bounded_and_all_are_accounted_for(
    model_path: Path, tmp_path: Path, max_staleness: int
) -> None:
    values = letters_run(model_path, training={"steps": 6}, rollout={"max_staleness": max_staleness}, data__eval=[])
    async with all_services(model_path, tmp_path) as (client, _):
        events = await finished(client, "run", values)
    assert last_state(events) == ("FINISHED", "")
    assert 0 < max(entry["staleness/max"] for entry in steps(tmp_path / "run")) <= max_staleness
    assert audit(tmp_path / "run" / "ledger.jsonl") == {"counts": {"trained": 96}, "failures": {}, "twice": []}


async def test_a_stopped_run_resumes_and_a_verl_parquet_goes_through_unchanged(
    model_path: Path, tmp_path: Path
) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {n} plus {n}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(20)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    values = letters_run(
        model_path,
        data={"train": [{"kind": "parquet", "path": str(tmp_path / "train.parquet")}], "eval": []},
        tools=["python"],
        training={"steps": 20},
        rollout={"max_staleness": 1},
        reward={"name": "numeric"},
    )
    async with all_services(model_path, tmp_path / "runs") as (client, _):
        await client.start_run("run", yaml.safe_dump(values))
        async for event in client.watch_run("run"):
            if event.WhichOneof("event") == "step" and event.step.step == 3:
                break
        stopped = await client.stop_run("run")
        assert 3 <= stopped.step < 20
        assert last_state(await watch(client, "run"))[0] == "STOPPED"
        events = await finished(client, "run", values)
    assert last_state(events) == ("FINISHED", "")
    folder = tmp_path / "runs" / "run"
    assert [entry["step"] for entry in steps(folder)] == list(range(1, 21))
    assert audit(folder / "ledger.jsonl") == {"counts": {"trained": 320}, "failures": {}, "twice": []}
    keys = [entry["key"].split("/")[1] for entry in lines(folder / "ledger.jsonl")]
    assert sorted(map(int, set(keys))) == list(range(80))


async def test_a_finished_run_can_be_lengthened_as_if_it_had_been_longer_from_the_start(
    model_path: Path, tmp_path: Path
) -> None:
    def values(steps: int, **sections: Any) -> dict[str, Any]:
        return letters_run(model_path, training={"steps": steps}, optimizer={"learning_rate": 0.01}, **sections)

    async with all_services(model_path, tmp_path) as (client, _):
        await finished(client, "whole", values(4))
        await finished(client, "run", values(2))
        events = await finished(client, "run", values(4, checkpoint={"every": 1}, evaluation={"every": 3}))
        run = await client.get_run("run")
    assert last_state(events) == ("FINISHED", "")
    assert (run.step, run.total_steps) == (4, 4)
    rewards = [[entry["loss"] for entry in steps(tmp_path / name)] for name in ("run", "whole")]
    assert rewards[0] == pytest.approx(rewards[1], rel=1e-4, abs=1e-5)
    assert list(json.loads((tmp_path / "run" / "summary.json").read_text())["evaluations"]) == ["0", "2", "3", "4"]
