"""One Rollout stream: how many trajectories it takes, what ends it, what is left of them. The policy is scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollout_harness import TAGS, no_sessions, reason, rollouts, script
from tiny_models import TINY, make_model
from waiting import eventually

from rollout_service.rollouts import EVENTS_QUEUED, RolloutStream
from turnwire.client.rollout import rollout_task
from turnwire.errors import AlreadyExistsError, InvalidRequestError, UnavailableError
from turnwire.v1 import common_pb2, rollout_pb2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=TINY)


async def test_closed_stream_cancels_its_trajectories(folder: Path, tmp_path: Path) -> None:
    async with rollouts(folder, script(f"<gate>{tmp_path / 'never'}</gate>")) as running:
        async with running.client.rollouts() as stream:
            for number in range(5):
                await stream.submit(rollout_task(str(number), "q", ["gate"]))
            await eventually(lambda: len(running.engine.jobs) == 5)
        await no_sessions(running)
        assert sorted(running.engine.released) == list("01234")
        assert (await running.client.get_server_info()).trajectories_running == 0


async def test_a_client_that_does_not_read_does_not_hold_a_cancelled_trajectorys_session(
    folder: Path, tmp_path: Path
) -> None:
    async with rollouts(folder, script(f"<gate>{tmp_path / 'never'}</gate>")) as running:
        service = running.service
        stream = RolloutStream(service._agent, service._tools, service._admission, service._parse, most=1, idle=600.0)
        for _ in range(EVENTS_QUEUED):
            stream._queue.put_nowait(None)
        await stream._start(rollout_task("t", "q", ["gate"]))
        await eventually(lambda: bool(running.engine.jobs))
        stream._running["t"].ask()
        await no_sessions(running)
        assert stream._work  # its event still waits
        stream._queue.get_nowait()
        await asyncio.wait(stream._work)


async def test_stream_takes_no_more_than_it_may(folder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    policy = lambda name, turn: f"<gate>{gate}</gate>" if turn == 0 else "<answer>1</answer>"  # noqa: E731
    settings = {"max_trajectories_per_stream": 3, "max_trajectories": 4}
    async with (
        rollouts(folder, policy, **settings) as running,
        running.client.rollouts() as first,
        running.client.rollouts() as second,
    ):
        for number in range(10):
            await first.submit(rollout_task(f"a{number}", "q", ["gate"], answer_tags=TAGS))
            await second.submit(rollout_task(f"b{number}", "q", ["gate"], answer_tags=TAGS))
        await first.finish()
        await second.finish()
        await eventually(lambda: len(running.engine.jobs) == 4)
        await asyncio.sleep(0.1)
        assert len(running.engine.jobs) == 4
        assert (await running.client.get_server_info()).trajectories_running == 4
        gate.touch()
        for stream in (first, second):
            ended = [event async for event in stream if isinstance(event, rollout_pb2.Trajectory)]
            assert len(ended) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trajectory_id": ""}, "trajectory_id"),
        ({"messages": []}, "no messages"),
        ({"messages": [rollout_pb2.ChatMessage(role="wizard")]}, "unknown role"),
        ({"sampling": common_pb2.SamplingParams(top_p=2.0)}, "top_p"),
        ({"sampling": common_pb2.SamplingParams(temperature=-1.0)}, "temperature"),
        ({"final_answer": rollout_pb2.FinalAnswer(open="<a>")}, "open and close"),
        ({"tools": [common_pb2.ToolBinding(name="echo")] * 2}, "twice"),
    ],
)
async def test_bad_task_ends_the_stream_with_its_name(folder: Path, change: dict[str, Any], message: str) -> None:
    task = rollout_task("bad one", "q", ["echo"])
    for name, value in change.items():
        task.ClearField(name)
        if isinstance(value, list):
            getattr(task, name).extend(value)
        elif isinstance(value, str):
            setattr(task, name, value)
        else:
            getattr(task, name).CopyFrom(value)
    async with rollouts(folder, script("<answer>1</answer>")) as running:
        with pytest.raises(InvalidRequestError, match=message):
            await running.run(task)


async def test_same_id_twice_in_flight_is_refused(folder: Path, tmp_path: Path) -> None:
    async with rollouts(folder, script(f"<gate>{tmp_path / 'never'}</gate>")) as running:
        with pytest.raises(AlreadyExistsError, match="'t'"):
            await running.run(rollout_task("t", "q", ["gate"]), rollout_task("t", "q", ["gate"]))
        await no_sessions(running)


async def test_drain_finishes_what_runs_and_takes_no_more(folder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    policy = lambda name, turn: f"<gate>{gate}</gate>" if turn == 0 else "<answer>1</answer>"  # noqa: E731
    async with rollouts(folder, policy) as running, running.client.rollouts() as stream:
        await stream.submit(rollout_task("t", "q", ["gate"], answer_tags=TAGS))
        await eventually(lambda: bool(running.engine.jobs))
        await running.service.drain()
        gate.touch()
        events = aiter(stream)
        assert isinstance(await anext(events), rollout_pb2.TurnFinished)
        assert isinstance(await anext(events), rollout_pb2.TurnFinished)
        assert reason(await anext(events)) == "FINAL_ANSWER"
        with pytest.raises(UnavailableError, match="draining"):
            await anext(events)
