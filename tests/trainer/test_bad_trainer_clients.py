"""Whatever a client of the trainer does wrong has a defined status, leaves nothing behind, and harms nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml
from calls import outcome
from services import letters_run, rollout_service, tool_service, trainer_service, watch
from trainer_harness import run_config, task
from waiting import PATIENCE, eventually, no_more

from trainer_service.config import SamplingConfig
from trainer_service.rollouts import Assignment, RolloutPool, Sampled
from turnwire.client.rollout import RolloutClient
from turnwire.client.trainer import TrainerClient
from turnwire.errors import AlreadyExistsError
from turnwire.v1 import trainer_pb2 as pb

Code = grpc.StatusCode
INVALID, MISSING = Code.INVALID_ARGUMENT, Code.NOT_FOUND

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["TrainerService"].methods}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[TrainerClient]:
    """Of a trainer whose rollout service never answers, so that a run goes on for as long as it is let."""
    async with trainer_service("127.0.0.1:1", tmp_path) as there:
        yield there


@asynccontextmanager
async def nothing_left(client: TrainerClient, folder: Path) -> AsyncIterator[None]:
    """What happens inside leaves neither run, file, task nor descriptor, and the service answers meanwhile."""

    def footprint() -> dict[str, int]:
        names = {"tasks": len(asyncio.all_tasks()), "descriptors": len(os.listdir("/proc/self/fd"))}
        return {**names, "files": sum(1 for _ in folder.rglob("*"))}

    runs = await client.list_runs()
    before = footprint()
    meanwhile = asyncio.create_task(client.list_runs(timeout=PATIENCE))
    yield
    assert await meanwhile == runs
    assert await client.list_runs(timeout=PATIENCE) == runs
    await no_more(before, footprint)


def raw(client: TrainerClient, name: str, message: bytes) -> Any:
    """Call a method with bytes as they are."""
    kind = "unary_stream" if METHODS[name].server_streaming else "unary_unary"
    return getattr(client.channel, kind)(f"/turnwire.v1.TrainerService/{name}")(message)


# -- requests


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x03\xff\xfe\xfd"], ids=repr)
@pytest.mark.parametrize("name", METHODS)
async def test_bytes_that_are_no_message(client: TrainerClient, tmp_path: Path, name: str, junk: bytes) -> None:
    has_text = bool(METHODS[name].input_type.fields)
    async with nothing_left(client, tmp_path):
        code, details = await outcome(raw(client, name, junk))
        if has_text or not junk.endswith(b"\xfd"):
            assert (code, "not a message of this method" in details) == (INVALID, True)
        else:  # an unknown field
            assert code is Code.OK


@pytest.mark.parametrize("name", METHODS)
async def test_an_empty_message(client: TrainerClient, tmp_path: Path, name: str) -> None:
    async with nothing_left(client, tmp_path):
        code, _ = await outcome(raw(client, name, b""))
        assert code is {"ListRuns": Code.OK, "StartRun": INVALID}.get(name, MISSING)


@pytest.mark.parametrize("name", METHODS)
async def test_a_message_above_the_transports_limit(client: TrainerClient, tmp_path: Path, name: str) -> None:
    size = b"\x80\x80\x80\x08"  # 16 MiB, of a field that no message has
    async with nothing_left(client, tmp_path):
        code, _ = await outcome(raw(client, name, b"\xfa\x7f" + size + b"x" * 2**24))
        assert code is Code.RESOURCE_EXHAUSTED


BAD_IDS = [
    "",
    ".",
    "..",
    "../run",
    "a/b",
    "/etc",
    "a\0b",
    "a b",
    "a\n",
    "-a",
    "x" * 300,
    "x" * 10**6,
    "läuft",
    "run\u202e",
]


@pytest.mark.parametrize("run_id", BAD_IDS, ids=lambda text: repr(text[:20]))
async def test_ids_that_no_run_can_have(client: TrainerClient, tmp_path: Path, run_id: str) -> None:
    text = yaml.safe_dump(letters_run(Path("/nowhere")))
    async with nothing_left(client, tmp_path):
        code, details = await outcome(client._stub.StartRun(pb.StartRunRequest(run_id=run_id, config_yaml=text)))
        assert (code, "run_id" in details, len(details) < 500) == (INVALID, True, True)
        for call in (
            client._stub.GetRun(pb.GetRunRequest(run_id=run_id)),
            client._stub.StopRun(pb.StopRunRequest(run_id=run_id)),
            client._stub.WatchRun(pb.WatchRunRequest(run_id=run_id)),
        ):
            code, details = await outcome(call)
            assert code is (MISSING if len(run_id) <= 100 else INVALID)
            assert len(details) < 500


def bomb(levels: int) -> str:
    """A few lines whose aliases stand for 9 to the power of `levels` values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"model: *a{levels - 1}"])


