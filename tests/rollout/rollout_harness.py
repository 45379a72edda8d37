"""A real rollout service on a real gRPC server, with a real tool service beside it, in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from calls import outcome
from google.protobuf import json_format
from waiting import PATIENCE, eventually, no_more

from rollout_service.build import build_chat, build_engine
from rollout_service.chat import Chat
from rollout_service.config import RolloutServiceConfig
from rollout_service.engines.base import (
    Engine,
    EngineInfo,
    GenerateDelta,
    GenerateJob,
    GenerateStop,
    Ids,
    ScoreResult,
    UpdateMode,
    VersionSpan,
    WeightInfo,
)
from rollout_service.server import RolloutService
from rollout_service.staging import StagedWeights
from tool_service.config import ToolServiceConfig
from tool_service.server import ToolServer
from turnwire.client.rollout import RolloutClient, rollout_limits, rollout_task
from turnwire.client.tools import ToolClient
from turnwire.config import convert
from turnwire.serving import Server
from turnwire.tensors import from_tensor
from turnwire.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc

PLUGINS = Path(__file__).parent / "rollout_plugins"
TAGS = ("<answer>", "</answer>")

Script = Callable[[str, int], str]
"""Trajectory id and turn to what the policy writes."""


class ScriptedEngine(Engine):
    """A fake: a policy that writes what the test says, which a random model cannot be made to do. It stops as an engine
    stops, and puts an end-of-turn token where the script writes no stop."""

    VERSION = 3

    def __init__(self, chat: Chat, script: Script, longest: int = 4096) -> None:
        self.chat, self.script, self.longest = chat, script, longest
        self.jobs: list[GenerateJob] = []
        self.released: list[str] = []
        self.failure: Exception | None = None
        self.modalities: tuple[str, ...] = ("text",)
        self.image_tokens = 0

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...

    async def generate(self, job: GenerateJob) -> AsyncIterator[GenerateDelta]:
        self.jobs.append(job)
        if self.failure is not None:
            raise self.failure
        name, _, turn = job.request_id.rpartition("#")
        await asyncio.sleep(0)
        end = next(iter(job.stop_token_ids))
        ids = [*self.chat._encode(self.script(name, int(turn))).tolist(), end]
        stop, count = GenerateStop.LENGTH, min(len(ids), job.max_tokens)
        for place in range(count):
            if ids[place] in job.stop_token_ids:
                stop, count = GenerateStop.END_OF_TURN, place + 1
                break
            text = self.chat.decode(np.array(ids[: place + 1], np.int32))
            if any(string in text for string in job.stop_strings):
                stop, count = GenerateStop.STRING, place + 1
                break
        tokens = np.array(ids[:count], np.int32)
        spans = (VersionSpan(0, count, self.VERSION),)
        yield GenerateDelta(tokens, -np.arange(1, count + 1, dtype=np.float32), spans, stop, self.image_tokens)

    async def score(self, sequences: Sequence[Ids]) -> ScoreResult:
        raise NotImplementedError

    def release(self, sequence_key: str) -> None:
        self.released.append(sequence_key)

    def info(self) -> EngineInfo:
        return EngineInfo("scripted", "", self.longest, 1000, frozenset(), modalities=self.modalities)

    async def weight_info(self) -> WeightInfo:
        return WeightInfo(self.VERSION, "", [])

    async def apply_weights(self, weights: StagedWeights, version: int, mode: UpdateMode) -> float:
        raise NotImplementedError


@dataclass
class Running:
    """A running rollout service."""

    client: RolloutClient
    service: RolloutService
    engine: Any
    chat: Chat
    server: Server
    tools: ToolServer | None
    served: tuple[str, list[int]] | None = None
    """What `canary` was served at first."""

    async def run(self, *tasks: rollout_pb2.RolloutTask) -> tuple[list[rollout_pb2.TurnFinished], dict[str, Any]]:
        """All turns, and trajectories by id, each checked for what holds of every one."""
        turns, ended = [], {}
        async for event in self.client.run(tasks):
            if isinstance(event, rollout_pb2.TurnFinished):
                turns.append(event)
            else:
                assert event.trajectory_id not in ended
                if event.stop_reason != common_pb2.STOP_REASON_INVALID_TASK:  # of which nothing was generated
                    check_trajectory(event)
                ended[event.trajectory_id] = event
        return turns, ended

    async def one(self, task: rollout_pb2.RolloutTask) -> tuple[list[rollout_pb2.TurnFinished], Any]:
        turns, ended = await self.run(task)
        return turns, ended[task.trajectory_id]


@contextlib.asynccontextmanager
async def tool_server(**sections: Any) -> AsyncIterator[tuple[ToolServer, str]]:
    """A tool service with the test's tools, and without sandboxes."""
    values = {
        "plugins": {
            "directories": [str(PLUGINS)],
            "exclude": ["bash", "python", "search", "sql", "unit_tests"],
            "entry_points": False,
        },
        "sandbox": {"pool": {"ready": 0}},
        "sessions": {"lease_seconds": 0.3},
        **sections,
    }
    server = ToolServer(convert(values, ToolServiceConfig))
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def rollouts(
    folder: Path, script: Script | None = None, *, tools: bool = True, longest: int = 4096, **settings: Any
) -> AsyncIterator[Running]:
    """A rollout service on a model folder: scripted, or with the real engine."""
    async with contextlib.AsyncExitStack() as stack:
        server, address = await stack.enter_async_context(tool_server()) if tools else (None, "")
        settings.setdefault("tool_target", address)
        engine_settings = {"model": str(folder), "threads": 1, **settings.pop("engine", {})}
        config = convert({"engine": engine_settings, **settings}, RolloutServiceConfig)
        chat = build_chat(str(folder), config.chat)
        engine = build_engine(config.engine) if script is None else ScriptedEngine(chat, script, longest)
        service = RolloutService(config, engine, chat)
        grpc_server = Server(config.server, ["turnwire.v1.RolloutService"])
        await service.start(grpc_server.metrics)
        stack.push_async_callback(service.close)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, grpc_server.grpc)
        stack.callback(asyncio.create_task(grpc_server.follow(lambda: service.trouble)).cancel)
        await grpc_server.start()
        stack.push_async_callback(grpc_server.stop, 0)
        client = await stack.enter_async_context(RolloutClient(grpc_server.address))
        yield Running(client, service, engine, chat, grpc_server, server)


