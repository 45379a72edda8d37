"""Clients of Rollout that fall silent, go away, do not read, or speak at the wrong time. The policy is scripted."""

# ruff: noqa: ASYNC240 - files are how the test holds a tool; the tool service is asked again and again

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rollout_harness import Running, nothing_left, nothing_open, reason, rollouts, tool_server
from tiny_models import TINY, make_model
from waiting import ENDLESS, PATIENCE, eventually

from turnwire.client.rollout import RolloutStream, rollout_task
from turnwire.client.tools import ToolClient
from turnwire.errors import AlreadyExistsError, DeadlineError
from turnwire.v1 import rollout_pb2 as pb

TAGS = ("<answer>", "</answer>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=TINY)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While it does not exist, the tool of those whose id begins with `held` runs."""
    return tmp_path / "gate"


def service(folder: Path, gate: Path, **settings: Any) -> contextlib.AbstractAsyncContextManager[Running]:
    def script(name: str, turn: int) -> str:
        if turn:
            return "<answer>1</answer>"
        return f"<gate>{gate}</gate>" if name.startswith("held") else "<echo>x</echo>"

    return rollouts(folder, script, **settings)


@pytest.fixture
async def running(folder: Path, gate: Path) -> AsyncIterator[Running]:
    async with service(folder, gate) as there:
        yield there


def a_task(name: str, **more: Any) -> pb.RolloutTask:
    return rollout_task(name, "q", ["echo", "gate"], answer_tags=TAGS, **more)


async def ends(stream: RolloutStream, count: int) -> dict[str, str]:
    """How the next trajectories end, by id."""
    ended: dict[str, str] = {}
    async with asyncio.timeout(PATIENCE):
        async for event in stream:
            if isinstance(event, pb.Trajectory):
                ended[event.trajectory_id] = reason(event)
                if len(ended) == count:
                    return ended
    return ended


async def rest(call: Any) -> list[pb.RolloutResponse]:
    """All events that are still to come."""
    events = []
    async with asyncio.timeout(PATIENCE):
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)
    return events


# -- silence


async def test_silence_with_nothing_in_flight_ends_the_stream_and_says_what_to_change(folder: Path, gate: Path) -> None:
    async with service(folder, gate, stream_idle_seconds=0.3) as running, nothing_left(running):
        for tasks in ([], [a_task("t")]):
            async with running.client.rollouts() as stream:
                for task in tasks:
                    await stream.submit(task)
                with pytest.raises(DeadlineError, match=r"no task came for 0\.3 s .*stream_idle_seconds"):
                    await ends(stream, 2)


async def test_a_long_tool_is_not_silence(folder: Path, gate: Path) -> None:
    async with service(folder, gate, stream_idle_seconds=0.5) as running, running.client.rollouts() as stream:
        await stream.submit(a_task("held"))
        await asyncio.sleep(1.0)  # twice the limit
        gate.touch()
        assert await ends(stream, 1) == {"held": "FINAL_ANSWER"}
        await stream.submit(a_task("next"))
        assert await ends(stream, 1) == {"next": "FINAL_ANSWER"}


async def test_a_client_that_never_reads_is_ended_and_holds_no_place_of_others(folder: Path, gate: Path) -> None:
    limits = {"max_trajectories": 100, "max_trajectories_per_stream": 100}
    async with service(folder, gate, stream_idle_seconds=0.5, **limits) as running, nothing_left(running):
        call = running.client._stub.Rollout()
        for number in range(150):
            await call.write(pb.RolloutRequest(task=a_task(str(number), metadata={"text": "x" * 100_000})))
        await eventually(lambda: len(running.engine.jobs) > 100)
        await eventually(lambda: running.service._admission.running == 0)
        with pytest.raises(grpc.aio.AioRpcError, match=r"an event was not read for 0\.5 s") as caught:
            await rest(call)  # at last it reads
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# -- going away

WHEN = ["before a task", "right after a task", "while a tool runs", "while an event waits", "after the last"]


@pytest.mark.parametrize("how", ["cancel", "half-close"])
@pytest.mark.parametrize("when", WHEN)
async def test_a_client_that_goes_away(running: Running, gate: Path, when: str, how: str) -> None:
    async with nothing_left(running):
        call = running.client._stub.Rollout()
        jobs = len(running.engine.jobs)
        if when != "before a task":
            big = {"text": "x" * 500_000} if when == "while an event waits" else None
            for number in range(10):
                name = f"held-{number}" if when == "while a tool runs" else str(number)
                await call.write(pb.RolloutRequest(task=a_task(name, metadata=big)))
        if when == "while a tool runs":
            await eventually(lambda: len(running.engine.jobs) >= jobs + 10)
        elif when == "while an event waits":
            await eventually(lambda: len(running.engine.jobs) >= jobs + 20)
        elif when == "after the last":
            for _ in range(30):
                await call.read()
        if how == "cancel":
            call.cancel()
            return
        await call.done_writing()
        gate.touch()
        ended = [event.trajectory for event in await rest(call) if event.HasField("trajectory")]
        assert len(ended) == (0 if when in ("before a task", "after the last") else 10)
        assert await call.code() is grpc.StatusCode.OK


CLIENT = """
import sys, time
import grpc
from turnwire.client.rollout import rollout_task
from turnwire.v1 import rollout_pb2, rollout_pb2_grpc
stub = rollout_pb2_grpc.RolloutServiceStub(grpc.insecure_channel(sys.argv[1]))
def requests():
    for number in range(5):
        yield rollout_pb2.RolloutRequest(task=rollout_task(f"held-{number}", "q", ["echo", "gate"]))
    time.sleep(600)
for event in stub.Rollout(requests()):
    pass
"""


