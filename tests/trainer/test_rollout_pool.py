"""Getting trajectories from a rollout service that fails in every way.

The service here is a real gRPC server with a script instead of an engine: failures cannot be ordered from a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from trainer_harness import run_config, sequences, task
from waiting import PATIENCE

from trainer_service.config import RolloutConfig, SamplingConfig
from trainer_service.data.dataset import Source, TrainingStream
from trainer_service.files import AppendFile
from trainer_service.groups import Failed, GroupFeed, Judged
from trainer_service.judging import Judge
from trainer_service.ledger import Ledger, State
from trainer_service.rollouts import Assignment, Lost, RolloutPool, Sampled, sampling_seed
from turnwire.client.rollout import RolloutClient
from turnwire.errors import InvalidRequestError, UnavailableError
from turnwire.serving import Server, ServerConfig
from turnwire.tensors import to_tensor
from turnwire.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc

Script = Callable[[rollout_pb2.RolloutTask, int], common_pb2.StopReason.ValueType | Exception | float]
"""What becomes of a task (its how-manieth attempt): a stop reason, an error of the whole stream, or seconds to take."""


class ScriptedService(rollout_pb2_grpc.RolloutServiceServicer):
    """Ends each task as a script says."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[rollout_pb2.RolloutTask] = []
        self.running = 0
        self.most_running = 0

    async def Rollout(  # noqa: N802 - gRPC's name
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[rollout_pb2.RolloutResponse]:
        queue: asyncio.Queue[rollout_pb2.RolloutResponse | Exception] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, queue))
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            reader.cancel()

    async def _read(self, requests: Any, queue: asyncio.Queue[Any]) -> None:
        jobs = set()
        async for request in requests:
            self.seen.append(request.task)
            jobs.add(asyncio.create_task(self._one(request.task, queue)))

    async def _one(self, wanted: rollout_pb2.RolloutTask, queue: asyncio.Queue[Any]) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        outcome = self.script(wanted, int(wanted.trajectory_id.rpartition("/")[2]))
        await asyncio.sleep(outcome if isinstance(outcome, float) else 0.01)
        self.running -= 1
        if isinstance(outcome, Exception):
            await queue.put(outcome)
            return
        reason = common_pb2.STOP_REASON_FINAL_ANSWER if isinstance(outcome, float) else outcome
        await queue.put(rollout_pb2.RolloutResponse(trajectory=trajectory(wanted.trajectory_id, reason)))


def trajectory(key: str, reason: common_pb2.StopReason.ValueType) -> rollout_pb2.Trajectory:
    sequence = sequences(1)[0]
    segment = rollout_pb2.Segment(
        token_ids=to_tensor(sequence.token_ids),
        prompt_length=sequence.prompt_length,
        loss_mask=to_tensor(sequence.mask),
        logprobs=to_tensor(sequence.logprobs),
        weight_spans=[rollout_pb2.WeightSpan(start=sequence.prompt_length, end=sequence.prompt_length + 1, version=1)],
    )
    errors = {INFRA: "the sandbox died", common_pb2.STOP_REASON_INVALID_TASK: "unknown tool 'pythn'"}
    return rollout_pb2.Trajectory(
        trajectory_id=key, stop_reason=reason, segments=[segment], final_answer="42", error=errors.get(reason, "")
    )


DONE, INFRA = common_pb2.STOP_REASON_FINAL_ANSWER, common_pb2.STOP_REASON_INFRA_ERROR


def pool_config(**values: Any) -> RolloutConfig:
    retry = {"attempts": 3, "first_delay_seconds": 0.01, "max_delay_seconds": 0.05, "patience_seconds": PATIENCE}
    return run_config(rollout={**values, "retry": {**retry, **values.get("retry", {})}}).rollout


@asynccontextmanager
async def pool_on(script: Script, **values: Any) -> AsyncIterator[tuple[RolloutPool, ScriptedService, list[str]]]:
    service, said = ScriptedService(script), []
    server = Server(ServerConfig(), ["turnwire.v1.RolloutService"])
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server.grpc)
    await server.start()

    async def connect() -> None:
        said.append("(connect)")

    async with (
        RolloutClient(server.address) as client,
        RolloutPool(client, pool_config(**values), "run", connect, said.append) as pool,
    ):
        yield pool, service, said
    await server.stop(0)


def assignment(name: str = "a") -> Assignment:
    return Assignment(name, task(), SamplingConfig(), seed=7)


async def test_an_infrastructure_failure_is_tried_again_under_a_new_id_with_the_same_seed() -> None:
    async with pool_on(lambda wanted, attempt: INFRA if attempt < 3 else DONE) as (pool, service, _):
        result = await pool.sample(assignment())
    assert isinstance(result, Sampled)
    assert result.tries == 3
    assert [wanted.trajectory_id.rpartition("/")[2] for wanted in service.seen] == ["1", "2", "3"]
    assert {wanted.sampling.seed for wanted in service.seen} == {7}
    assert pool.infra_failures == 2


async def test_one_that_fails_while_others_succeed_is_given_up_after_its_attempts() -> None:
    def script(wanted: rollout_pb2.RolloutTask, attempt: int) -> common_pb2.StopReason.ValueType:
        return INFRA if "/bad/" in wanted.trajectory_id else DONE

    async with pool_on(script) as (pool, service, _):
        bad = asyncio.create_task(pool.sample(assignment("bad")))
        for number in range(50):
            if not bad.done():
                assert isinstance(await pool.sample(assignment(str(number))), Sampled)
        assert await bad == Lost("infrastructure: the sandbox died")
    assert sum("/bad/" in wanted.trajectory_id for wanted in service.seen) == 3


