"""Processes are killed at exact points of a run, and the run ends as if nothing had been.

Every run here has one seed, and is compared with one that nothing happened to: `whole`.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_files import ledger, same_run, steps
from service_processes import Death, ServiceForker, rollout_values, tool_values
from services import last_state, letters_run, notices, rollout_service
from waiting import PATIENCE

from trainer_service.runs import MOST_DEATHS
from turnwire.client.tools import ToolClient
from turnwire.client.trainer import TrainerClient
from turnwire.v1 import trainer_pb2

pytestmark = pytest.mark.needs("isolated-sandbox")

STEPS, EVALUATED = 4, 6
"""Steps of a run, and trajectories of each of its evaluations: before, after step 2, after step 4."""

JUDGED = "trainer_service.judging:Judge.score"
PROGRESS = "trainer_service.record:RunRecord.progress"
LEARN = "trainer_service.learner:Learner.learn"
BATCH = "trainer_service.record:RunRecord.batch"
SENT = "turnwire.client.rollout:RolloutClient.update_weights"
STEP = "trainer_service.record:RunRecord.step"
SAVED = "trainer_service.checkpoint:Checkpoints.save"

# Each process of a run but the last dies at a point of its own, in this order. Calls are counted anew in each process.
DEATHS = {
    "before the first checkpoint": (
        Death(PROGRESS, EVALUATED // 2),  # in the evaluation before training
        Death(JUDGED, EVALUATED + 3),  # in the first rollouts
        Death(LEARN, when="before"),
        Death(BATCH),  # between an update and its push
        Death(SENT, 2),  # the engine has the weights, and the trainer does not know
        Death(STEP, when="before"),  # between a push and the record of the step
    ),
    "in mid-save": (
        Death("trainer_service.policy:Policy.save", when="before"),  # an empty folder
        Death("torch:save", when="before"),  # a model without an optimizer
        Death("trainer_service.checkpoint:write_json", when="before"),  # both without a state
        Death("trainer_service.checkpoint:Path.rename", when="before"),  # all of it without a name
        Death("trainer_service.checkpoint:Path.rename"),
        Death("trainer_service.checkpoint:Checkpoints.latest"),  # soon after the resume
        Death(SENT),  # and soon after the next one
        Death("trainer_service.checkpoint:shutil.rmtree", when="before"),  # while an old one is removed
    ),
    "between checkpoints, and at the end": (
        Death(PROGRESS, EVALUATED + 3),  # in the evaluation after step 2
        Death("trainer_service.record:RunRecord.evaluation", 2),  # between it and its checkpoint
        Death(SAVED),
        Death(BATCH),  # between update 3 and its push
        Death(SAVED),  # the last one, before the summary
        Death("trainer_service.report:draw_curves", when="before"),  # after it
    ),
    "after every step": (Death(STEP, 1), Death(STEP, 2), Death(STEP, 3), Death(STEP, 2)),  # the last from step 2 on
}


def values(model: Path, max_staleness: int = 0, keep: int = 1) -> dict[str, Any]:
    return letters_run(
        model,
        training={"steps": STEPS, "prompts_per_step": 2},
        checkpoint={"every": 2, "keep": keep},
        evaluation={"every": 2, "tasks": EVALUATED // 3},
        optimizer={"learning_rate": 0.01, "warmup_steps": 2, "schedule": "linear"},
        algorithm={"policy_loss": "clip_cov", "mini_batches": 2},
        rollout={"limits": {"max_turns": 2, "max_action_tokens": 16}, "max_staleness": max_staleness},
        weights={"transport": "file"},  # a push that is cut off leaves its file behind
        metrics={"tensorboard": True, "trajectories_per_step": 100},
    )


class Trainer:
    """A trainer service on a folder of runs, process after process, and the events of its run."""

    def __init__(self, forker: ServiceForker, rollout: str, folder: Path, *, resume: bool = False) -> None:
        self.folder = folder / "run"
        self.events: list[trainer_pb2.WatchRunResponse] = []
        self._news = asyncio.Event()
        self._forker = forker
        self._config = {"rollout_target": rollout, "runs_folder": str(folder), "resume": resume}

    async def live(self, values: dict[str, Any] | None, death: Death | None = None) -> None:
        """Start or resume the run in a new process, and watch it to its end, or to the death of the process. Without
        `values` nobody starts it."""
        process = self._forker.start("trainer_service", self._config, death)
        try:
            watching = asyncio.create_task(self._watch(process.address, values))
            dying = asyncio.create_task(process.ended())
            await asyncio.wait({watching, dying}, return_when=asyncio.FIRST_COMPLETED)
            if death is None:
                await watching
                assert last_state(self.events) == ("FINISHED", "")
            else:
                assert dying.done(), f"the run went on without a death {death}: {last_state(self.events)}"
        finally:
            watching.cancel()
            dying.cancel()
            await asyncio.wait({watching, dying})
            process.kill()

    async def told(self, text: str) -> None:
        """Wait for a notice."""
        while not any(text in notice for notice in notices(self.events)):
            self._news.clear()
            await self._news.wait()

    async def _watch(self, address: str, values: dict[str, Any] | None) -> None:
        async with TrainerClient(address) as client:
            if values is not None:
                await client.start_run("run", yaml.safe_dump(values))
            async for event in client.watch_run("run", len(self.events) + 1):
                assert event.sequence == len(self.events) + 1
                self.events.append(event)
                self._news.set()


@pytest.fixture(scope="module")
def whole(forker: ServiceForker, rollout: str, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to."""
    trainer = Trainer(forker, rollout, tmp_path_factory.mktemp("whole"))
    asyncio.run(trainer.live(values(model_path)))
    assert len(steps(trainer.folder)) == STEPS
    return trainer.folder