async def test_a_client_that_is_killed_in_mid_trajectory(running: Running) -> None:
    async with nothing_left(running):
        jobs = len(running.engine.jobs)
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, running.server.address)
        await eventually(lambda: len(running.engine.jobs) >= jobs + 5)
        client.send_signal(signal.SIGKILL)
        assert await client.wait() == -signal.SIGKILL
        del client


@pytest.mark.parametrize("how", ["cancel", "kill"])
async def test_a_client_that_goes_away_while_the_real_engine_generates(folder: Path, how: str) -> None:
    async with rollouts(folder) as running, nothing_left(running):
        if how == "kill":
            text = CLIENT.replace('["echo", "gate"]', "[]")
            client = await asyncio.create_subprocess_exec(sys.executable, "-c", text, running.server.address)
        else:
            call = running.client._stub.Rollout()
            for number in range(5):
                await call.write(pb.RolloutRequest(task=rollout_task(str(number), "q", ["echo"])))
        await eventually(lambda: running.engine.info().running >= 2)
        if how == "kill":
            client.send_signal(signal.SIGKILL)
            await client.wait()
            del client
        else:
            call.cancel()


# -- ids and cancellations


async def test_an_id_twice_on_one_stream_is_refused(running: Running) -> None:
    async with nothing_left(running), running.client.rollouts() as stream:
        await stream.submit(a_task("held"))
        await stream.submit(a_task("held"))
        with pytest.raises(AlreadyExistsError, match="'held' is in flight on this stream"):
            await ends(stream, 1)


async def test_an_id_is_free_again_after_its_trajectory(running: Running) -> None:
    async with nothing_left(running), running.client.rollouts() as stream:
        for _ in range(3):
            await stream.submit(a_task("t"))
            assert await ends(stream, 1) == {"t": "FINAL_ANSWER"}


async def test_an_id_on_two_streams_is_two_trajectories(running: Running, gate: Path) -> None:
    async with nothing_left(running), running.client.rollouts() as first, running.client.rollouts() as second:
        for stream in (first, second):
            await stream.submit(a_task("held"))
        await eventually(lambda: sum(job.request_id == "held#0" for job in running.engine.jobs) == 2)
        await first.cancel("held")
        assert await ends(first, 1) == {"held": "CANCELLED"}
        gate.touch()
        assert await ends(second, 1) == {"held": "FINAL_ANSWER"}


async def test_cancelling_what_is_unknown_or_over_does_nothing(running: Running) -> None:
    async with nothing_left(running), running.client.rollouts() as stream:
        await stream.cancel("nobody")
        await stream.cancel("")
        await stream.submit(a_task("t"))
        assert await ends(stream, 1) == {"t": "FINAL_ANSWER"}
        await stream.cancel("t")
        await stream.submit(a_task("u"))
        assert await ends(stream, 1) == {"u": "FINAL_ANSWER"}


@pytest.mark.parametrize("which", ["held-0", "held-5"], ids=["running", "held back"])
async def test_a_cancellation_is_heard_on_a_full_stream(folder: Path, gate: Path, which: str) -> None:
    limits = {"max_trajectories": 3, "max_trajectories_per_stream": 3}
    async with service(folder, gate, **limits) as running, running.client.rollouts() as stream:
        for number in range(6):
            await stream.submit(a_task(f"held-{number}"))
        await eventually(lambda: len(running.engine.jobs) == 3)
        await stream.cancel(which)
        assert await ends(stream, 1) == {which: "CANCELLED"}
        gate.touch()
        assert await ends(stream, 5) == {f"held-{n}": "FINAL_ANSWER" for n in range(6) if f"held-{n}" != which}


async def test_streams_take_turns_for_the_services_places(folder: Path, gate: Path) -> None:
    limits = {"max_trajectories": 4, "max_trajectories_per_stream": 4}
    async with (
        service(folder, gate, **limits) as running,
        running.client.rollouts() as greedy,
        running.client.rollouts() as modest,
    ):
        for number in range(8):
            await greedy.submit(a_task(f"held-{number}"))
        await eventually(lambda: len(running.engine.jobs) == 4)
        await modest.submit(a_task("one"))
        gate.touch()
        assert await ends(modest, 1) == {"one": "FINAL_ANSWER"}
        began = [job.request_id.partition("#")[0] for job in running.engine.jobs if job.request_id.endswith("#0")]
        assert began.index("one") <= 5


@pytest.mark.parametrize("how", ["cancel", "end of stream"])
async def test_a_session_that_is_not_open_yet_is_closed_too(folder: Path, gate: Path, how: str) -> None:
    """With a lease that lasts: nothing but Close releases it in time."""
    async with (
        tool_server(sessions={"lease_seconds": ENDLESS}) as (_, address),
        service(folder, gate, tools=False, tool_target=address) as running,
        ToolClient(address) as tools,
        running.client.rollouts() as stream,
    ):
        await stream.submit(rollout_task("held", "q", {"gate": None, "slow": {"file": str(gate)}}))
        await eventually(gate.with_suffix(".asked").exists)
        if how == "cancel":
            await stream.cancel("held")
            assert await ends(stream, 1) == {"held": "CANCELLED"}
        else:
            await stream.close()
            await eventually(lambda: running.service._admission.running == 0)
        assert (await tools.get_status()).sessions_open == 1  # its tool is not ready yet
        gate.touch()
        await nothing_open(tools)
