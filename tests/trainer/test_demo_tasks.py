"""The demo's tasks are honest (disjoint splits, right answers, nothing to memorise) and the policy reads them."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import bm25s
import msgspec
import pytest
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer_service.data.demo_tasks import DOMAINS, SEARCH_TOP_K, SPLITS, generate, split_of
from trainer_service.data.task import Task

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny_policy" / "model"


def tasks(domain: str, split: str, count: int = 300, seed: int = 0) -> list[Task]:
    return [generate(domain, split, index, seed) for index in range(count)]


def content(task: Task) -> str:
    return json.dumps([task.messages[0].content, task.tools], sort_keys=True)


def run_reference(task: Task) -> str:
    """The last observation of the task's reference calls, each really executed."""
    observation = ""
    for tool, text in task.extra["calls"]:
        context = task.tools[tool]
        if tool == "python":
            observation = repr(eval(text))  # the generator's own arithmetic, not a model's
        elif tool == "sql":
            with sqlite3.connect(":memory:") as connection:
                connection.executescript(context["init_sql"])
                ((value,),) = connection.execute(text).fetchall()
            observation = str(value)
        else:
            observation = best_hit(context["documents"], text).removesuffix(".").split(" is ")[1]
    return observation


def best_hit(documents: list[dict[str, str]], text: str) -> str:
    index = bm25s.BM25()
    corpus = [f"{document['title']} {document['text']}" for document in documents]
    index.index(bm25s.tokenize(corpus, stopwords=[], show_progress=False), show_progress=False)
    words = bm25s.tokenize([text], stopwords=[], return_ids=False, show_progress=False)
    found, scores = index.retrieve(words, k=2, show_progress=False)
    assert scores[0][0] > scores[0][1] + 0.1, "the best hit is not the best by a margin"
    return documents[found[0][0]]["text"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("domain", DOMAINS)
def test_train_and_heldout_share_no_instance(domain: str) -> None:
    train, heldout = ({content(t) for seed in range(3) for t in tasks(domain, s, seed=seed)} for s in SPLITS)
    assert not train & heldout
    for split in SPLITS:
        for task in tasks(domain, split, 50):
            assert split_of(task.messages[0].content, task.tools) == split


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("split", SPLITS)
def test_generation_depends_on_its_arguments_alone(domain: str, split: str) -> None:
    assert tasks(domain, split, 20) == tasks(domain, split, 20)
    assert tasks(domain, split, 20, seed=0) != tasks(domain, split, 20, seed=1)
    assert len({task.task_id for task in tasks(domain, split)}) == 300


def test_generation_is_the_same_in_another_process() -> None:
    program = (
        "import msgspec; from trainer_service.data.demo_tasks import DOMAINS, generate;"
        "print(msgspec.json.encode([generate(d, 'train', 7, 3) for d in DOMAINS]).decode())"
    )
    # Another hash seed: nothing may hang on the order of a set or on hash().
    there = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == msgspec.json.encode([generate(d, "train", 7, 3) for d in DOMAINS]).decode()


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("split", SPLITS)
def test_ground_truth_is_what_the_tools_say(domain: str, split: str) -> None:
    for task in tasks(domain, split, 150):
        assert run_reference(task) == task.ground_truth, task


@pytest.mark.parametrize("domain", ["sql", "search"])
def test_the_same_question_has_many_answers(domain: str) -> None:
    """The prompt does not give the answer away, and neither does any earlier task."""
    for task in tasks(domain, "train"):
        assert task.ground_truth not in task.messages[0].content
    most_common = Counter(task.ground_truth for task in tasks(domain, "train", 1000)).most_common(1)[0][1]
    assert most_common <= 10


@pytest.mark.parametrize(("domain", "expected"), [("python", 0), ("sql", 0.3), ("search", 0.3)])
def test_share_of_two_tool_tasks(domain: str, expected: float) -> None:
    share = sum(task.extra["two_tools"] for task in tasks(domain, "train", 1000)) / 1000
    assert share == pytest.approx(expected, abs=0.05)


def test_every_task_offers_the_tools_its_solution_needs() -> None:
    for domain in DOMAINS:
        for task in tasks(domain, "heldout"):
            assert "python" in task.tools
            assert {tool for tool, _ in task.extra["calls"]} <= task.tools.keys()
            assert task.extra["two_tools"] == (len(task.extra["calls"]) == 2)
    assert SEARCH_TOP_K == 1


def test_unknown_domain_and_split_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown demo domain 'chess': choose from python, sql, search"):
        generate("chess", "train", 0, 0)
    with pytest.raises(ValueError, match="unknown split 'test': choose from train, heldout"):
        generate("sql", "test", 0, 0)


@pytest.mark.parametrize("domain", DOMAINS)
def test_tokenizer_reads_every_task_exactly(domain: str, tokenizer: PreTrainedTokenizerFast) -> None:
    for task in tasks(domain, "heldout", 100):
        calls = [f"<{tool}>{text}</{tool}>" for tool, text in task.extra["calls"]]
        answer = f"<answer>{task.ground_truth}</answer>"
        for text in [task.messages[0].content, *calls, content(task), answer]:
            ids = tokenizer.encode(text)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_is_exact_a_character(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "".join(chr(code) for code in range(32, 127)) + "\n  two spaces .,?!'s n't"
    assert len(tokenizer.encode(text)) == len(text)
    for cut in range(len(text)):
        assert tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:]) == tokenizer.encode(text)
    assert tokenizer.encode("é→") == [tokenizer.unk_token_id] * 2


def test_chat_template_renders_turn_by_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "user", "content": "Compute 17*23."},
        {"role": "assistant", "content": "<python>17*23</python>"},
        {"role": "tool", "content": "391"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|user|>Compute 17*23.<|end|><|assistant|><python>17*23</python><|end|><|tool|>391<|end|><|assistant|>"
    )
    assert len(tokenizer.encode("<|user|><python></python><|end|>")) == 4
    for end in range(len(messages)):
        assert rendered.startswith(tokenizer.apply_chat_template(messages[: end + 1], tokenize=False))


def test_policy_has_at_most_three_million_weights() -> None:
    with safe_open(MODEL / "model.safetensors", framework="numpy") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - not a dict
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}  # noqa: SIM118
    total = 0
    for shape in shapes:
        size = 1
        for dimension in shape:
            size *= dimension
        total += size
    assert 1_000_000 < total <= 3_000_000