@pytest.mark.parametrize("when", DEATHS)
async def test_a_killed_run_goes_on_exactly_where_it_was(
    when: str, forker: ServiceForker, rollout: str, whole: Path, model_path: Path, tmp_path: Path
) -> None:
    trainer = Trainer(forker, rollout, tmp_path)
    for death in DEATHS[when]:
        await trainer.live(values(model_path), death)
        closed = ledger(trainer.folder)
        assert closed == ledger(whole)[: len(closed)], f"after a death {death}"
    await trainer.live(values(model_path))
    same_run(whole, trainer.folder)


async def test_a_service_that_resumes_goes_on_by_itself_with_a_run_that_it_was_killed_with(
    forker: ServiceForker, rollout: str, whole: Path, model_path: Path, tmp_path: Path
) -> None:
    trainer = Trainer(forker, rollout, tmp_path, resume=True)
    await trainer.live(values(model_path), Death(STEP, 3))
    await trainer.live(None)
    same_run(whole, trainer.folder)
    assert "it goes on from its last checkpoint" in " ".join(notices(trainer.events))


async def test_it_leaves_a_run_alone_that_kills_it_again_and_again(
    forker: ServiceForker, rollout: str, model_path: Path, tmp_path: Path
) -> None:
    trainer = Trainer(forker, rollout, tmp_path, resume=True)
    await trainer.live(values(model_path), Death(BATCH))
    for _ in range(MOST_DEATHS):
        await trainer.live(None, Death(BATCH))
    with pytest.raises(AssertionError):  # it did not finish
        await trainer.live(None)
    state, reason = last_state(trainer.events)
    assert state == "FAILED"
    assert f"ended {MOST_DEATHS + 1} times after step 0" in reason


async def test_with_stale_trajectories_a_killed_run_trains_on_the_same_tasks_in_the_same_order(
    forker: ServiceForker, rollout: str, whole: Path, model_path: Path, tmp_path: Path
) -> None:
    """Losses differ: how old the weights are under which a token is sampled depends on how fast things go."""
    trainer = Trainer(forker, rollout, tmp_path)
    for death in (Death(BATCH), Death(STEP, 3), Death(BATCH, when="before"), None):
        await trainer.live(values(model_path, max_staleness=1), death)
    assert ledger(trainer.folder) == ledger(whole)
    assert [entry["step"] for entry in steps(trainer.folder)] == list(range(1, STEPS + 1))
    assert 0 < max(entry["staleness/max"] for entry in steps(trainer.folder)) <= 1


