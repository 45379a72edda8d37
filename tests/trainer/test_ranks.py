"""Several processes under torchrun learn what one process learns, and are one service to those who use it."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from learning_ranks import case_config, learn, resume
from run_files import ledger, steps
from service_processes import Death, ServiceForker, ServiceProcess
from services import last_state, letters_run, notices

from trainer_service.ranks import Ranks, join
from turnwire.client.trainer import TrainerClient
from turnwire.errors import ConfigError
from turnwire.v1 import trainer_pb2

pytestmark = pytest.mark.timeout(900)

CORRECTION = {"importance_sampling": "token", "rejection": "seq_mean_k3", "rejection_threshold": 100.0}
CASES: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "seq-mean-token-sum-norm and the penalty in the loss": {
        "algorithm": {"loss_aggregation": "seq-mean-token-sum-norm", "kl": {"coefficient": 0.1}}
    },
    "seq-mean-token-mean, an entropy bonus and the penalty in the reward": {
        "algorithm": {
            "loss_aggregation": "seq-mean-token-mean",
            "entropy_coefficient": 0.01,
            "kl": {"coefficient": 0.1, "placement": "reward"},
        }
    },
    "geo_mean over several updates of recomputed logprobs, corrected": {
        "algorithm": {
            "policy_loss": "geo_mean",
            "mini_batches": 2,
            "epochs": 2,
            "old_logprobs": "recompute",
            "rollout_correction": CORRECTION,
        }
    },
    "gspo with an estimator that looks at tokens": {
        "algorithm": {"policy_loss": "gspo", "advantage_estimator": "optimal_token_baseline"}
    },
    "one micro-batch, and gradient checkpointing": {
        "model": {"gradient_checkpointing": True},
        "training__tokens_per_micro_batch": 8192,
    },
    "bfloat16": {"model": {"dtype": "bfloat16"}},
}


@pytest.fixture(scope="module")
def on_two_ranks(forker: ServiceForker, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case, written by two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    forker.start("learning_ranks", {"model": str(model_path), "cases": CASES, "output": str(folder)}, ranks=2)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_process_learns(
    case: str, on_two_ranks: Path, model_path: Path, tmp_path: Path
) -> None:
    learn(case_config(model_path, CASES[case]), tmp_path)
    one, two = (torch.load(folder / "outcome.pt", weights_only=False) for folder in (tmp_path, on_two_ranks / case))
    close = {"rtol": 1e-2, "atol": 1e-2} if case == "bfloat16" else {"rtol": 1e-4, "atol": 2e-5}
    for name in ("first", "weights"):
        torch.testing.assert_close(two[name], one[name], **close)
    torch.testing.assert_close(two["resumed"], one["resumed"], **close)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_go_on_from_their_checkpoint_exactly(case: str, on_two_ranks: Path) -> None:
    outcome = torch.load(on_two_ranks / case / "outcome.pt", weights_only=False)
    assert outcome["resumed"]["metrics"]["loss"] == outcome["loss"]
    torch.testing.assert_close(outcome["resumed"]["weights"], outcome["weights"], rtol=0, atol=0)


def test_one_process_goes_on_from_a_checkpoint_of_two_ranks(on_two_ranks: Path, model_path: Path) -> None:
    case = "token-mean"
    resumed = resume(case_config(model_path, CASES[case]), on_two_ranks / case)
    expected = torch.load(on_two_ranks / case / "outcome.pt", weights_only=False)["resumed"]
    torch.testing.assert_close(resumed, expected, rtol=1e-4, atol=2e-5)


def test_a_checkpoint_of_two_ranks_has_the_files_and_the_entries_of_one_process(
    on_two_ranks: Path, model_path: Path, tmp_path: Path
) -> None:
    learn(case_config(model_path, {}), tmp_path)
    one, two = tmp_path, on_two_ranks / "token-mean"
    for path in (one / "model").iterdir():
        other = two / "model" / path.name
        assert other.stat().st_size == path.stat().st_size
        if path.suffix == ".json":
            assert other.read_bytes() == path.read_bytes()
    left, right = (torch.load(folder / "learner.pt", weights_only=True) for folder in (one, two))
    torch.testing.assert_close(right["optimizer"], left["optimizer"], rtol=1e-4, atol=2e-5)
    assert right.keys() == left.keys()


@pytest.mark.parametrize(("pieces", "size"), [(1, 2), (4, 2), (5, 3), (2, 8)])
def test_every_piece_counts_once_and_all_ranks_have_equally_many(pieces: int, size: int) -> None:
    dealt = [Ranks(rank, size).deal(range(pieces)) for rank in range(size)]
    assert sorted(piece for share in dealt for piece, counts in share if counts) == list(range(pieces))
    assert len({len(share) for share in dealt}) == 1


def test_a_world_that_torchrun_did_not_make_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is 4 without LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start several processes"):
        join(1)


# -- the service

PATIENCE = 600
BROKEN = "the ranks of the trainer service no longer work together"


def values(model: Path, steps: int) -> dict[str, Any]:
    """A run of two groups of four a step, with a checkpoint after each second step."""
    return letters_run(
        model,
        training={"steps": steps, "prompts_per_step": 2},
        checkpoint={"every": 2},
        evaluation={"before": False, "after": False},
        rollout={"limits": {"max_turns": 1, "max_action_tokens": 8}},
    )


class RankedTrainer:
    """`torchrun --nproc-per-node 2 --max-restarts 9 -m trainer_service`, and the events of the run that is watched."""

    def __init__(
        self, forker: ServiceForker, rollout: str, folder: Path, death: Death | None = None, **settings: Any
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]  # the service is found again at it
        self.config = {"server": {"port": port}, "rollout_target": rollout, "runs_folder": str(folder), **settings}
        self.process: ServiceProcess = forker.start("trainer_service", self.config, death, ranks=2)
        self.events: list[trainer_pb2.WatchRunResponse] = []

    def configure(self, **settings: Any) -> None:
        """For when it starts once more."""
        self.process.config.write_text(yaml.safe_dump({**self.config, **settings}))

    async def start(self, run: dict[str, Any]) -> None:
        """Start `run`, or go on with it."""
        async with TrainerClient(self.process.address) as client:
            await client.wait_until_ready(timeout=PATIENCE)
            await client.start_run("run", yaml.safe_dump(run))

    async def stop(self) -> None:
        async with TrainerClient(self.process.address) as client:
            await client.stop_run("run")

    async def watch(self, *, until_step: int = 0) -> None:
        """Watch it from where that was left to its end, or to the end of a step, however often the service ends."""
        async with TrainerClient(self.process.address) as client:
            async for event in client.watch_run("run", len(self.events) + 1, patience=PATIENCE):
                self.events.append(event)
                if until_step and event.WhichOneof("event") == "step" and event.step.step == until_step:
                    return

    def states(self) -> list[str]:
        """Of the run, in order."""
        seen = [event.state.state for event in self.events if event.WhichOneof("event") == "state"]
        return [trainer_pb2.RunState.Name(state).removeprefix("RUN_STATE_") for state in seen]


@pytest.mark.needs("isolated-sandbox")
@pytest.mark.parametrize(("rank", "told"), [(1, f"{BROKEN} (at `learn`"), (0, "the trainer service ended while")])
async def test_a_run_goes_on_by_itself_where_a_rank_dies_and_who_watches_it_sees_it_go_on(
    rank: int, told: str, forker: ServiceForker, rollout: str, model_path: Path, tmp_path: Path
) -> None:
    death = Death("trainer_service.learner:Learner.learn", 3, "before", rank)
    trainer = RankedTrainer(forker, rollout, tmp_path, death, resume=True)
    await trainer.start(values(model_path, steps=4))
    await trainer.watch()
    assert trainer.states() == ["STARTING", "RUNNING", "STARTING", "RUNNING", "FINISHED"]
    said = " ".join(notices(trainer.events))
    assert told in said
    assert "goes on from its last checkpoint" in said
    assert "resumed after step 2" in said
    assert [entry["step"] for entry in steps(tmp_path / "run")] == [1, 2, 3, 4]
    assert len(ledger(tmp_path / "run")) == 4 * 2 * 4


@pytest.mark.needs("isolated-sandbox")
@pytest.mark.parametrize("resume", [False, True])
async def test_where_nobody_resumes_a_run_or_someone_stopped_it_it_fails_with_its_ranks_until_it_is_started_again(
    resume: bool, forker: ServiceForker, rollout: str, model_path: Path, tmp_path: Path
) -> None:
    """Here a rank hangs, for longer than it may."""
    trainer = RankedTrainer(forker, rollout, tmp_path, resume=resume, rank_timeout_seconds=5)
    trainer.configure(rank_timeout_seconds=600)  # for all starts but this one: the machine may be slow
    first, second = (trainer.process.rank(number) for number in range(2))
    second.send(signal.SIGSTOP)
    await trainer.start(values(model_path, steps=1))
    async with asyncio.TaskGroup() as jobs:
        if resume:
            jobs.create_task(trainer.stop())
        jobs.create_task(trainer.watch())
    second.send(signal.SIGCONT)  # or torchrun waits for it
    state, reason = last_state(trainer.events)
    assert state == "FAILED"
    assert reason.startswith(BROKEN)
    assert "start the run again to go on" in reason

    await first.ended()
    await trainer.start(values(model_path, steps=1))
    await trainer.watch()
    assert trainer.states() == ["STARTING", "RUNNING", "FAILED", "STARTING", "RUNNING", "FINISHED"]


@pytest.mark.needs("isolated-sandbox")
async def test_a_model_that_cannot_be_loaded_fails_the_run_and_not_the_service(
    forker: ServiceForker, rollout: str, model_path: Path, tmp_path: Path
) -> None:
    weightless = shutil.copytree(model_path, tmp_path / "model", ignore=lambda *_: ["model.safetensors"])
    trainer = RankedTrainer(forker, rollout, tmp_path / "runs")
    await trainer.start(values(weightless, steps=1))
    await trainer.watch()
    state, reason = last_state(trainer.events)
    assert state == "FAILED"
    assert "cannot load" in reason
    shutil.copy(model_path / "model.safetensors", weightless)
    await trainer.start(values(weightless, steps=1))
    await trainer.watch()
    assert last_state(trainer.events) == ("FINISHED", "")


@pytest.mark.needs("isolated-sandbox")
async def test_a_run_that_ends_with_the_service_has_a_checkpoint_and_one_process_goes_on_from_it(
    forker: ServiceForker, rollout: str, model_path: Path, tmp_path: Path
) -> None:
    trainer = RankedTrainer(forker, rollout, tmp_path, resume=True)
    await trainer.start(values(model_path, steps=1000))
    await trainer.watch(until_step=1)
    trainer.process.send(signal.SIGTERM)
    await trainer.watch()
    assert last_state(trainer.events)[0] == "STOPPED"
    await trainer.process.ended()
    done = len(steps(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:06d}").is_dir()

    trainer.process = forker.start("trainer_service", {**trainer.config, "server": {}})
    await trainer.watch(until_step=done + 1)
    trainer.process.kill()
    assert f"resumed after step {done}" in " ".join(notices(trainer.events))
    assert [entry["step"] for entry in steps(tmp_path / "run")][: done + 1] == [*range(1, done + 2)]
