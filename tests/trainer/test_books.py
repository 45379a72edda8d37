"""Small parts that a run's honesty rests on: ledger, files, events, checkpoints, selection of what is trained on."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_harness import judged, run_config, sequences, task
from waiting import PATIENCE

from trainer_service.accuracy import Failures
from trainer_service.checkpoint import Checkpoints, RunState
from trainer_service.events import EventLog
from trainer_service.experience import select, spread
from trainer_service.files import AppendFile, write_json
from trainer_service.groups import Failed, Group, Judged
from trainer_service.ledger import Ledger, LedgerError, State, audit
from trainer_service.record import RunRecord
from trainer_service.report import before_and_after, draw_curves
from turnwire.errors import InternalError, InvalidRequestError

# -- ledger


def test_every_trajectory_ends_in_exactly_one_state(tmp_path: Path) -> None:
    ledger = Ledger(AppendFile(tmp_path / "ledger.jsonl"))
    for key in "abc":
        ledger.ask(key)
    ledger.close("a", State.TRAINED, 1)
    ledger.close("b", State.FAILED, 1, "reward x: broken")
    assert ledger.open == 1
    assert ledger.counts() == {"trained": 1, "filtered": 0, "evaluated": 0, "failed": 1}
    with pytest.raises(LedgerError, match="a ended as trained, but it is not open"):
        ledger.close("a", State.TRAINED, 2)
    with pytest.raises(LedgerError, match="c was asked for twice"):
        ledger.ask("c")
    assert audit(tmp_path / "ledger.jsonl") == {
        "counts": {"trained": 1, "failed": 1},
        "failures": {"reward x: broken": 1},
        "twice": [],
    }


def test_the_books_balance_across_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    file = AppendFile(path)
    ledger = Ledger(file)
    ledger.ask("a")
    ledger.close("a", State.TRAINED, 1)
    position, counts = file.sync(), ledger.counts()
    ledger.ask("b")
    ledger.close("b", State.TRAINED, 2)  # after the checkpoint: it is asked for again
    again = Ledger(AppendFile(path, position), counts)
    again.ask("b")
    again.close("b", State.FILTERED, 2, "why")
    assert again.counts() == {"trained": 1, "filtered": 1, "evaluated": 0, "failed": 0}
    assert audit(path)["counts"] == {"trained": 1, "filtered": 1}


# -- files and checkpoints


def test_a_file_that_is_shorter_than_its_checkpoint_says_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with pytest.raises(ValueError, match="is shorter"):
        AppendFile(tmp_path / "a", 10)


def state(step: int) -> RunState:
    return RunState(step=step, ledger={}, files={}, evaluations={0: {"a": 0.5}}, seconds=1.0)


def write(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("weights")


def damage(checkpoint: Path, how: str) -> None:
    """What a power cut or a bad disk may leave of a checkpoint."""
    state_file, weights = checkpoint / "state.json", checkpoint / "model" / "weights"
    match how:
        case "state cut short":
            state_file.write_bytes(state_file.read_bytes()[:20])
        case "state zeroed":
            state_file.write_bytes(bytes(state_file.stat().st_size))
        case "state missing":
            state_file.unlink()
        case "weights cut short":
            weights.write_text("wei")
        case "weights flipped":
            weights.write_text("weighty")
        case "weights missing":
            weights.unlink()
        case "empty":
            shutil.rmtree(checkpoint)
            checkpoint.mkdir()


DAMAGES = (
    *("state cut short", "state zeroed", "state missing"),
    *("weights cut short", "weights flipped", "weights missing", "empty"),
)


def test_the_last_whole_checkpoint_is_found_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (1, 2, 3):
        checkpoints.save(state(step), write)
    found = checkpoints.latest()
    assert found is not None
    assert found == (tmp_path / "step-000003", state(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_checkpoint_that_was_cut_off_is_not_seen_and_is_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(state(1), write)

    def killed(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(2), killed)
    again = Checkpoints(tmp_path, keep=2)
    found = again.latest()
    assert found is not None
    assert found[1].step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before_it(tmp_path: Path, how: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(state(step), write)
    damage(tmp_path / "step-000002", how)
    assert checkpoints.latest() == (tmp_path / "step-000001", state(1))
    assert [path.name.rpartition("-")[0] for path in checkpoints.set_aside] == ["damaged-step-000002"]
    checkpoints.save(state(2), write)  # the step is done again, and its checkpoint is a whole one
    assert Checkpoints(tmp_path, keep=2).latest() == (tmp_path / "step-000002", state(2))
    damage(tmp_path / "step-000001", how)
    damage(tmp_path / "step-000002", how)
    assert checkpoints.latest() is None


def test_files_that_were_added_to_a_checkpoint_do_not_damage_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.save(state(1), write) / "model" / "notes.txt").write_text("good one")
    assert checkpoints.latest() == (tmp_path / "step-000001", state(1))


def test_a_checkpoint_of_another_version_is_refused_and_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = checkpoints.save(state(1), write)
    write_json(path / "state.json", {"state": {"step": 1}, "checksums": {}})
    with pytest.raises(InternalError, match=f"another version of the trainer wrote the checkpoint {path}"):
        checkpoints.latest()
    assert path.exists()


def test_a_json_file_is_replaced_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    write_json(tmp_path / "a.json", {"x": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# -- events


@pytest.mark.parametrize("rubbish", [b'{"sequence": "3", "not', bytes(30), b"\0\n{}\n", b'{"sequence": "x"}\n'])
async def test_events_are_numbered_on_across_processes_and_what_a_crash_left_is_dropped(
    tmp_path: Path, rubbish: bytes
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.notify("one")
    log.notify("two")
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(rubbish)
    again = EventLog(tmp_path / "events.jsonl")
    again.notify("three")
    assert [(event.sequence, event.notice.text) async for event in again.watch(2)] == [(2, "two"), (3, "three")]


async def test_a_watcher_sees_new_events_until_the_run_ends(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.set_live(True)
    watching = asyncio.create_task(collect(log))
    for number in range(5):
        log.notify(str(number))
        await asyncio.sleep(0)
    log.set_live(False)
    assert await asyncio.wait_for(watching, PATIENCE) == [str(number) for number in range(5)]


async def collect(log: EventLog) -> list[str]:
    return [event.notice.text async for event in log.watch(0)]


# -- selection


def group(draw: int, *rewards: float | None, **values: Any) -> Group:
    """A group; None is a failed trajectory."""
    rows = sequences(len(rewards), seed=draw)
    members: list[Judged | Failed] = []
    for number, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        key = f"{draw}/{number}"
        members.append(Failed(key, task(), "infrastructure") if reward is None else judged(row, reward, key, **values))
    return Group(draw, task(), tuple(members))


def test_failed_trajectories_are_not_selected() -> None:
    selection = select(run_config().algorithm, [group(0, 1.0, None, 0.0)])
    assert selection.experience is not None
    assert selection.experience.rewards == [1.0, 0.0]
    assert [row.key for row in selection.rows] == ["0/0", "0/2"]


def test_a_trajectory_without_company_is_filtered_with_the_reason() -> None:
    selection = select(run_config().algorithm, [group(0, None, 1.0), group(1, 1.0, 0.0)])
    assert [(member.key, reason) for member, reason in selection.filtered] == [
        ("0/1", "its group has no other trajectory to compare with")
    ]


def test_groups_without_variance_are_filtered_where_the_config_says_so() -> None:
    groups = [group(0, 1.0, 1.0), group(1, 1.0, 0.0)]
    assert len(select(run_config().algorithm, groups).rows) == 4
    selection = select(run_config(algorithm__filter_zero_variance=True).algorithm, groups)
    assert {reason for _, reason in selection.filtered} == {"all rewards of the group are equal"}
    assert select(run_config(algorithm__filter_zero_variance=True).algorithm, groups[:1]).experience is None


def test_remax_compares_with_the_groups_greedy_trajectory() -> None:
    config = run_config(algorithm__advantage_estimator="remax").algorithm
    bare = group(0, 1.0, 0.0)
    greedy = Group(1, task(), group(1, 1.0, 0.0).members, judged(sequences(1)[0], 0.7))
    selection = select(config, [bare, greedy])
    assert selection.experience is not None
    assert selection.experience.greedy_rewards == [0.7, 0.7]
    assert {reason for _, reason in selection.filtered} == {"its group has no greedy trajectory to compare with"}


def test_gdpo_needs_the_parts_that_it_is_told_of() -> None:
    config = run_config(algorithm={"advantage_estimator": "gdpo", "reward_parts": ["right"]}).algorithm
    selection = select(config, [group(0, 1.0, 0.0, parts={"right": 0.25})])
    assert selection.experience is not None
    assert selection.experience.reward_parts["right"].tolist() == [0.25, 0.25]
    with pytest.raises(InvalidRequestError, match="reward_parts names 'right', but the reward of test has: none"):
        select(config, [group(0, 1.0, 0.0)])


def test_kept_trajectories_are_spread_over_the_groups() -> None:
    chosen = spread([group(0, 1.0, 0.0), group(1, None, 1.0), group(2, 0.0, 0.0)], 4)
    assert [member.key for member in chosen] == ["0/0", "1/1", "2/0", "0/1"]


# -- report


def test_before_is_the_evaluation_of_step_0_and_after_the_last_one() -> None:
    assert before_and_after({}) == {}
    assert before_and_after({0: {"a": 0.2}, 2: {"a": 0.4}, 5: {"a": 0.9}}) == {"a": {"before": 0.2, "after": 0.9}}
    assert before_and_after({2: {"a": 0.4}, 5: {"a": 0.9}}) == {"a": {"before": None, "after": 0.9}}
    assert before_and_after({0: {"a": 0.2}}) == {"a": {"before": 0.2, "after": None}}
    lacking = {0: {"a": 0.2}, 5: {"a": 0.9, "b": 0.5}}  # every trajectory of b failed before training
    assert before_and_after(lacking) == {"a": {"before": 0.2, "after": 0.9}, "b": {"before": None, "after": 0.5}}


def test_seconds_are_wall_time_over_all_processes(tmp_path: Path) -> None:
    earlier = msgspec.structs.replace(state(1), seconds=100.0, files=defaultdict(int))
    events = EventLog(tmp_path / "events.jsonl")
    record = RunRecord(tmp_path, run_config().metrics, earlier, events)
    time.sleep(0.05)
    assert 100.05 <= record.seconds < 110
    record.close()


async def test_what_a_checkpoint_counts_is_in_tensorboard_however_the_process_ends(tmp_path: Path) -> None:
    record = RunRecord(
        tmp_path, run_config(metrics__tensorboard=True).metrics, None, EventLog(tmp_path / "events.jsonl")
    )
    record.step(1, {"time/step_seconds": 1.0, "loss": 0.5})
    record.positions()
    seen = EventAccumulator(str(tmp_path / "tensorboard")).Reload()  # before anything is closed
    assert [event.step for event in seen.Scalars("loss")] == [1]
    record.close()


def test_json_files_never_hold_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"accuracy": float("nan")})
    assert not (tmp_path / "x.json").exists()


def test_curves_are_drawn_with_and_without_steps_and_evaluations(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("")
    draw_curves(metrics, {}, {}, "empty", tmp_path / "empty.png")
    entries = [
        {"kind": "step", "step": n, "reward/a/b": n / 5, "reward/mean": 0, "tool_use/a/b": 0.5} for n in range(5)
    ]
    metrics.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    evaluations = {0: {"a/b": 0.2, "c": None}, 5: {"a/b": 0.9, "c": 0.5}}
    lost = {0: {"c": Failures(trajectories=3, tasks=3, reason="away")}}
    draw_curves(metrics, evaluations, lost, "full", tmp_path / "full.png")
    assert (tmp_path / "full.png").stat().st_size > 10_000