async def canary(running: Running) -> tuple[str, list[int]]:
    """What another client, on a connection of its own, is served: how a greedy trajectory with a tool ends, and ids."""
    limits = rollout_limits(max_turns=2, max_action_tokens=8)
    task = rollout_task("canary", "q", ["echo"], temperature=0, limits=limits, answer_tags=("<answer>", "</answer>"))
    async with RolloutClient(running.server.address) as client, asyncio.timeout(PATIENCE):
        (trajectory,) = [event async for event in client.run([task]) if isinstance(event, rollout_pb2.Trajectory)]
    check_trajectory(trajectory)
    return reason(trajectory), tokens_of(trajectory)


@contextlib.asynccontextmanager
async def nothing_left(running: Running) -> AsyncIterator[None]:
    """What happens inside must leave nothing behind, and another client is served as ever meanwhile."""
    running.served = running.served or await canary(running)
    before = await _footprint(running)
    while (again := await _footprint(running)) != before:  # the canary, or the test before, may still be ending
        before = again
        await asyncio.sleep(0.05)
    meanwhile = asyncio.create_task(canary(running))
    yield
    assert await meanwhile == running.served
    after = await no_more(before, lambda: _footprint(running))
    assert [after[name] for name in ("trajectories", "generating", "waiting", "sessions", "sandboxes")] == [0] * 5


async def refused(running: Running, call: Any, code: grpc.StatusCode, says: str) -> None:
    """The call ends with this status, which says this and is cut to what a header may hold."""
    async with nothing_left(running):
        found, details = await outcome(call)
        assert (found, says if says in details else details) == (code, says)
        assert len(details.encode()) <= 1200


async def _footprint(running: Running) -> dict[str, int]:
    info = await running.client.get_server_info()
    async with ToolClient(running.service._config.tool_target) as tools:
        status = await tools.get_status()
    return {
        "trajectories": info.trajectories_running,
        "generating": info.requests_running,
        "waiting": info.requests_waiting,
        "sessions": status.sessions_open + status.sessions_leased,
        "sandboxes": sum(pool.in_use for pool in status.pools),
        "tasks": len(asyncio.all_tasks()),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def check_trajectory(trajectory: rollout_pb2.Trajectory) -> None:
    """Tensors, mask, spans and turns must agree, however the trajectory ended."""
    (segment,) = trajectory.segments
    tokens = from_tensor(segment.token_ids, np.int32)
    mask, logprobs = from_tensor(segment.loss_mask, np.uint8), from_tensor(segment.logprobs, np.float32)
    assert len(tokens) == len(mask) == len(logprobs) >= segment.prompt_length > 0
    wanted = np.zeros(len(tokens), np.uint8)
    place = segment.prompt_length
    for number, turn in enumerate(segment.turns):
        assert (turn.index, turn.action_start) == (number, place)
        assert turn.action_start < turn.action_end <= turn.observation_end
        wanted[turn.action_start : turn.action_end] = 1
        place = turn.observation_end
    assert place == len(tokens)
    assert mask.tolist() == wanted.tolist()
    assert not logprobs[mask == 0].any()
    covered = [position for span in segment.weight_spans for position in range(span.start, span.end)]
    assert covered == np.flatnonzero(mask).tolist()


def tokens_of(trajectory: rollout_pb2.Trajectory) -> list[int]:
    return from_tensor(trajectory.segments[0].token_ids, np.int32).tolist()


def reason(trajectory: rollout_pb2.Trajectory) -> str:
    return common_pb2.StopReason.Name(trajectory.stop_reason).removeprefix("STOP_REASON_")


def data_of(result: rollout_pb2.ToolResult) -> dict[str, Any]:
    return json_format.MessageToDict(result.data)


def script(*actions: str) -> Script:
    """The actions one after the other; the last one again and again."""
    return lambda name, turn: actions[min(turn, len(actions) - 1)]


async def no_sessions(running: Running) -> None:
    """Wait until the tool service holds nothing of any trajectory."""
    async with ToolClient(running.service._config.tool_target) as tools:
        await nothing_open(tools)


async def nothing_open(tools: ToolClient) -> None:
    """The same, of any tool service."""

    async def so() -> bool:
        status = await tools.get_status()
        return status.sessions_open + status.sessions_leased == 0

    await eventually(so, pause=0.02)