def configs() -> Iterator[Any]:
    good = yaml.safe_dump(letters_run(Path("/nowhere")))
    for name, text, says in (
        ("nothing", "", "key: value"),
        ("a list", "- 1", "key: value"),
        ("a word", "hello", "key: value"),
        ("not YAML", "{not: [yaml", "line 1"),
        ("binary", "\0\1\2\x7f", "not allowed"),
        ("two documents", f"{good}---\n{good}", "document"),
        ("a key twice", f"{good}seed: 1\nseed: 2", "twice"),
        ("a key that is no text", f"{good}1: 2", "keys are strings"),
        ("a tag of Python's", f"{good}seed: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("an unknown key", f"{good}rewad: 1", "did you mean 'reward'"),
        ("a wrong type", f"{good}seed: soon", "seed"),
        ("a long number", f"{good}seed: {'9' * 5000}", "the number is too long"),
        ("a long hexadecimal number", f"{good}seed: 0x{'f' * 5000}", "the number is too long"),
        ("more steps than the wire has", good.replace("steps: 3", "steps: 5000000000"), "training.steps"),
        ("a number that is none", good.replace("steps: 3", "steps: .nan"), "training.steps"),
        ("deep", f"seed: {'[' * 5000}{']' * 5000}", "nested too deeply"),
        ("an anchor in itself", "model: &a [*a]", "recursive"),
        ("many aliases", bomb(9), "more than 100000 values"),
        ("very large", f"{good}# {'x' * 200_000}", "it may have 131072"),
    ):
        yield pytest.param(text, says, id=name)


@pytest.mark.parametrize(("text", "says"), configs())
async def test_configs_that_cannot_be(client: TrainerClient, tmp_path: Path, text: str, says: str) -> None:
    async with nothing_left(client, tmp_path):
        code, details = await outcome(client._stub.StartRun(pb.StartRunRequest(run_id="run", config_yaml=text)))
        assert (code, says if says in details else details) == (INVALID, says)


# -- runs


def a_run(model: Path, **sections: Any) -> str:
    return yaml.safe_dump(letters_run(model, **{"training": {"steps": 30}, "data__eval": [], **sections}))


async def test_two_starts_at_once_with_different_configs_are_one_run_and_a_refusal(
    client: TrainerClient, model_path: Path
) -> None:
    texts = [a_run(model_path), a_run(model_path, seed=9)]
    answers = await asyncio.gather(*(client.start_run("run", text) for text in texts), return_exceptions=True)
    assert {type(answer) for answer in answers} == {pb.Run, AlreadyExistsError}  # whichever came first
    assert [run.run_id for run in await client.list_runs()] == ["run"]


async def test_everything_is_answered_while_a_run_starts(client: TrainerClient, model_path: Path) -> None:
    starting = asyncio.create_task(client.start_run("run", a_run(model_path)))
    while not starting.done():
        assert [run.run_id for run in await client.list_runs(timeout=PATIENCE)] in ([], ["run"])
        code, _ = await outcome(client._stub.GetRun(pb.GetRunRequest(run_id="run")))
        assert code in (Code.OK, Code.NOT_FOUND)
    assert (await client.get_run("run", timeout=PATIENCE)).state in (pb.RUN_STATE_STARTING, pb.RUN_STATE_RUNNING)
    assert (await client.start_run("run", a_run(model_path))).run_id == "run"


WATCHER = """
import sys
import grpc
from turnwire.v1 import trainer_pb2, trainer_pb2_grpc
stub = trainer_pb2_grpc.TrainerServiceStub(grpc.insecure_channel(sys.argv[1]))
for event in stub.WatchRun(trainer_pb2.WatchRunRequest(run_id="run")):
    print(event.sequence, flush=True)
"""


async def test_watchers_that_do_not_read_go_away_or_are_killed(
    client: TrainerClient, model_path: Path, tmp_path: Path
) -> None:
    await client.start_run("run", a_run(model_path))
    async for event in client.watch_run("run"):
        if event.WhichOneof("event") == "notice":  # it waits for the rollout service
            break
    tasks = len(asyncio.all_tasks())
    silent = [client._stub.WatchRun(pb.WatchRunRequest(run_id="run")) for _ in range(20)]
    beyond = client._stub.WatchRun(pb.WatchRunRequest(run_id="run", from_sequence=2**64 - 1))
    gone = client._stub.WatchRun(pb.WatchRunRequest(run_id="run"))
    assert (await gone.read()).sequence == 1
    gone.cancel()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WATCHER, client.target, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"1\n"
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert not beyond.done()
    assert (await client.stop_run("run")).state == pb.RUN_STATE_STOPPED
    assert await outcome(beyond) == (Code.OK, "")
    assert (await watch(client, "run"))[0].sequence == 1
    for call in silent:
        call.cancel()
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_what_is_asked_of_a_run_that_is_over(client: TrainerClient, model_path: Path) -> None:
    await client.start_run("run", a_run(model_path))
    await client.stop_run("run")
    code, details = await outcome(client._stub.StopRun(pb.StopRunRequest(run_id="run")))
    assert (code, "is not live: STOPPED" in details) == (Code.FAILED_PRECONDITION, True)
    events = await watch(client, "run")
    for first, wanted in ((1, events), (2, events[1:]), (len(events) + 1, []), (2**64 - 1, [])):
        assert await watch(client, "run", first) == wanted


async def test_a_pool_that_idles_for_longer_than_its_stream_may_is_not_hurt(model_path: Path) -> None:
    """As during a long update: the rollout service ends the stream, and the pool opens another one."""
    said: list[str] = []
    config = run_config(model_path).rollout

    async def connect() -> None:
        said.append("(connect)")

    async with (
        tool_service() as tools,
        rollout_service(model_path, tools, stream_idle_seconds=0.3) as (address, _),
        RolloutClient(address) as client,
        RolloutPool(client, config, "run", connect, said.append) as pool,
    ):
        for number in range(2):
            assignment = Assignment(str(number), task(), SamplingConfig(), seed=7)
            result = await asyncio.wait_for(pool.sample(assignment), PATIENCE)
            assert isinstance(result, Sampled)
            connects = said.count("(connect)")
            await eventually(lambda: said.count("(connect)") > connects)  # noqa: B023 - awaited here
        assert pool.infra_failures == 0
