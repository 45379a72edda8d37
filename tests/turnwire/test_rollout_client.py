"""The rollout client against a real gRPC server whose servicer is scripted: what the real one cannot be made to do on
demand. The real service is used in tests/rollout and by the examples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import ENDLESS, PATIENCE

from turnwire import weights
from turnwire.client import RolloutClient, rollout_limits, rollout_task
from turnwire.errors import DeadlineError, InvalidRequestError, UnavailableError
from turnwire.serving import Server, ServerConfig
from turnwire.tensors import to_tensor
from turnwire.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc


class ScriptedRolloutService(rollout_pb2_grpc.RolloutServiceServicer):
    """Trajectories of one turn; weights are put together and described; a version of 7 is refused at once."""

    def __init__(self) -> None:
        self.lose_after: int | None = None
        """How many trajectories a stream gives before it is lost."""
        self.tasks: list[rollout_pb2.RolloutTask] = []
        self.received = b""
        self.partial: rollout_pb2.PartialUpdate | None = None
        self.ended = asyncio.Event()

    async def Rollout(self, request_iterator: Any, context: Any) -> AsyncIterator[rollout_pb2.RolloutResponse]:  # noqa: N802
        try:
            async for request in request_iterator:
                if self.lose_after is not None and len(self.tasks) >= self.lose_after:
                    raise UnavailableError("the engine's host is gone")
                self.tasks.append(request.task)
                name = request.task.trajectory_id
                yield rollout_pb2.RolloutResponse(turn=rollout_pb2.TurnFinished(trajectory_id=name))
                yield rollout_pb2.RolloutResponse(trajectory=rollout_pb2.Trajectory(trajectory_id=name))
        finally:
            self.ended.set()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:  # noqa: N802
        for start, version in ((0, 1), (2, 1), (4, 2)):
            yield rollout_pb2.GenerateResponse(
                token_ids=to_tensor(np.array([start, start + 1], np.int32)),
                logprobs=to_tensor(np.array([-0.5, -1.0], np.float32)),
                weight_spans=[rollout_pb2.WeightSpan(start=start, end=start + 2, version=version)],
                stop=rollout_pb2.GENERATE_STOP_LENGTH if start == 4 else rollout_pb2.GENERATE_STOP_UNSPECIFIED,
            )

    async def Score(self, request: Any, context: Any) -> rollout_pb2.ScoreResponse:  # noqa: N802
        await asyncio.sleep(ENDLESS)
        raise AssertionError("nobody waits so long")

    async def GetWeightInfo(self, request: Any, context: Any) -> rollout_pb2.GetWeightInfoResponse:  # noqa: N802
        return rollout_pb2.GetWeightInfoResponse(partial=self.partial)

    async def UpdateWeights(self, request_iterator: Any, context: Any) -> rollout_pb2.UpdateWeightsResponse:  # noqa: N802
        update = (await anext(aiter(request_iterator))).update
        if update.version == 7:
            if update.tensors[0].name == "drained":
                async for _ in request_iterator:
                    pass
            raise InvalidRequestError("version 7 is not wanted")
        if update.HasField("file"):
            return rollout_pb2.UpdateWeightsResponse(version=update.version, checksum=update.file.path)
        async for request in request_iterator:
            assert request.chunk.offset == len(self.received)
            assert len(request.chunk.data) <= weights.CHUNK_BYTES
            self.received += request.chunk.data
        return rollout_pb2.UpdateWeightsResponse(
            version=update.version, checksum=weights.checksum(update.tensors), bytes=len(self.received)
        )


@pytest.fixture
async def script() -> ScriptedRolloutService:
    return ScriptedRolloutService()


@pytest.fixture
async def client(script: ScriptedRolloutService) -> AsyncIterator[RolloutClient]:
    server = Server(ServerConfig(), ["turnwire.v1.RolloutService"])
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(script, server.grpc)
    await server.start()
    async with RolloutClient(server.address) as rollout:
        yield rollout
    await server.stop(0)


def tasks(count: int) -> list[rollout_pb2.RolloutTask]:
    return [rollout_task(f"t-{number}", "What?", ["python"]) for number in range(count)]


async def test_events_of_all_tasks_come_out(client: RolloutClient, script: ScriptedRolloutService) -> None:
    limits = rollout_limits(max_turns=3, tool_timeout=1.5)
    task = rollout_task(
        "t",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}],
        {"sql": {"init_sql": "create table t(x)"}, "python": None},
        seed=5,
        limits=limits,
        answer_tags=("<a>", "</a>"),
        metadata={"group": 1},
    )
    events = [event async for event in client.run([task, *tasks(300)])]
    ended = [event.trajectory_id for event in events if isinstance(event, rollout_pb2.Trajectory)]
    assert ended == ["t", *(f"t-{number}" for number in range(300))]
    sent = script.tasks[0]
    assert [(message.role, message.content[0].text) for message in sent.messages] == [
        ("system", "Be brief."),
        ("user", "What?"),
    ]
    assert sent.tools[0].context["init_sql"] == "create table t(x)"
    assert sent.limits.tool_timeout.ToTimedelta().total_seconds() == 1.5
    assert (sent.sampling.seed, sent.sampling.HasField("temperature")) == (5, False)
    assert (sent.final_answer.close, sent.metadata["group"]) == ("</a>", 1)


async def test_a_lost_stream_is_an_error_for_readers_and_writers(
    client: RolloutClient, script: ScriptedRolloutService
) -> None:
    script.lose_after = 2
    with pytest.raises(UnavailableError, match="the engine's host is gone"):
        [event async for event in client.run(tasks(5))]
    script.tasks.clear()
    script.lose_after = 0
    async with client.rollouts() as stream:
        await stream.submit(tasks(1)[0])
        with pytest.raises(UnavailableError, match="the engine's host is gone"):
            async for _ in stream:
                pass
        with pytest.raises(UnavailableError, match="the engine's host is gone"):
            await stream.submit(tasks(1)[0])
        await stream.finish()


async def test_leaving_a_stream_early_cancels_it(client: RolloutClient, script: ScriptedRolloutService) -> None:
    async with client.rollouts() as stream:
        await stream.submit(tasks(1)[0])
        assert await anext(aiter(stream))
    await asyncio.wait_for(script.ended.wait(), PATIENCE)


async def test_generated_parts_are_joined_with_their_versions(client: RolloutClient) -> None:
    whole = await client.generate([1, 2, 3], 6)
    assert whole.token_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert [(span.start, span.end, span.version) for span in whole.weight_spans] == [(0, 4, 1), (4, 6, 2)]
    assert whole.stop == rollout_pb2.GENERATE_STOP_LENGTH
    assert [part.token_ids.tolist() async for part in client.generate_stream([1], 6)] == [[0, 1], [2, 3], [4, 5]]


async def test_a_unary_call_has_a_time_limit(client: RolloutClient) -> None:
    with pytest.raises(DeadlineError, match=r"rollout service at 127\.0\.0\.1:\d+: "):
        await client.score([[1, 2]], timeout=0.1)


async def test_weights_arrive_byte_for_byte(client: RolloutClient, script: ScriptedRolloutService) -> None:
    big = np.random.default_rng(0).standard_normal((700, 1000), np.float32)
    tensors = [
        ("big", common_pb2.DATA_TYPE_FLOAT32, big.shape, memoryview(big)),
        ("none", common_pb2.DATA_TYPE_BFLOAT16, (0, 3), b""),
        ("small", common_pb2.DATA_TYPE_BFLOAT16, (3,), b"\x00\x01\x02\x03\x04\x05"),
    ]
    answer = await client.update_weights(tensors, 3)
    assert script.received == big.tobytes() + b"\x00\x01\x02\x03\x04\x05"
    assert answer.version == 3
    assert answer.checksum == weights.checksum([weights.tensor_spec(*tensor) for tensor in tensors])
    assert (await client.update_weights(Path("/shared/model.safetensors"), 4)).checksum == "/shared/model.safetensors"


@pytest.mark.parametrize("another", ["", "version", "tensors"])
async def test_an_update_goes_on_where_its_stream_broke(
    client: RolloutClient, script: ScriptedRolloutService, another: str
) -> None:
    data = np.random.default_rng(1).bytes(3_000_000)
    tensors = [("a", common_pb2.DATA_TYPE_UINT8, (10,), data[:10])]
    tensors.append(("b", common_pb2.DATA_TYPE_UINT8, (len(data) - 10,), data[10:]))
    script.received = data[:1_234_567]
    script.partial = rollout_pb2.PartialUpdate(
        version=2 if another == "version" else 3,
        checksum="x" if another == "tensors" else weights.checksum([weights.tensor_spec(*item) for item in tensors]),
        received_bytes=len(script.received),
    )
    if another:
        script.received = b""
    await client.update_weights(tensors, 3)
    assert script.received == data


async def test_a_refused_update_says_why(client: RolloutClient) -> None:
    big = bytes(40 * 1024 * 1024)
    with pytest.raises(InvalidRequestError, match="version 7 is not wanted"):
        await client.update_weights([("drained", common_pb2.DATA_TYPE_UINT8, (len(big),), big)], 7)
    # A service that ends the stream in the middle of it: gRPC may lose the reason, and then it can be tried again.
    with pytest.raises((InvalidRequestError, UnavailableError)):
        await client.update_weights([("big", common_pb2.DATA_TYPE_UINT8, (len(big),), big)], 7)
    with pytest.raises(InvalidRequestError, match="bytes do not make a tensor"):
        await client.update_weights([("big", common_pb2.DATA_TYPE_FLOAT32, (3,), b"123")], 8)
