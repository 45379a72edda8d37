"""What the rollout service exports: each of its metrics with what it says.

`RolloutMetrics` counts what happens; `state` reads what is. Stop reasons and error kinds have the contract's names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from rollout_service.engines.base import EngineInfo
from rollout_service.trajectory import TurnRecord
from turnwire.enums import short_name
from turnwire.telemetry.metrics import SECONDS_BUCKETS, Labelled, MetricsServer, gauge, gauges, total
from turnwire.v1 import common_pb2, rollout_pb2

if TYPE_CHECKING:
    from rollout_service.rollouts import Admission
    from rollout_service.task import Task

_TURNS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def stop_name(reason: common_pb2.StopReason.ValueType) -> str:
    """As FINAL_ANSWER."""
    return short_name(common_pb2.StopReason, reason)


def error_name(kind: common_pb2.ErrorKind.ValueType) -> str:
    """As TOOL_ERROR; OK for none."""
    return short_name(common_pb2.ErrorKind, kind) if kind else "OK"


class RolloutMetrics:
    """What happens."""

    def __init__(self, server: MetricsServer) -> None:
        registry = server.registry

        def histogram(name: str, help_text: str, buckets: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
            return Histogram(name, help_text, buckets=buckets, registry=registry)

        self._trajectories = Labelled(
            Counter(
                "turnwire_rollout_trajectories",
                "Trajectories that have ended, by stop reason.",
                ["stop_reason"],
                registry=registry,
            )
        )
        self._seconds = histogram("turnwire_rollout_trajectory_seconds", "Trajectories, from their place to their end.")
        self._turns = histogram("turnwire_rollout_trajectory_turns", "Turns of a trajectory.", _TURNS)
        self._wait = histogram("turnwire_rollout_task_wait_seconds", "How long tasks waited for their place.")
        self._generate = histogram(
            "turnwire_rollout_turn_generate_seconds", "Generating one action, with the wait for a place in the engine."
        )
        self._tools = histogram(
            "turnwire_rollout_turn_tool_seconds", "The round trip to the tool service, of turns that have one."
        )
        self._action_tokens = histogram("turnwire_rollout_action_tokens", "Tokens of an action.", _TOKENS)
        self._observation_tokens = histogram(
            "turnwire_rollout_observation_tokens", "Tokens of an observation, with what bridges it.", _TOKENS
        )
        self._results = Labelled(
            Counter(
                "turnwire_rollout_tool_results",
                "Results of tools, by tool (`unknown` for what the task does not bind) and error kind.",
                ["tool", "error"],
                registry=registry,
            )
        )
        self._update = histogram("turnwire_rollout_weight_update_seconds", "Weight updates, from first byte to in use.")
        self._pause = histogram("turnwire_rollout_weight_pause_seconds", "How long an update held generation up.")

    def waited(self, seconds: float) -> None:
        """A task got its place, or was cancelled before."""
        self._wait.observe(seconds)

    def turn(self, task: Task, turn: TurnRecord) -> None:
        """A turn is over."""
        self._generate.observe(turn.generate_seconds)
        self._action_tokens.observe(turn.action_end - turn.action_start)
        if not turn.results:
            return
        self._tools.observe(turn.tool_seconds)
        self._observation_tokens.observe(turn.observation_end - turn.action_end)
        for result in turn.results:
            bound = any(result.tool == tool.name for tool in task.tools)
            self._results[result.tool if bound else "unknown", error_name(result.error)].inc()

    def ended(self, trajectory: rollout_pb2.Trajectory) -> None:
        """A trajectory has ended."""
        self._trajectories[stop_name(trajectory.stop_reason),].inc()
        if trajectory.segments:
            self._seconds.observe(trajectory.elapsed.ToTimedelta().total_seconds())
            self._turns.observe(sum(len(segment.turns) for segment in trajectory.segments))

    def updated(self, seconds: float, pause: float) -> None:
        """New weights are in use."""
        self._update.observe(seconds)
        self._pause.observe(pause)


def state(engine: EngineInfo, admission: Admission, most: int, version: int) -> Iterable[Metric]:
    """What is. `most`: trajectories that there may be at once; `version`: of the weights."""
    yield gauge("turnwire_rollout_trajectories_running", "Trajectories that have their place.", admission.running)
    yield gauge("turnwire_rollout_trajectories_max", "Trajectories that may run at once.", most)
    yield gauge("turnwire_rollout_tasks_waiting", "Tasks read that wait for a place.", admission.waiting)
    yield gauge("turnwire_rollout_streams", "Rollout streams that are open.", admission.streams)
    yield gauge("turnwire_rollout_draining", "1 while no new tasks are taken.", admission.draining)
    requests: dict[str, float] = {"running": engine.running, "waiting": engine.waiting}
    yield gauges("turnwire_rollout_requests", "Requests in the engine.", "state", requests)
    yield total("turnwire_rollout_tokens_generated", "Tokens sampled.", engine.tokens_generated)
    yield total(
        "turnwire_rollout_tokens_prefilled",
        "Prompt and observation tokens computed; what a cache answered is not in it.",
        engine.tokens_prefilled,
    )
    yield gauge("turnwire_rollout_engine_paused", "1 while generation is held.", engine.paused)
    yield gauge("turnwire_rollout_engine_trouble", "1 while nothing is generated that should be.", bool(engine.trouble))
    yield total(
        "turnwire_rollout_engine_failures",
        "Steps or processes of the engine that failed and took their requests with them.",
        engine.failures,
    )
    yield gauge("turnwire_rollout_weights_version", "Of the weights in use.", version)
