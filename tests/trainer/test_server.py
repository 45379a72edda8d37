"""The run API: repeated starts, refusals, watching across restarts, stopping."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from services import (
    all_services,
    finished,
    last_state,
    letters_run,
    notices,
    rollout_service,
    tool_service,
    trainer_service,
    watch,
)
from waiting import PATIENCE

from turnwire.client.trainer import TrainerClient
from turnwire.errors import (
    AlreadyExistsError,
    ConfigError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    WrongOrderError,
)
from turnwire.v1 import trainer_pb2 as pb


def short(model: Path, **sections: Any) -> dict[str, Any]:
    return letters_run(model, **{"training": {"steps": 2}, "data__eval": [], **sections})


async def test_a_repeated_start_is_the_same_run_and_another_config_is_refused(model_path: Path, tmp_path: Path) -> None:
    values = short(model_path, training={"steps": 30})
    async with all_services(model_path, tmp_path) as (client, _):
        first, second = await asyncio.gather(*(client.start_run("run", yaml.safe_dump(values)) for _ in range(2)))
        assert first.run_id == second.run_id == "run"
        with pytest.raises(AlreadyExistsError, match=r"'run' is live with another config: checkpoint\.every is 3, and"):
            await client.start_run("run", yaml.safe_dump({**values, "checkpoint": {"every": 3}}))
        with pytest.raises(ExhaustedError, match="run 'run' is live, and one is the limit"):
            await client.start_run("other", yaml.safe_dump(values))
        stopped = await client.stop_run("run")
        assert stopped.state == pb.RUN_STATE_STOPPED
        with pytest.raises(WrongOrderError, match="is not live: STOPPED"):
            await client.stop_run("run")
        assert [run.run_id for run in await client.list_runs()] == ["run"]


async def test_a_run_goes_on_with_a_config_that_changes_nothing_of_what_it_trains(
    model_path: Path, tmp_path: Path
) -> None:
    values = short(model_path, training={"steps": 2})
    refusals = {
        "seed is 9, and was 0": {"seed": 9},
        "training.steps is 1, and was 2": {"training": {**values["training"], "steps": 1}},
        "optimizer.schedule is 'linear', and was 'constant'": {"optimizer": {"schedule": "linear"}},
        "training.steps is 4, and was 2": {  # the rate of the steps that are done would have been another
            "training": {**values["training"], "steps": 4},
            "optimizer": {"schedule": "linear"},
        },
        "evaluation.samples is 2, and was 1": {"evaluation": {"samples": 2}},
        "data.train.0.size is 40, and was 50": {"data": {"train": [{**values["data"]["train"][0], "size": 40}]}},
        "data.train.2.kind is not there, and was 'procedural'": {"data": {"train": values["data"]["train"][:2]}},
    }
    free = {"checkpoint": {"every": 1, "keep": 5}, "evaluation": {"every": 1}, "metrics": {"tensorboard": True}}
    async with all_services(model_path, tmp_path) as (client, _):
        await finished(client, "run", values)
        for reason, changed in refusals.items():
            with pytest.raises(AlreadyExistsError, match=re.escape(reason)):
                await client.start_run("run", yaml.safe_dump({**values, **changed}))
        assert last_state(await finished(client, "run", {**values, **free})) == ("FINISHED", "")
    async with trainer_service("127.0.0.1:1", tmp_path) as client:
        with pytest.raises(
            AlreadyExistsError, match=r"'run' exists with another config: seed is 1, and was 0\. Choose"
        ):
            await client.start_run("run", yaml.safe_dump({**values, "seed": 1, "checkpoint": {"keep": 2}}))


async def test_a_restarted_trainer_knows_its_runs_and_their_events_go_on(model_path: Path, tmp_path: Path) -> None:
    async with all_services(model_path, tmp_path) as (client, _):
        events = await finished(client, "run", short(model_path))
        again = await client.start_run("run", yaml.safe_dump(short(model_path)))
        assert again.state == pb.RUN_STATE_FINISHED
    async with trainer_service("127.0.0.1:1", tmp_path) as client:
        assert (await client.get_run("run")).state == pb.RUN_STATE_FINISHED
        assert await watch(client, "run") == events
        assert await watch(client, "run", 3) == events[2:]


async def test_a_run_that_was_live_when_its_service_was_told_to_end_goes_on_with_the_next(
    model_path: Path, tmp_path: Path
) -> None:
    values = short(model_path, training={"steps": 20})
    async with tool_service() as tools, rollout_service(model_path, tools) as (rollout, _):
        async with trainer_service(rollout, tmp_path, tools, resume=True) as client:
            await client.start_run("run", yaml.safe_dump(values))
            seen = await until_step(client, "run", 1)
        async with trainer_service(rollout, tmp_path, tools, resume=True) as client:
            rest = await watch(client, "run", len(seen) + 1)
            assert last_state(rest) == ("FINISHED", "")
            assert "it goes on from its last checkpoint" in " ".join(notices(rest))
            await client.start_run("stopped", yaml.safe_dump(values))
            await until_step(client, "stopped", 1)
            await client.stop_run("stopped")
        async with trainer_service(rollout, tmp_path, tools, resume=True) as client:
            assert (await client.get_run("stopped")).state == pb.RUN_STATE_STOPPED


async def until_step(client: TrainerClient, run_id: str, step: int) -> list[pb.WatchRunResponse]:
    """Events of a run until it has finished this step."""
    events = []
    async for event in client.watch_run(run_id):
        events.append(event)
        if event.WhichOneof("event") == "step" and event.step.step >= step:
            break
    return events


async def test_a_start_says_everything_that_is_wrong_and_leaves_nothing_behind(tmp_path: Path) -> None:
    values = letters_run(Path("/nowhere"), algorithm={"advantage_estimator": "grop"})
    async with trainer_service("127.0.0.1:1", tmp_path) as client:
        with pytest.raises(ConfigError) as caught:
            await client.start_run("run", yaml.safe_dump(values))
        assert {problem.key for problem in caught.value.problems} == {"model.path", "algorithm.advantage_estimator"}
        with pytest.raises(ConfigError, match="unknown key; did you mean 'reward'"):
            await client.start_run("run", yaml.safe_dump({**values, "rewad": 1}))
        with pytest.raises(ConfigError):
            await client.start_run("run", "{not: [yaml")
        with pytest.raises(InvalidRequestError, match="run_id"):
            await client.start_run("../elsewhere", yaml.safe_dump(values))
        with pytest.raises(NotFoundError, match="there is no run 'nothing'"):
            await client.get_run("nothing")
        assert await client.list_runs() == []
    assert not os.listdir(tmp_path)


async def test_calls_are_answered_while_a_run_waits_for_its_rollout_service(model_path: Path, tmp_path: Path) -> None:
    async with trainer_service("127.0.0.1:1", tmp_path) as client:
        await client.start_run("run", yaml.safe_dump(short(model_path)))
        async for event in client.watch_run("run"):
            if event.WhichOneof("event") == "notice" and "waiting" in event.notice.text:
                break
        assert (await client.get_run("run", timeout=PATIENCE)).state == pb.RUN_STATE_RUNNING
        assert (await client.stop_run("run", timeout=PATIENCE)).state == pb.RUN_STATE_STOPPED


async def test_a_run_that_cannot_go_on_fails_with_the_reason(model_path: Path, tmp_path: Path) -> None:
    values = short(model_path, reward={"name": "reasoning_gym"})  # which these tasks are not of
    async with all_services(model_path, tmp_path) as (client, _):
        events = await finished(client, "run", values)
        run = await client.get_run("run")
    assert last_state(events) == ("FAILED", run.error)
    assert run.error.startswith("step 1: 16 of 16 trajectories failed; the first: reward reasoning_gym: ValueError")
