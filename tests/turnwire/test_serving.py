"""Errors across the wire, health and drain, with the real server and a real client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from waiting import PATIENCE

from turnwire import errors
from turnwire.boundary import status_of
from turnwire.client import TrainerClient, translate
from turnwire.errors import ConfigError, Problem, TurnwireError
from turnwire.serving import Server, ServerConfig
from turnwire.v1 import trainer_pb2, trainer_pb2_grpc

ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TurnwireError) and kind not in (TurnwireError, ConfigError)
]


class RaisingTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Raises what the test puts in `error`, in a unary and in a streaming method."""

    error: Exception = ZeroDivisionError("not set")

    def __init__(self) -> None:
        self.stopping, self.may_stop = asyncio.Event(), asyncio.Event()

    async def GetRun(self, request: Any, context: Any) -> trainer_pb2.GetRunResponse:  # noqa: N802
        raise self.error

    async def StopRun(self, request: Any, context: Any) -> trainer_pb2.StopRunResponse:  # noqa: N802
        self.stopping.set()
        await self.may_stop.wait()
        return trainer_pb2.StopRunResponse(run=trainer_pb2.Run(run_id="late"))

    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[trainer_pb2.WatchRunResponse]:  # noqa: N802
        if request.from_sequence < 3:
            yield trainer_pb2.WatchRunResponse(sequence=request.from_sequence or 1)
            raise self.error
        yield trainer_pb2.WatchRunResponse(sequence=3)


@pytest.fixture
async def raising() -> AsyncIterator[tuple[RaisingTrainer, Server, TrainerClient]]:
    servicer, server = RaisingTrainer(), Server(ServerConfig(), ["turnwire.v1.TrainerService"])
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    async with TrainerClient(server.address) as client:
        yield servicer, server, client
    await server.stop(0)


@pytest.mark.parametrize("kind", ALL)
async def test_an_error_is_raised_as_its_class_on_the_other_side(
    raising: tuple[RaisingTrainer, Server, TrainerClient], kind: type[TurnwireError]
) -> None:
    servicer, _, client = raising
    servicer.error = kind("the message", retry_after=0.01)
    with pytest.raises(TurnwireError, match="the message") as caught:
        await client.get_run("x")
    expected = errors.UnavailableError if kind is errors.InfraError else kind
    assert type(caught.value) is expected
    assert caught.value.retry_after == pytest.approx(0.01)


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "ü" * 100_000, "\U0001f600" * 9000, "\n" * 9000, "lone \ud800 " * 9000]
)
async def test_a_long_message_is_cut_so_that_it_arrives_under_its_own_status(
    raising: tuple[RaisingTrainer, Server, TrainerClient], text: str
) -> None:
    servicer, _, client = raising
    servicer.error = errors.NotFoundError(f"begins {text}", retry_after=1.0)
    for _ in range(20):  # grpc refuses long trailers by chance
        with pytest.raises(errors.NotFoundError, match=r"(?s)^begins .*…$") as caught:
            await asyncio.wait_for(client.get_run("x"), PATIENCE)
        assert caught.value.retry_after == pytest.approx(1.0)


@pytest.mark.parametrize("text", ["is bad", "ist übel " * 200])
async def test_of_very_many_problems_the_first_arrive_and_the_number_of_the_others(
    raising: tuple[RaisingTrainer, Server, TrainerClient], text: str
) -> None:
    servicer, _, client = raising
    servicer.error = ConfigError([Problem(f"key{number}", text) for number in range(5000)], "run: x.yaml")
    for _ in range(20):
        with pytest.raises(ConfigError) as caught:
            await client.get_run("x")
        *first, last = caught.value.problems
        assert first[0].key == "key0"
        assert last.message == f"and {5000 - len(first)} more problems"


async def test_a_config_error_keeps_its_problems(raising: tuple[RaisingTrainer, Server, TrainerClient]) -> None:
    servicer, _, client = raising
    error = ConfigError([Problem("a.b", "is bad: very"), Problem("", "so is this")], "run: x.yaml")
    servicer.error = error
    with pytest.raises(ConfigError) as caught:
        await client.get_run("x")
    assert (caught.value.problems, caught.value.source) == (error.problems, error.source)
    assert str(caught.value) == str(error)


async def test_a_bug_shows_only_an_id(raising: tuple[RaisingTrainer, Server, TrainerClient]) -> None:
    servicer, _, client = raising
    servicer.error = KeyError("password")
    events = aiter(client.watch_run("x", 2))
    assert (await anext(events)).sequence == 2
    for call in (client.get_run("x"), anext(events)):
        with pytest.raises(errors.InternalError, match=r"internal error [0-9a-f]{16}") as caught:
            await call
        assert "password" not in str(caught.value)


async def test_watching_goes_on_after_the_last_event_when_the_connection_is_lost(
    raising: tuple[RaisingTrainer, Server, TrainerClient],
) -> None:
    servicer, _, client = raising
    servicer.error = errors.UnavailableError("gone")
    assert [event.sequence async for event in client.watch_run("x")] == [1, 2, 3]
    servicer.error = errors.NotFoundError("no such run")
    with pytest.raises(errors.NotFoundError):
        [event async for event in client.watch_run("x")]


async def test_stopping_lets_running_calls_finish_and_says_not_serving(
    raising: tuple[RaisingTrainer, Server, TrainerClient],
) -> None:
    servicer, server, client = raising
    assert await client.is_healthy()
    running = asyncio.create_task(client.stop_run("x"))
    await servicer.stopping.wait()
    stopping = asyncio.create_task(server.stop(PATIENCE))
    while await client.is_healthy():
        pass
    servicer.may_stop.set()
    assert (await running).run_id == "late"
    await stopping


def test_plaintext_beyond_loopback_has_to_be_asked_for() -> None:
    with pytest.raises(ValueError, match="allow_plaintext_beyond_loopback"):
        ServerConfig(host="0.0.0.0")
    assert ServerConfig(host="0.0.0.0", allow_plaintext_beyond_loopback=True).host == "0.0.0.0"


async def test_an_address_that_is_taken_is_a_config_error() -> None:
    first = Server(ServerConfig(), [])
    await first.start()
    second = Server(ServerConfig(port=first.port), [])
    with pytest.raises(ConfigError, match="cannot listen on"):
        await second.start()
    await first.stop(0)


def test_a_status_without_details_is_translated_by_its_code() -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.OUT_OF_RANGE, grpc.aio.Metadata(), grpc.aio.Metadata(), "no")
    assert type(translate(error)) is errors.InternalError
    assert status_of(errors.NotFoundError("x")).code is grpc.StatusCode.NOT_FOUND
