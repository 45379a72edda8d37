"""The agent loop: stop reasons, limits, what ends up in a trajectory. The policy is scripted; all else is real."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from rollout_harness import (
    TAGS,
    check_trajectory,
    data_of,
    no_sessions,
    nothing_open,
    reason,
    rollouts,
    script,
    tokens_of,
    tool_server,
)
from sleepers import sleepers
from tiny_models import SEES, TINY, make_model
from waiting import ENDLESS, eventually

from rollout_service.agent import Cancellation
from turnwire.client.rollout import rollout_limits, rollout_task
from turnwire.client.tools import ToolClient
from turnwire.errors import InfraError, InvalidRequestError
from turnwire.tensors import from_tensor
from turnwire.v1 import common_pb2, rollout_pb2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=TINY)


async def test_turns_are_appended_as_they_happen(folder: Path) -> None:
    actions = ("let me see <echo>17 * 23</echo>", "so <echo>x</echo> after", "it is <answer>391</answer>")
    async with rollouts(folder, script(*actions)) as running:
        task = rollout_task("t", "what is it?", ["echo"], answer_tags=TAGS, metadata={"group": 5})
        turns, trajectory = await running.one(task)
        chat, bridge = running.chat, running.chat.bridge
        wanted = [*chat.prompt([{"role": "user", "content": "what is it?"}])]
        wanted += [*chat.text(actions[0]), *bridge.before, *chat.text("17 * 23"), *bridge.after]
        wanted += [*chat.text("so <echo>x</echo>"), *bridge.before, *chat.text("x"), *bridge.after]
        wanted += [*chat.text(actions[2])]
        assert tokens_of(trajectory) == wanted
        assert (reason(trajectory), trajectory.final_answer) == ("FINAL_ANSWER", "391")
        assert trajectory.metadata["group"] == 5
        assert [(turn.action_text, turn.observation_text) for turn in turns] == [
            (actions[0], "17 * 23"),
            ("so <echo>x</echo>", "x"),
            (actions[2], ""),
        ]
        assert [turn.turn for turn in turns] == list(trajectory.segments[0].turns)
        assert data_of(turns[0].turn.results[0]) == {"length": 7}
        assert [(s.version) for s in trajectory.segments[0].weight_spans] == [3, 3, 3]
        assert [list(job.prompt) for job in running.engine.jobs] == [
            wanted[: len(j.prompt)] for j in running.engine.jobs
        ]
        assert len({job.sequence_key for job in running.engine.jobs}) == 1
        await eventually(lambda: running.engine.released == ["t"])


@pytest.mark.parametrize(
    ("actions", "tools", "tags", "wanted", "answer"),
    [
        (["hm <answer>a</answer>"], ["echo"], TAGS, "FINAL_ANSWER", "a"),
        (["<answer></answer>"], [], TAGS, "FINAL_ANSWER", ""),
        (["no tags at all"], ["echo"], TAGS, "NO_ACTION", None),
        (["no tags at all"], [], TAGS, "NO_ACTION", None),
        (["just this"], ["echo"], None, "FINAL_ANSWER", "just this"),
        (["just this"], [], None, "FINAL_ANSWER", "just this"),
        (["</answer>"], ["echo"], TAGS, "NO_ACTION", None),
        (["<end>now</end>"], ["echo", "end"], TAGS, "TOOL_DONE", None),
        (["<echo>again</echo>"], ["echo"], TAGS, "MAX_TURNS", None),
        (["a b c d e f g h i j k l m n o p q r s t u v w x y z " * 9], ["echo"], TAGS, "MAX_TOKENS", None),
        (["<broken>x</broken>"], ["broken"], TAGS, "INFRA_ERROR", None),
    ],
)
async def test_stop_reasons(
    folder: Path, actions: list[str], tools: list[str], tags: tuple[str, str] | None, wanted: str, answer: str | None
) -> None:
    async with rollouts(folder, script(*actions)) as running:
        limits = rollout_limits(max_turns=3, max_action_tokens=60)
        _, trajectory = await running.one(rollout_task("t", "q", tools, answer_tags=tags, limits=limits))
        assert reason(trajectory) == wanted
        assert (trajectory.final_answer if trajectory.HasField("final_answer") else None) == answer
        assert bool(trajectory.error) == (wanted == "INFRA_ERROR")
        if wanted == "MAX_TURNS":
            assert len(trajectory.segments[0].turns) == 3
        if wanted == "MAX_TOKENS":
            assert len(trajectory.segments[0].turns) == 1


async def test_mistakes_of_the_agent_are_observations(folder: Path) -> None:
    async with rollouts(folder, script("<echo>x", "<answer>1</answer>")) as running:
        turns, trajectory = await running.one(rollout_task("t", "q", ["echo"], answer_tags=TAGS))
        assert reason(trajectory) == "FINAL_ANSWER"
        assert turns[0].turn.results[0].error == common_pb2.ERROR_KIND_INVALID_ACTION
        assert turns[0].observation_text


async def test_an_image_that_a_text_model_cannot_see_is_named(folder: Path) -> None:
    async with rollouts(folder, script("<picture>x</picture>", "<answer>a</answer>")) as running:
        turns, trajectory = await running.one(rollout_task("t", "q", ["picture"], answer_tags=TAGS))
        assert [turn.observation_text for turn in turns] == ["(image/png, 4 bytes)", ""]
        assert reason(trajectory) == "FINAL_ANSWER"


async def test_a_models_images_come_with_every_turn_and_take_room(tmp_path: Path) -> None:
    folder = make_model(tmp_path, template=SEES)
    picture = common_pb2.MediaPart(data=b"1234", media_type="image/png")
    messages = [{"role": "system", "content": "terse"}, {"role": "user", "content": ["what is ", picture, "?"]}]
    async with rollouts(folder, script("<echo>x</echo>")) as running:
        running.engine.modalities = ("text", "image")
        for running.engine.image_tokens, ending, most in ((0, "MAX_TURNS", 130), (70, "MAX_TOKENS", 60)):
            task = rollout_task("t", messages, ["echo"], limits=rollout_limits(max_turns=3, max_trajectory_tokens=130))
            _, trajectory = await running.one(task)
            assert reason(trajectory) == ending
            assert len(tokens_of(trajectory)) <= most
        assert all(job.images == (picture,) for job in running.engine.jobs)


async def test_an_engine_that_refuses_what_the_task_brought_makes_it_invalid(folder: Path) -> None:
    async with rollouts(folder, script("x")) as running:
        running.engine.failure = InvalidRequestError("an image cannot be decoded")
        trajectory = (await running.one(rollout_task("t", "q")))[1]
        assert (reason(trajectory), trajectory.error) == ("INVALID_TASK", "an image cannot be decoded")


async def test_long_observation_is_cut_and_says_how_long_it_was(folder: Path) -> None:
    text = "0123456789" * 40
    async with rollouts(folder, script(f"<echo>{text}</echo>", "<answer>1</answer>")) as running:
        limits = rollout_limits(max_observation_tokens=60, max_action_tokens=1000)
        turns, trajectory = await running.one(rollout_task("t", "q", ["echo"], answer_tags=TAGS, limits=limits))
        turn, full = turns[0].turn, len(running.chat.text(text))
        assert turn.observation_full_tokens == full
        tokens = tokens_of(trajectory)[turn.action_end : turn.observation_end]
        bridge = running.chat.bridge
        inside = np.array(tokens[len(bridge.before) : -len(bridge.after)], np.int32)
        assert len(inside) <= 60
        shown = running.chat.decode(inside)
        head, _, note = shown.partition("\n")
        assert text.startswith(head)
        assert note == f"[cut: first {len(running.chat.text(head))} of {full} tokens shown]"


@pytest.mark.parametrize("limit", range(20, 120, 7))
async def test_trajectory_at_its_limit_is_valid(folder: Path, limit: int) -> None:
    async with rollouts(folder, script("<echo>0123456789</echo>")) as running:
        limits = rollout_limits(max_trajectory_tokens=limit, max_turns=50)
        _, trajectory = await running.one(rollout_task("t", "q", ["echo"], answer_tags=TAGS, limits=limits))
        assert reason(trajectory) == "MAX_TOKENS"
        assert len(tokens_of(trajectory)) <= limit
        assert from_tensor(trajectory.segments[0].loss_mask).any()


async def test_prompt_beyond_the_limit_gives_an_empty_trajectory(folder: Path) -> None:
    async with rollouts(folder, script("x"), longest=40) as running:
        _, trajectory = await running.one(rollout_task("t", "q " * 400, ["echo"]))
        assert (reason(trajectory), len(trajectory.segments[0].turns)) == ("MAX_TOKENS", 0)


async def test_trajectory_never_waits_for_anothers_tool(folder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def policy(name: str, turn: int) -> str:
        if name == "slow" and turn == 0:
            return f"<gate>{gate}</gate>"
        return "<echo>x</echo>" if turn < 5 else "<answer>1</answer>"

    async with rollouts(folder, policy) as running, running.client.rollouts() as stream:
        await stream.submit(rollout_task("slow", "q", ["gate", "echo"], answer_tags=TAGS))
        await eventually(lambda: bool(running.engine.jobs))
        ended = []
        for number in range(8):
            await stream.submit(rollout_task(f"fast{number}", "q", ["echo"], answer_tags=TAGS))
        await stream.finish()
        async for event in stream:
            if isinstance(event, rollout_pb2.Trajectory):
                ended.append(event.trajectory_id)
                if len(ended) == 8:
                    assert "slow" not in ended
                    gate.touch()
        assert ended[-1] == "slow"


async def test_engine_failure_is_an_infra_error(folder: Path) -> None:
    async with rollouts(folder, script("<echo>x</echo>")) as running:
        running.engine.failure = InfraError("the engine failed: boom")
        _, trajectory = await running.one(rollout_task("t", "q", ["echo"]))
        assert (reason(trajectory), "boom" in trajectory.error) == ("INFRA_ERROR", True)


async def test_unknown_tool_fails_its_trajectory_alone(folder: Path) -> None:
    async with rollouts(folder, script("<answer>1</answer>")) as running:
        tasks = [rollout_task(name, "q", [name], answer_tags=TAGS) for name in ("echo", "ecko")]
        _, ended = await running.run(*tasks)
        assert reason(ended["echo"]) == "FINAL_ANSWER"
        assert reason(ended["ecko"]) == "INVALID_TASK"
        assert "did you mean 'echo'" in ended["ecko"].error


async def test_a_context_that_the_tool_refuses_is_an_invalid_task(folder: Path) -> None:
    async with rollouts(folder, script("<echo>x</echo>", "<answer>1</answer>")) as running:
        task = rollout_task("t", "q", {"echo": {"colour": "red"}}, answer_tags=TAGS)
        _, trajectory = await running.one(task)
        check_trajectory(trajectory)
        assert reason(trajectory) == "INVALID_TASK"
        assert "context of tool 'echo': unknown key 'colour'" in trajectory.error
        await no_sessions(running)


async def test_tool_service_killed_amid_a_turn_is_an_infra_error(folder: Path, tmp_path: Path) -> None:
    actions = ("<echo>x</echo>", f"<gate>{tmp_path / 'never'}</gate>")
    async with rollouts(folder, script(*actions)) as running, running.client.rollouts() as stream:
        await stream.submit(rollout_task("t", "q", ["gate", "echo"], answer_tags=TAGS))
        await eventually(lambda: len(running.engine.jobs) == 2)
        assert running.tools is not None
        await running.tools.stop(0)
        await stream.finish()
        (trajectory,) = [event async for event in stream if isinstance(event, rollout_pb2.Trajectory)]
        check_trajectory(trajectory)
        assert reason(trajectory) == "INFRA_ERROR"
        assert trajectory.error
        assert len(trajectory.segments[0].turns) == 1


async def test_cancelled_trajectory_comes_out_with_what_it_has(folder: Path, tmp_path: Path) -> None:
    actions = ("<echo>x</echo>", f"<gate>{tmp_path / 'never'}</gate>")
    async with rollouts(folder, script(*actions)) as running, running.client.rollouts() as stream:
        await stream.submit(rollout_task("t", "q", ["gate", "echo"], answer_tags=TAGS))
        await eventually(lambda: len(running.engine.jobs) == 2)
        await stream.cancel("t")
        await stream.cancel("nobody")
        await stream.finish()
        trajectory = [event async for event in stream][-1]
        assert isinstance(trajectory, rollout_pb2.Trajectory)
        check_trajectory(trajectory)
        assert (reason(trajectory), len(trajectory.segments[0].turns)) == ("CANCELLED", 1)
        await no_sessions(running)


async def test_trajectory_timeout_ends_it(folder: Path, tmp_path: Path) -> None:
    async with rollouts(folder, script(f"<gate>{tmp_path / 'never'}</gate>")) as running:
        limits = rollout_limits(trajectory_timeout=0.3)
        _, trajectory = await running.one(rollout_task("t", "q", ["gate"], limits=limits))
        assert (reason(trajectory), "0.3 s" in trajectory.error) == ("CANCELLED", True)
        await no_sessions(running)


async def test_tool_timeout_is_an_observation(folder: Path, tmp_path: Path) -> None:
    actions = (f"<gate>{tmp_path / 'never'}</gate>", "<answer>1</answer>")
    async with rollouts(folder, script(*actions)) as running:
        limits = rollout_limits(tool_timeout=0.2)
        turns, trajectory = await running.one(rollout_task("t", "q", ["gate"], limits=limits, answer_tags=TAGS))
        assert turns[0].turn.results[0].error == common_pb2.ERROR_KIND_TIMEOUT
        assert reason(trajectory) == "FINAL_ANSWER"


async def test_cancellation_may_be_asked_for_at_any_time_and_again() -> None:
    early = Cancellation()
    early.ask()
    assert await early.within(30.0, asyncio.Event().wait()) is None
    cancellation = Cancellation()
    work = asyncio.create_task(cancellation.within(30.0, asyncio.Event().wait()))
    await asyncio.sleep(0)
    cancellation.ask()
    await asyncio.sleep(0)  # it is ending now
    cancellation.ask()
    assert await work is None
    cancellation.ask()
    assert await Cancellation().within(30.0, asyncio.sleep(0, "done")) == "done"


@pytest.mark.parametrize("how", ["cancel", "deadline", "end of stream"])
async def test_cancellation_reaches_the_processes_in_the_sandbox_at_once(folder: Path, how: str) -> None:
    cell = "import subprocess, time; subprocess.Popen(['sleep', '97.6'], start_new_session=True); time.sleep(600)"
    limits = rollout_limits(trajectory_timeout=3.0 if how == "deadline" else ENDLESS)
    sections = {"plugins": {"exclude": ["sql"], "entry_points": False}, "sessions": {"lease_seconds": ENDLESS}}
    async with (
        tool_server(sandbox={"pool": {"ready": 1}}, **sections) as (_, address),
        rollouts(folder, script(f"<python>{cell}</python>"), tools=False, tool_target=address) as running,
        ToolClient(address) as tools,
    ):
        async with running.client.rollouts() as stream:
            await stream.submit(rollout_task("t", "q", ["python"], limits=limits))
            await eventually(lambda: bool(sleepers("97.6")))
            if how == "cancel":
                await stream.cancel("t")
            if how != "end of stream":
                assert reason(await anext(aiter(stream))) == "CANCELLED"
        await eventually(lambda: not sleepers("97.6"))
        await nothing_open(tools)