async def test_an_outage_is_waited_out_and_only_then_given_up() -> None:
    async with pool_on(lambda wanted, attempt: INFRA, retry={"patience_seconds": 0.5}) as (pool, service, _):
        result = await pool.sample(assignment())
    assert isinstance(result, Lost)
    assert len(service.seen) > 3, "more often than what fails alone"


async def test_a_lost_stream_costs_no_attempt_and_everything_is_asked_for_again() -> None:
    failures = iter([UnavailableError("restarting")])

    def script(wanted: rollout_pb2.RolloutTask, attempt: int) -> common_pb2.StopReason.ValueType | Exception:
        return next(failures, DONE)

    async with pool_on(script, retry={"attempts": 1}) as (pool, _, said):
        results = await asyncio.gather(*(pool.sample(assignment(str(number))) for number in range(5)))
    assert all(isinstance(result, Sampled) for result in results)
    assert said.count("(connect)") == 2
    assert any("waiting for the rollout service" in text for text in said)


async def test_what_no_waiting_can_cure_reaches_everyone_who_waits() -> None:
    async with pool_on(lambda wanted, attempt: InvalidRequestError("unknown role")) as (pool, _, _said):
        results = await asyncio.gather(*(pool.sample(assignment(str(n))) for n in range(3)), return_exceptions=True)
        assert all(isinstance(result, InvalidRequestError) for result in results)
        with pytest.raises(InvalidRequestError):
            await pool.sample(assignment("later"))


async def test_a_trajectory_whose_time_is_over_is_lost_without_another_try() -> None:
    async with pool_on(lambda wanted, attempt: common_pb2.STOP_REASON_CANCELLED) as (pool, service, _):
        assert isinstance(await pool.sample(assignment()), Lost)
    assert len(service.seen) == 1


async def test_a_refused_task_is_lost_at_once_and_is_no_infrastructure_failure() -> None:
    async with pool_on(lambda wanted, attempt: common_pb2.STOP_REASON_INVALID_TASK) as (pool, service, said):
        assert await pool.sample(assignment()) == Lost("invalid task: unknown tool 'pythn'")
        assert pool.infra_failures == 0
    assert len(service.seen) == 1
    assert said == ["(connect)"]


async def test_permits_bound_what_is_in_flight() -> None:
    async with pool_on(lambda wanted, attempt: 0.02, max_in_flight=3) as (pool, service, _):
        await asyncio.gather(*(pool.sample(assignment(str(number))) for number in range(20)))
    assert service.most_running == 3


def test_seeds_differ_by_what_they_are_for_and_are_the_same_in_every_process() -> None:
    assert sampling_seed(0, "train", 3, 1) == sampling_seed(0, "train", 3, 1)
    assert (
        len({sampling_seed(seed, kind, 3, n) for seed in (0, 1) for kind in ("train", "eval") for n in range(9)}) == 36
    )


# -- groups


@asynccontextmanager
async def feed_on(script: Script, tmp_path: Any, **sections: Any) -> AsyncIterator[tuple[GroupFeed, Ledger]]:
    config = run_config(**sections)
    sources = [Source(config.data.train[0], "x", (), None)]
    ledger = Ledger(AppendFile(tmp_path / "ledger.jsonl"))
    async with pool_on(script) as (pool, _, _said):
        judge = Judge(config.reward)
        feed = GroupFeed(config, stream=TrainingStream(sources, 0), pool=pool, judge=judge, ledger=ledger)
        yield feed, ledger
        await feed.close()
        judge.close()


async def test_admission_bounds_what_is_in_flight_and_done(tmp_path: Any) -> None:
    async with feed_on(lambda wanted, attempt: 0.01, tmp_path, rollout={"max_staleness": 1}) as (feed, ledger):
        for version, total, admitted in ((0, 10, 8), (0, 10, 8), (1, 10, 12), (9, 3, 12)):
            feed.admit(version, total)
            await asyncio.sleep(0)
            assert ledger.open == admitted * 4
        for _ in range(3):
            await feed.batch()
        assert ledger.open == 12 * 4


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_a_batch_is_the_next_draws_in_order_however_long_they_take(tmp_path: Any, max_staleness: int) -> None:
    """One that is overtaken would be trained on when it is too stale."""

    def script(wanted: rollout_pb2.RolloutTask, attempt: int) -> float:
        return 0.05 if "train-0/" in wanted.trajectory_id else 0.001

    async with feed_on(script, tmp_path, rollout={"max_staleness": max_staleness}) as (feed, _):
        for version in range(3):
            feed.admit(version, total=5)
            draws = [group.draw for group in await feed.batch()]
            assert draws == list(range(4 * version, 4 * version + 4))


async def test_a_lost_trajectory_and_a_broken_reward_are_failures_of_their_own_kind(tmp_path: Any) -> None:
    def script(wanted: rollout_pb2.RolloutTask, attempt: int) -> common_pb2.StopReason.ValueType:
        return common_pb2.STOP_REASON_CANCELLED if wanted.trajectory_id.split("/")[-2] == "0" else DONE

    async with feed_on(script, tmp_path, reward={"name": "reasoning_gym"}) as (feed, ledger):
        feed.admit(0, total=1)
        (group, *_) = await feed.batch()
    reasons = [member.reason for member in group.members if isinstance(member, Failed)]
    assert reasons[0] == "cancelled: by the rollout service"
    assert all(reason.startswith("reward reasoning_gym: ValueError") for reason in reasons[1:])
    assert not any(isinstance(member, Judged) for member in group.members)
    for member in group.members:
        ledger.close(member.key, State.FAILED, 1, "x")
