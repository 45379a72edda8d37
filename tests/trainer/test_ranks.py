"""Several processes under torchrun train as one does, and are one service to those who use it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from learning_ranks import case_config, learn, resume
from run_files import ledger, steps
from services import last_state, letters_run, notices, rollout_service, tool_service

from trainer_service.ranks import Ranks, join
from turnwire.client.trainer import TrainerClient
from turnwire.errors import ConfigError, TurnwireError
from turnwire.v1 import trainer_pb2

pytestmark = pytest.mark.timeout(300)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

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
def on_two_ranks(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case, written by two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(CASES))
    script = Path(__file__).with_name("learning_ranks.py")
    command = [*TORCHRUN, str(script), str(model_path), str(folder / "cases.json"), str(folder)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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


# -- the service

BROKEN = "the ranks of the trainer service no longer work together"


class RankedTrainer:
    """A trainer service of two ranks on a folder of runs. `events`: of the last run that was watched."""

    def __init__(self, process: asyncio.subprocess.Process, client: TrainerClient) -> None:
        self.process, self._client = process, client
        self.events: list[trainer_pb2.WatchRunResponse] = []

    async def run(self, run_id: str, values: dict[str, Any], *, until_step: int = 0) -> None:
        """Start or resume a run, and watch it to its end, or to a step of this process."""
        await self._client.start_run(run_id, yaml.safe_dump(values))
        await self.watch(run_id, until_step=until_step)

    async def watch(self, run_id: str, *, until_step: int = 0) -> None:
        async for event in self._client.watch_run(run_id, len(self.events) + 1):
            self.events.append(event)
            if until_step and event.WhichOneof("event") == "step" and event.step.step == until_step:
                return

    def send(self, number: signal.Signals, *, rank: int) -> None:
        """A signal to one of the ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = (pid for pid in children if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(int(pid), number)


@contextlib.asynccontextmanager
async def ranked_trainer(rollout: str, folder: Path, log: Path) -> AsyncIterator[RankedTrainer]:
    """`torchrun --nproc-per-node 2 -m trainer_service`, until SIGTERM to torchrun."""
    config = folder.parent / "trainer.yaml"
    values = {"rollout_target": rollout, "runs_folder": str(folder), "rank_timeout_seconds": 15}
    config.write_text(yaml.safe_dump(values))
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(*TORCHRUN, "-m", "trainer_service", "--config", str(config)),
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**ENVIRONMENT, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"},
        )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("listening on "), line
        async with TrainerClient(line.split()[-1]) as client:
            yield RankedTrainer(process, client)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.mark.needs("isolated-sandbox")
async def test_a_run_on_two_ranks_is_stopped_killed_and_resumed_as_on_one(model_path: Path, tmp_path: Path) -> None:
    values = letters_run(
        model_path,
        training={"steps": 6, "prompts_per_step": 2},
        checkpoint={"every": 2},
        evaluation={"before": False, "after": False},
        rollout={"limits": {"max_turns": 2, "max_action_tokens": 16}},
    )
    folder = tmp_path / "runs"
    async with tool_service() as tools, rollout_service(model_path, tools) as (rollout, _):
        async with ranked_trainer(rollout, folder, tmp_path / "first.log") as trainer:
            await trainer.run("run", values, until_step=1)
            trainer.process.terminate()
            await trainer.watch("run")
            assert last_state(trainer.events)[0] == "STOPPED"
        stopped = len(steps(folder / "run"))
        assert (folder / "run" / "checkpoints" / f"step-{stopped:06d}").is_dir()

        async with ranked_trainer(rollout, folder, tmp_path / "second.log") as trainer:
            await trainer.run("run", values, until_step=stopped + 1)
            trainer.send(signal.SIGKILL, rank=1)
            with contextlib.suppress(TurnwireError):  # the service may be gone before the last event is out
                await trainer.watch("run")
            assert await trainer.process.wait() != 0
        assert f"resumed after step {stopped}" in " ".join(notices(trainer.events))
        assert BROKEN in (tmp_path / "second.log").read_text()

        async with ranked_trainer(rollout, folder, tmp_path / "third.log") as trainer:
            weightless = shutil.copytree(model_path, tmp_path / "model", ignore=lambda *_: ["model.safetensors"])
            await trainer.run("weightless", letters_run(weightless))
            assert "cannot load" in last_state(trainer.events)[1]
            trainer.events = []
            await trainer.run("run", values)
            assert last_state(trainer.events) == ("FINISHED", "")
            assert "resumed after step" in " ".join(notices(trainer.events))

            trainer.send(signal.SIGSTOP, rank=1)
            trainer.events = []
            with contextlib.suppress(TurnwireError):
                await trainer.run("hanging", values)
            trainer.send(signal.SIGCONT, rank=1)  # or torchrun gives it half a minute to end
            assert await trainer.process.wait() != 0
        assert BROKEN in (tmp_path / "third.log").read_text()
    assert [entry["step"] for entry in steps(folder / "run")] == list(range(1, 7))
    assert len(ledger(folder / "run")) == 6 * 2 * 4


def test_a_world_that_torchrun_did_not_make_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is 4 without LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start several processes"):
        join(1)
