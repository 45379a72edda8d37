"""Section J of the hostile inputs, on both backends: what the service needs fails, and comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import engine_harness
import grpc
import grpc.aio
import outages
import pytest
from docker_harness import client, docker_config, new_owner
from engine_harness import OwnEngine
from outages import Outage
from service_process import BUSY, DOCKER, PROCESS, answer, begun, in_all, on_both_backends, serving
from tool_harness import Trajectory, error_of, retry_seconds, text_of, texts

from tool_service.sandbox import SandboxLimits, SandboxUnavailable
from tool_service.sandbox.docker import DockerBackend
from turnwire.v1 import tool_pb2

pytestmark = pytest.mark.timeout(1200)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a file system that can be filled needs root")


@pytest.fixture(scope="module")
def engine_of_all() -> Iterator[OwnEngine]:
    yield from engine_harness.serve()


@pytest.fixture
def own_engine(engine_of_all: OwnEngine) -> Iterator[OwnEngine]:
    """It runs; after a test nothing may be left in it, and nothing is for the next."""
    yield engine_of_all
    assert engine_of_all.clear() == []


@on_both_backends
async def test_a_sandbox_that_is_killed_in_mid_turn_is_our_failure_and_harms_nobody_else(
    tmp_path: Path, backend: str
) -> None:
    """J4: `docker kill`, and its like in the process backend."""
    async with serving(tmp_path, backend, sandbox={"pool": {"ready": 2}}) as service:
        neighbour, _ = await begun(service, "neighbour", "import time; x = 1")
        victim, _ = await begun(service, "victim", "x = 2")
        beside = asyncio.create_task(neighbour.act(1, "<python>time.sleep(2); x</python>"))
        turn = asyncio.create_task(victim.act(1, f"<python>{BUSY}</python>"))
        traces = await in_all(service, 1)
        if backend == "docker":
            client().api.kill(traces.containers[0])
        else:
            traces.supervisors[0].kill()
        (observation,) = (await turn).observations
        assert (error_of(observation), text_of(observation)) == ("INFRA", "the tool failed by no fault of yours")
        assert texts(await beside) == ["1"]
        assert texts(await victim.act(2, "<python>'x' in globals()</python>")) == ["False"]
        for trajectory in (victim, neighbour):
            await trajectory.close()
        await service.quiet(ready=2)
        await service.becomes("SERVING")


@pytest.mark.needs("isolated-sandbox")
async def test_a_zygote_that_is_killed_is_our_failure_and_the_next_one_serves(tmp_path: Path) -> None:
    """J4: what the engine is to containers, the zygote is to the process backend's sandboxes."""
    async with serving(tmp_path, "process", sandbox={"pool": {"ready": 2}}) as service:
        trajectory, _ = await begun(service, "t", "x = 1")
        turn = asyncio.create_task(trajectory.act(1, f"<python>{BUSY}</python>"))
        traces = await in_all(service, 1)
        zygote = traces.supervisors[0].parent()
        assert zygote is not None
        zygote.kill()
        assert error_of((await turn).observations[0]) == "INFRA"
        assert texts(await trajectory.act(2, "<python>6 * 7</python>")) == ["42"]
        await trajectory.close()
        await service.quiet(ready=2)
        await service.becomes("SERVING")


