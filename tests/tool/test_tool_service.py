"""The service as a whole: what it lists, its single calls, its status, its start and its end as a process."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import tool_harness as harness
from google.protobuf import json_format
from tool_harness import Service, Trajectory, binding, error_of, nothing_left, text_of, texts
from waiting import PROGRAM

from turnwire.v1 import tool_pb2

pytestmark = pytest.mark.needs("isolated-sandbox")


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    config = harness.config_of(exclude=(), tools={"python": {"parsers": ["tags", "json"], "timeout_seconds": 7.0}})
    async with harness.running(config) as running:
        yield running


async def test_tools_are_listed_with_all_that_a_client_needs(service: Service) -> None:
    answer = await service.stub.ListTools(tool_pb2.ListToolsRequest())
    tools = {tool.name: tool for tool in answer.tools}
    assert list(tools) == ["bash", "count", "hold", "noop", "python", "search", "sleep", "sql", "trouble", "unit_tests"]
    assert all(tool.healthy and tool.description and tool.source for tool in tools.values())
    python = tools["python"]
    assert python.sandbox_tier == "isolated"
    assert list(python.stop_strings) == ["</python>", "</tool_call>"]
    assert (python.default_timeout.seconds, python.max_timeout.seconds) == (7, 7)
    assert (tools["noop"].default_timeout.seconds, tools["noop"].max_timeout.seconds) == (30, 600)
    assert tools["noop"].sandbox_tier == ""
    assert len(tools["trouble"].modalities) == 3
    schema = json_format.MessageToDict(tools["count"].arguments_schema)
    assert schema["required"] == ["by"]
    context = json_format.MessageToDict(tools["count"].context_schema)
    assert context["properties"]["nested"]["additionalProperties"] == {"type": "array", "items": {"type": "integer"}}


async def test_a_tool_that_has_lost_its_sandboxes_is_not_healthy() -> None:
    pool = {"pool": {"ready": 0, "max": 1}}
    async with harness.running(harness.config_of(exclude=(), sandbox=pool)) as service:
        assert await service.server.sandboxes.health() == ""
        await service.server.sandboxes._pool.close()
        answer = await service.stub.ListTools(tool_pb2.ListToolsRequest())
        tools = {tool.name: tool for tool in answer.tools}
        assert not tools["python"].healthy
        assert tools["python"].health_detail
        assert tools["noop"].healthy


async def test_a_single_call_keeps_no_state_and_leaves_nothing(service: Service) -> None:
    async with nothing_left(service):
        for _ in range(2):
            assert text_of(await service.call("count", '{"by": 2}', {"start": 5})) == "7"
            assert text_of(await service.call("python", "x = globals().get('x', 0) + 1; x")) == "1"
        request = tool_pb2.ExecuteRequest(tool=binding("python"), call=tool_pb2.ToolCall(call_id="mine"))
        request.call.arguments.update({"code": "6*7"})
        (observation,) = (await service.stub.Execute(request)).observations
        assert (observation.call_id, text_of(observation)) == ("mine", "42")


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (tool_pb2.ExecuteRequest(tool=binding("nop"), text="x"), grpc.StatusCode.NOT_FOUND),
        (tool_pb2.ExecuteRequest(tool=binding("noop")), grpc.StatusCode.INVALID_ARGUMENT),
        (tool_pb2.ExecuteRequest(tool=binding("noop", {"x": 1}), text="x"), grpc.StatusCode.INVALID_ARGUMENT),
        (tool_pb2.ExecuteRequest(tool=binding("trouble", {"bad": "crash"}), text="x"), grpc.StatusCode.INTERNAL),
        (
            tool_pb2.ExecuteRequest(tool=binding("sql", {"init_sql": "x"}), text="<sql>select 1</sql>"),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_a_single_call_that_is_wrong(service: Service, request_: Any, code: grpc.StatusCode) -> None:
    async with nothing_left(service):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.Execute(request_)
        assert caught.value.code() is code


async def test_a_single_call_that_is_cancelled_is_killed(service: Service) -> None:
    async with nothing_left(service):
        call = service.stub.Execute(
            tool_pb2.ExecuteRequest(tool=binding("python"), text="<python>while True: pass</python>")
        )
        await service.runs(1)
        call.cancel()


async def test_the_status_counts(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("python", "noop")
    await trajectory.act(0, "<noop></noop>")
    await trajectory.act(1, "<python>1</python>")
    status = await service.status()
    assert (status.sessions_open, status.sessions_leased, status.sessions_max) == (1, 0, 1024)
    assert (status.turns_total, status.turns_running, status.draining) == (2, 0, False)
    (pool,) = status.pools
    assert (pool.backend, pool.tier, pool.in_use, pool.max) == ("process", "isolated", 1, 512)


async def test_draining_refuses_new_trajectories_and_finishes_old_ones(service: Service) -> None:
    trajectory = Trajectory(service)
    await trajectory.open("hold")
    turn = asyncio.create_task(trajectory.act(0, "<hold></hold>"))
    await service.runs(1)
    await service.server.drain()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Trajectory(service, "new").open("noop")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    service.probe("hold").let_go.set()
    assert texts(await turn) == ["let go"]
    await trajectory.close()


# As a process


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sesions: {}", "did you mean 'sessions'"),
        ("plugins: {exclude: [nope]}", "'nope' matches nothing"),
        ("plugins: {directories: [/nowhere]}", "/nowhere is not a directory"),
        ("tools: {serach: {}}", "did you mean 'search'"),
        ("limits: {action_bytes: 100000000}", "limits.action_bytes"),
        ("sessions: {max_sessions: 10000}", "server.max_concurrent_rpcs"),
        ("sandbox: {process: {interpreter: /no/such/python}}", "/no/such/python"),
        ("sandbox: {backend: docker, docker: {host: 'unix:///no/such'}}", "/no/such"),
    ],
)
async def test_a_config_that_cannot_be_used_ends_with_the_reason(tmp_path: Path, text: str, says: str) -> None:
    config = tmp_path / "tool.yaml"
    config.write_text(text)
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tool_service", "--config", str(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(started.communicate(), PROGRAM)
    assert started.returncode == 2
    assert out == b""
    assert says in err.decode()
    assert "Traceback" not in err.decode()


async def test_a_plugin_whose_setup_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "far_tool.py").write_text(
        "from tool_service.base import BaseTool\n"
        "class FarTool(BaseTool):\n"
        "    name = 'far'\n    description = 'x'\n"
        "    @classmethod\n    async def setup(cls, config):\n        raise OSError('cannot reach the far end')\n"
        "    async def execute(self, action, turn): ...\n"
    )
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tool_service", f"plugins.directories=[{tmp_path}]", stderr=subprocess.PIPE
    )
    _, err = await asyncio.wait_for(started.communicate(), PROGRAM)
    assert started.returncode == 2
    assert "far_tool.py" in err.decode()
    assert "cannot reach the far end" in err.decode()
    assert "plugins.exclude: [far]" in err.decode()
    assert error_of(tool_pb2.Observation()) == ""
