"""Calculations and their demonstrations are honest: disjoint splits, right answers, calls that the tool takes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from trainer_harness import attempt, run_config
from transformers import AutoTokenizer

from examples.smollm2 import prepare
from rollout_service.chat import Chat
from tool_service.config import ToolServiceConfig
from tool_service.server import ToolServer
from trainer_service.data.calculations import DOMAINS, KINDS, SPLITS, generate
from trainer_service.data.task import Task
from trainer_service.rewards.registry import Judges
from turnwire.client import ToolClient, text_of

ROOT = Path(__file__).resolve().parents[2]
EVERY_KIND = [(domain, kind) for domain in DOMAINS for kind in KINDS[domain]]


def tasks(domain: str, split: str, count: int = 300, seed: int = 0) -> list[Task]:
    return [generate(domain, split, index, seed) for index in range(count)]


def asked(task: Task) -> str:
    return task.messages[-1].content


@pytest.fixture(scope="module")
def chat() -> Chat:
    """Of the tiny policy: whoever writes demonstrations needs a chat template, not weights."""
    return Chat(AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny_policy" / "model"))


@pytest.mark.parametrize("domain", DOMAINS)
def test_train_and_heldout_share_no_question(domain: str) -> None:
    train, heldout = ({asked(task) for seed in range(3) for task in tasks(domain, s, seed=seed)} for s in SPLITS)
    assert len(train) > 890
    assert not train & heldout


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("split", SPLITS)
def test_a_task_depends_on_its_arguments_alone(domain: str, split: str) -> None:
    assert tasks(domain, split, 20) == tasks(domain, split, 20)
    assert tasks(domain, split, 20, seed=0) != tasks(domain, split, 20, seed=1)
    assert len({task.task_id for task in tasks(domain, split)}) == 300


def test_a_task_is_the_same_in_another_process() -> None:
    program = (
        "import msgspec; from trainer_service.data.calculations import DOMAINS, generate;"
        "print(msgspec.json.encode([generate(d, 'train', 7, 3) for d in DOMAINS]).decode())"
    )
    # Another hash seed: nothing may hang on the order of a set or on hash().
    command = [sys.executable, "-c", program]
    environment = {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    there = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == msgspec.json.encode([generate(d, "train", 7, 3) for d in DOMAINS]).decode()


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_kind_is_asked_and_a_choice_of_kinds_is_kept(domain: str) -> None:
    assert {task.extra["kind"] for task in tasks(domain, "heldout")} == set(KINDS[domain])
    (first, *_) = KINDS[domain]
    assert {generate(domain, "train", index, 0, [first]).extra["kind"] for index in range(50)} == {first}


@pytest.mark.parametrize(("domain", "kind"), EVERY_KIND)
def test_the_answer_is_a_large_whole_number_that_the_question_does_not_tell(domain: str, kind: str) -> None:
    for split in SPLITS:
        for task in (generate(domain, split, index, 0, [kind]) for index in range(100)):
            assert isinstance(task.ground_truth, int)
            assert task.ground_truth > 50
            given = re.findall(r"\d+", asked(task))
            assert str(task.ground_truth) not in given
            assert set(re.findall(r"\d+", task.extra["expression"])) <= set(given)


@pytest.mark.parametrize(
    ("kind", "question", "solved"),
    [
        ("formula", "Calculate 239 x 86 + 227 x 43.", 239 * 86 + 227 * 43),
        ("steps", "Add 239 and 987, then multiply by 26.", (239 + 987) * 26),
        ("packs", "Victor buys 68 crates of 39 bottles and gives away 181.", 68 * 39 - 181),
        ("two_goods", "A shop sells 58 bags at 28 dollars and 33 clocks at 36 dollars.", 58 * 28 + 33 * 36),
        ("savings", "Victor has 736 dollars and saves 124 dollars each month.", 736 + 52 * 124),
        ("wages", "Victor earns 35 dollars an hour and works 9 hours a day.", 59 * 9 * 35),
        ("change", "Victor has 3570 dollars and buys 44 bags for 62 dollars each.", 3570 - 44 * 62),
        ("journey", "A bus goes 74 km an hour for 36 hours, then 97 km an hour for 23 hours.", 36 * 74 + 23 * 97),
        ("compared", "Victor has 852 bottles, and Leo has 19 times as many.", 852 + 19 * 852),
        ("seats", "A stadium has 98 rows of 75 seats. 463 seats are taken.", 98 * 75 - 463),
        ("shared", "Victor has 1782 eggs and Leo has 4058. They share them among 20 children.", 5840 // 20),
        ("factory", "A factory makes 363 bottles a day for 35 days. 841 are broken, the", (363 * 35 - 841) * 22),
    ],
)
def test_of_each_kind_one_task_solved_by_hand(kind: str, question: str, solved: int) -> None:
    (domain,) = (domain for domain, known in EVERY_KIND if known == kind)
    task = generate(domain, "train", 0, 0, [kind])
    assert asked(task).startswith(question)
    assert task.ground_truth == solved


def test_names_that_there_are_not_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"domain 'chess'.*arithmetic, word_problems"):
        generate("chess", "train", 0, 0)
    with pytest.raises(ValueError, match=r"split 'test'.*heldout, train"):
        generate("arithmetic", "test", 0, 0)
    with pytest.raises(ValueError, match=r"kind 'saving'.*'savings'"):
        generate("word_problems", "train", 0, 0, ["saving"])


def test_a_demonstration_is_a_rollout_in_which_only_the_policys_own_tokens_are_learned(chat: Chat) -> None:
    task = generate("word_problems", "train", 0, 0, ["packs"])
    ids, labels = prepare.encode(chat, task, prepare.demonstration(task, with_tool=True))
    learned = [number for number in labels if number != -100]
    call, answer = f"<python>{task.extra['expression']}</python>", f"<answer>{task.ground_truth}</answer>"
    assert chat.decode(chat.text(call + answer)) == "".join(chat.decode(chat.text(part)) for part in (call, answer))
    assert learned == [*chat.text(call).tolist(), *chat.text(answer).tolist()]
    assert all(label in (-100, number) for label, number in zip(labels, ids, strict=True))


def test_the_warm_up_mostly_answers_at_once_and_shows_half_of_the_word_problems(chat: Chat) -> None:
    written = chat.text("<python>")[0]
    for step in range(3):
        _, labels = prepare.batch_of(chat, prepare.WarmUp(batch=20), step)
        assert int((labels == written).any(1).sum()) == 6
    assert set(prepare.SHOWN["word_problems"]) < set(KINDS["word_problems"])
    assert len(prepare.SHOWN["word_problems"]) * 2 == len(KINDS["word_problems"])


@pytest.mark.needs("isolated-sandbox")
async def test_the_python_tool_takes_every_demonstrated_call_and_says_what_was_demonstrated() -> None:
    reward = Judges(run_config(reward={"name": "numeric"}).reward).of("calculations/arithmetic")
    async with (
        ToolServer(ToolServiceConfig()) as target,
        ToolClient(target) as client,
        await client.open("demonstrations", {"python": {}}) as session,
    ):
        for domain, kind in EVERY_KIND:
            for index in range(5):
                task = generate(domain, "train", index, 0, [kind])
                (action, observation), (answer, _) = prepare.demonstration(task, with_tool=True)
                (observed,) = (await session.act(action)).observations
                assert text_of(observed) == observation
                said = answer.removeprefix("<answer>").removesuffix("</answer>")
                assert reward.score(task, attempt(said)) == 1.0
                assert reward.score(task, attempt(said[1:])) == 0.0