async def test_a_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(
    forker: ServiceForker, rollout: str, whole: Path, model_path: Path, tmp_path: Path
) -> None:
    trainer = Trainer(forker, rollout, tmp_path)
    await trainer.live(values(model_path, keep=2), Death(SAVED, 2))
    optimizer = trainer.folder / "checkpoints" / f"step-{STEPS:06d}" / "learner.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:1000])
    await trainer.live(values(model_path, keep=2))
    same_run(whole, trainer.folder)
    said = " ".join(notices(trainer.events))
    assert f"a checkpoint was damaged and is not used: {trainer.folder}/checkpoints/damaged-step-{STEPS:06d}" in said
    assert "resumed after step 2" in said


async def test_a_run_waits_out_a_tool_service_that_is_killed(
    forker: ServiceForker, whole: Path, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trajectory of the outage is trained on, with reward 0 or otherwise; none is lost."""
    # The rollout service itself waits a minute for its tools; so long the test does not.
    monkeypatch.setattr(ToolClient, "open", functools.partialmethod(ToolClient.open, patience=0.5))
    tools = forker.start("tool_service", tool_values(), Death("tool_service.session:run_action", 3, "before"))
    async with rollout_service(model_path, tools.address) as (rollout, _), asyncio.TaskGroup() as jobs:
        trainer = Trainer(forker, rollout, tmp_path)
        living = jobs.create_task(trainer.live(values(model_path)))
        await tools.ended()
        await trainer.told("infrastructure failed")
        assert not living.done()
        forker.start("tool_service", tool_values(tools.port))
    same_run(whole, trainer.folder)
    assert steps(trainer.folder)[-1]["rollouts/infra_failures"] > 0


async def test_a_run_waits_out_a_rollout_service_that_is_killed(
    forker: ServiceForker, whole: Path, model_path: Path, tmp_path: Path
) -> None:
    """What comes back gets the current weights, and everything that was in flight again."""
    generate = "rollout_service.engines.transformers_engine:TransformersEngine.generate"
    tools = forker.start("tool_service", tool_values()).address
    service = forker.start("rollout_service", rollout_values(model_path, tools), Death(generate, 30, "before"))
    trainer = Trainer(forker, service.address, tmp_path)
    async with asyncio.TaskGroup() as jobs:
        living = jobs.create_task(trainer.live(values(model_path)))
        await service.ended()
        assert not living.done()
        forker.start("rollout_service", rollout_values(model_path, tools, service.port))
    same_run(whole, trainer.folder)
    said = " ".join(notices(trainer.events))
    assert "waiting for the rollout service" in said
    assert "the engine holds version" in said


async def test_a_run_stops_while_its_rollout_service_is_away_and_goes_on_exactly_where_it_was(
    forker: ServiceForker, whole: Path, model_path: Path, tmp_path: Path
) -> None:
    """In the middle of a step, whose weights nobody can take."""
    tools = forker.start("tool_service", tool_values()).address
    taken = "rollout_service.engines.transformers_engine:TransformersEngine.apply_weights"
    service = forker.start("rollout_service", rollout_values(model_path, tools), Death(taken, 2, "before"))
    trainer = Trainer(forker, service.address, tmp_path)
    process = forker.start("trainer_service", {"rollout_target": service.address, "runs_folder": str(tmp_path)})
    async with TrainerClient(process.address) as client:
        await client.start_run("run", yaml.safe_dump(values(model_path)))
        async for event in client.watch_run("run"):
            trainer.events.append(event)
            if "weights cannot be sent" in " ".join(notices(trainer.events)):
                break
        stopped = await client.stop_run("run", timeout=PATIENCE)
        assert (stopped.state, stopped.step) == (trainer_pb2.RUN_STATE_STOPPED, 1)
    process.kill()
    forker.start("rollout_service", rollout_values(model_path, tools, service.port))
    await trainer.live(values(model_path))
    assert ledger(trainer.folder) == ledger(whole)
    losses = [[entry["loss"] for entry in steps(folder)] for folder in (whole, trainer.folder)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
