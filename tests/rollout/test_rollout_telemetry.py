"""What the rollout service counts and shows. The policy is scripted; the tool service is a real one."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest
from rollout_harness import TAGS, Running, rollouts
from tiny_models import TINY, make_model
from waiting import PATIENCE

from turnwire.client.rollout import rollout_limits, rollout_task
from turnwire.v1 import rollout_pb2

METRICS = {"metrics": {"port": 0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=TINY)


async def scrape(running: Running) -> dict[str, float]:
    """Values by name and labels, without the service's part of the name."""
    assert running.server.metrics is not None
    url = f"http://127.0.0.1:{running.server.metrics.port}/metrics"
    answer = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=PATIENCE).read().decode())
    found = re.findall(r"^turnwire_rollout_(\S+) (\S+)$", answer, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def becomes(running: Running, name: str, value: float) -> dict[str, float]:
    """Scrape until it is so."""
    async with asyncio.timeout(PATIENCE):
        while (found := await scrape(running))[name] != value:  # noqa: ASYNC110 - what a scrape shows cannot be waited for
            await asyncio.sleep(0.02)
    return found


async def test_trajectories_are_counted_by_their_end_and_results_by_tool_and_error(folder: Path) -> None:
    def policy(name: str, turn: int) -> str:
        if turn:
            return "<answer>1</answer>"
        return {"good": "<echo>x</echo>", "broken": "<broken>x</broken>"}.get(name, "nothing")

    async with rollouts(folder, policy, server=METRICS) as running:
        limits = rollout_limits(max_turns=4)
        tasks = [
            rollout_task(name, "q", ["echo", "broken"], limits=limits, answer_tags=TAGS)
            for name in ("good", "broken", "idle")
        ]
        await running.run(*tasks, rollout_task("refused", "q", ["no such tool"], answer_tags=TAGS))
        found = await becomes(running, "trajectories_running", 0)
    ends = {key: value for key, value in found.items() if key.startswith("trajectories_total")}
    assert ends == {
        f'trajectories_total{{stop_reason="{name}"}}': 1
        for name in ("FINAL_ANSWER", "INFRA_ERROR", "NO_ACTION", "INVALID_TASK")
    }
    results = {key: value for key, value in found.items() if key.startswith("tool_results_total")}
    assert results == {
        'tool_results_total{error="OK",tool="echo"}': 1,
        'tool_results_total{error="INFRA",tool="broken"}': 1,
    }
    assert (found["turn_generate_seconds_count"], found["turn_tool_seconds_count"]) == (4, 2)
    assert found["task_wait_seconds_count"] == 4


async def test_the_queue_is_what_waits_for_a_place_now(folder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    policy = lambda name, turn: "<answer>1</answer>" if turn else f"<gate>{gate}</gate>"  # noqa: E731
    settings = {"max_trajectories": 2, "max_trajectories_per_stream": 2, "server": METRICS}
    async with rollouts(folder, policy, **settings) as running, running.client.rollouts() as stream:
        for number in range(4):
            await stream.submit(rollout_task(str(number), "q", ["gate"], answer_tags=TAGS))
        await stream.finish()
        found = await becomes(running, "tasks_waiting", 2)
        assert (found["trajectories_running"], found["trajectories_max"], found["streams"]) == (2, 2, 1)
        gate.touch()
        ended = [event async for event in stream if isinstance(event, rollout_pb2.Trajectory)]
        assert len(ended) == 4
        found = await becomes(running, "streams", 0)
        assert found["tasks_waiting"] == 0
        assert found["weights_version"] == running.engine.VERSION
        assert found["draining"] == 0
        await running.service.drain()
        assert (await scrape(running))["draining"] == 1
