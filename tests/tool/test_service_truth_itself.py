"""Section J of the hostile inputs, on both backends: what becomes of the service's own process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from docker_harness import client, containers, foreign_container, new_owner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service_process import answer, clients, gone, in_all, on_both_backends, serving, start_in_mid_turn
from tool_harness import Trajectory, error_of, texts
from waiting import PATIENCE, eventually

from tool_service.sandbox.docker_container import INSTANCE, OWNER
from turnwire.v1 import tool_pb2

Code = grpc.StatusCode


@pytest.mark.timeout(1200)
@on_both_backends
async def test_a_service_that_is_killed_takes_its_sandboxes_along_and_the_next_one_sweeps_the_rest(
    tmp_path: Path, backend: str
) -> None:
    """J3: killed -9 with 50 live sandboxes. Some containers are frozen, so that they cannot end by themselves."""
    owner = new_owner()
    sandbox = {"pool": {"ready": 0, "max": 64, "wait_seconds": 150}}
    strangers = [{}, {OWNER: new_owner(), INSTANCE: "0" * 16}] if backend == "docker" else []
    with contextlib.ExitStack() as stack:
        foreign = [stack.enter_context(foreign_container(labels)) for labels in strangers]
        async with serving(tmp_path, backend, owner=owner, sandbox=sandbox) as service, clients(service) as maker:
            await start_in_mid_turn(service, maker, 1, 50)
            traces = await in_all(service, 50)
            frozen = containers(owner)[:5] if backend == "docker" else []
            for container in frozen:
                client().api.pause(container)
            await service.end(signal.SIGKILL)
            await eventually(lambda: set(containers(owner)) == set(frozen))
            if not frozen:
                await gone(traces)
            async with serving(tmp_path, backend, owner=owner, sandbox=sandbox) as again:
                assert (await again.pool()).leaks_removed_total == len(frozen)
                assert containers(owner) == []
                await gone(traces)
                assert await answer(again, "6 * 7") == "42"
        for container in foreign:
            container.reload()
            assert container.status == "running"


@on_both_backends
async def test_a_service_that_is_told_to_end_finishes_the_turns_that_can_be_finished(
    tmp_path: Path, backend: str
) -> None:
    """J6: SIGTERM during turns."""
    server = {"drain_seconds": 3.5}
    async with serving(tmp_path, backend, sandbox={"pool": {"ready": 2}}, server=server) as service:
        short, long = Trajectory(service, "short"), Trajectory(service, "long")
        for trajectory in (short, long):
            await trajectory.open("python")
            await trajectory.act(0, "<python>import subprocess, time</python>")
        code = "<python>subprocess.Popen(['sleep', '600']); time.sleep({}); 'done'</python>"
        finished = asyncio.create_task(short.act(1, code.format(1.5)))
        cut_off = asyncio.create_task(long.act(1, code.format(60)))
        traces = await in_all(service, 2)
        watch = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

        service.signal(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await Trajectory(service, "new").open("python")
        assert refused.value.code() is Code.UNAVAILABLE
        assert texts(await finished) == ["'done'"]
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await cut_off
        assert ended.value.code() in (Code.UNAVAILABLE, Code.CANCELLED), "of which clients make an InfraError"
        assert await asyncio.wait_for(service.process.wait(), PATIENCE) == 0
        await gone(traces)


@on_both_backends
async def test_a_service_that_stood_still_calls_nobody_too_late(tmp_path: Path, backend: str) -> None:
    """J9: it alone is stopped, for longer than any of the limits. What came meanwhile is answered as if it had not
    been: turns that ended in time, actions of the patient, and those who take up a trajectory again."""
    sessions = {"idle_timeout_seconds": 3.5, "lease_seconds": 3.5}
    async with serving(tmp_path, backend, sandbox={"pool": {"ready": 6}}, sessions=sessions) as service:
        names = [f"{kind} {number}" for kind in ("in mid-turn", "between turns") for number in range(2)]
        trajectories = {name: Trajectory(service, name) for name in (*names, "endless", "cut off")}
        for trajectory in trajectories.values():
            await trajectory.open("python")
        started = "<python>import time; open('started', 'w').close(); {}</python>"
        await asyncio.gather(*(one.act(0, started.format(f"x = {one.id!r}")) for one in trajectories.values()))
        fields: dict[str, Any] = {"timeout": {"seconds": 2}}
        short, endless = "<python>time.sleep(1); x</python>", "<python>time.sleep(60)</python>"
        for name, trajectory in trajectories.items():
            if name.startswith("in mid-turn") or name == "endless":
                text = endless if name == "endless" else short
                await trajectory.send(action=tool_pb2.ActionTurn(turn=1, text=text, **fields))
        trajectories["cut off"].call.cancel()

        async def all_run() -> bool:
            status = await service.status()
            return (status.turns_running, status.sessions_leased) == (3, 1)

        await eventually(all_run)
        service.signal(signal.SIGSTOP)
        again = Trajectory(service, "cut off")
        opening = asyncio.create_task(again.open("python", turns_done=1))
        for name, trajectory in trajectories.items():
            if name.startswith("between"):
                await trajectory.send(action=tool_pb2.ActionTurn(turn=1, text=short, **fields))
        await asyncio.sleep(5.5)
        service.signal(signal.SIGCONT)

        for name in names:
            assert texts((await trajectories[name].receive()).observation) == [repr(name)]
        (observation,) = (await trajectories["endless"].receive()).observation.observations
        assert error_of(observation) == "TIMEOUT", "a limit that was truly passed still holds"
        assert (await opening).resumed
        assert texts(await again.act(1, short)) == ["'cut off'"]