async def refused(trajectory: Trajectory, reason: str) -> None:
    """Its first turn is, as often as it is sent: with the reason, once the service has found that out."""
    told = ""
    while reason not in told:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trajectory.act(0, "<python>x = 2</python>")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_seconds(caught.value) > 0
        told = caught.value.details() or ""
        trajectory = Trajectory(trajectory.service, trajectory.id)
        await trajectory.open("python")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(outages.NoDescriptors, marks=PROCESS.marks),
        pytest.param(outages.ScratchFull, marks=(*PROCESS.marks, needs_root)),
        *(
            pytest.param(kind, marks=DOCKER.marks)
            for kind in (outages.EngineStopped, outages.EngineKilled, outages.ImageRemoved, outages.EngineDiskFull)
        ),
    ],
)
async def test_what_the_service_cannot_do_for_a_while_is_said_and_done_afterwards(
    tmp_path: Path, kind: type[Outage], request: pytest.FixtureRequest
) -> None:
    """J4: the engine restarts, its image is removed; J10: the disk is full; and descriptors that run out."""
    outage = kind(request.getfixturevalue("own_engine") if kind.backend == "docker" else None)
    sandbox = {**outage.sandbox, "pool": {"ready": outage.ready, "wait_seconds": 1}}
    sessions = {"lease_seconds": 60}
    async with serving(tmp_path, outage.backend, under=outage.under, sandbox=sandbox, sessions=sessions) as service:
        old, _ = await begun(service, "old", "import time; x = 1")
        new, plain = Trajectory(service, "new"), Trajectory(service, "plain")
        await asyncio.gather(plain.open("noop"), new.open("python"))
        turn = asyncio.create_task(old.act(1, "<python>time.sleep(2); x</python>"))
        await service.busy_with(1)

        async with outage.lasting(service):
            if outage.ready:
                await service.becomes("NOT_SERVING")  # before anybody has asked for one
            await refused(new, outage.reason)
            await service.becomes("NOT_SERVING")
            tools = (await service.stub.ListTools(tool_pb2.ListToolsRequest())).tools
            unhealthy = {tool.name: tool.health_detail for tool in tools if not tool.healthy}
            assert set(unhealthy) == {"bash", "python", "sql", "unit_tests"}
            assert outage.reason in unhealthy["python"]
            assert texts(await plain.act(0, "<noop></noop>")) == ["ok"]
            (observation,) = (await turn).observations
            expected = ("INFRA", "the tool failed by no fault of yours") if outage.takes_sandboxes_along else ("", "1")
            assert (error_of(observation), text_of(observation)) == expected

        await service.becomes("SERVING")
        again, text = await begun(service, "new", "x = 3; x")
        assert text == "3"
        old, text = await begun(service, "old", "'x' in globals()", turn=2)
        assert text == str(not outage.takes_sandboxes_along)
        for trajectory in (old, again, plain):
            await trajectory.close()
        await service.quiet()


@pytest.mark.needs("docker")
async def test_a_service_whose_image_is_missing_does_not_start_and_says_how_to_get_it(tmp_path: Path) -> None:
    """J4."""
    with pytest.raises(AssertionError, match=r"no image nowhere:1 .*docker build -t nowhere:1"):
        async with serving(tmp_path, "docker", sandbox={"docker": {"image": "nowhere:1"}}):
            pass


@needs_root
@pytest.mark.needs("isolated-sandbox")
async def test_a_full_temporary_folder_is_nothing_to_isolated_sandboxes(tmp_path: Path) -> None:
    """J10: they have no files on the host."""
    under = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o nr_inodes=1 tmpfs "$TMPDIR" && exec "$@"', "sh")
    async with serving(tmp_path, "process", under=under) as service:
        assert await answer(service, "open('f', 'w').write('x' * 1000)") == "1000"


@pytest.mark.needs("docker")
async def test_a_service_can_be_closed_while_its_engine_is_away(own_engine: OwnEngine) -> None:
    backend = DockerBackend(docker_config(host=own_engine.host, control_seconds=30), owner=new_owner())
    await backend.start()
    await backend.create(SandboxLimits())
    await asyncio.to_thread(own_engine.stop)
    await backend.close()
    await asyncio.to_thread(own_engine.start)


@pytest.mark.needs("docker")
async def test_a_service_does_not_start_without_its_engine(own_engine: OwnEngine) -> None:
    await asyncio.to_thread(own_engine.stop)
    try:
        with pytest.raises(SandboxUnavailable, match=f"{own_engine.host}.* cannot be reached"):
            await DockerBackend(docker_config(host=own_engine.host), owner=new_owner()).start()
    finally:
        await asyncio.to_thread(own_engine.start)
