"""Measures a policy on the demo's held-out tasks by sampling, with the tools executed in this process.

Deliberately apart from the services: it needs torch and transformers alone, so that building the tiny
policy needs no running system, and it is a second opinion on what the services report.
"""

from __future__ import annotations

import ast
import operator
import sqlite3
from dataclasses import dataclass
from typing import Any, Final

import bm25s
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from trainer_service.data.demo_tasks import DOMAINS, SEARCH_TOP_K, generate
from trainer_service.data.task import Task

CLOSING: Final = ("</python>", "</sql>", "</search>", "</answer>")
"""Where an assistant turn stops."""


# -- the tools, in-process


_OPERATORS: Final = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def calculate(expression: str) -> str:
    """Arithmetic only: what a model wrote is not handed to `eval`."""

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(f"not arithmetic: {expression!r}")

    return repr(value(ast.parse(expression, mode="eval")))


_READS: Final = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


def query(init_sql: str, statement: str) -> str:
    """The `sql` tool's observation: a header, then a line a row."""
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(init_sql)
        connection.set_authorizer(lambda action, *_: int(action not in _READS))  # SQLITE_OK is 0, _DENY 1
        cursor = connection.execute(statement)
        lines = [" | ".join(str(cell) for cell in row) for row in cursor.fetchall()]
        return "\n".join([" | ".join(column[0] for column in cursor.description), *(lines or ["(0 rows)"])])


def retrieve(documents: list[dict[str, str]], text: str) -> str:
    """The `search` tool's observation: the best hits by BM25, a line each."""
    texts = [f"{document['title']} {document['text']}" for document in documents]
    corpus = bm25s.tokenize(texts, stopwords=[], show_progress=False)
    index = bm25s.BM25()
    index.index(corpus, show_progress=False)
    tokens = bm25s.tokenize([text], stopwords=[], return_ids=False, show_progress=False)
    found, scores = index.retrieve(tokens, k=min(SEARCH_TOP_K, len(documents)), show_progress=False)
    hits = [documents[number] for number, score in zip(found[0], scores[0], strict=True) if score > 0]
    return "\n".join(f"[{rank}] {hit['title']}: {hit['text']}" for rank, hit in enumerate(hits, start=1))


def observe(task: Task, tool: str, text: str) -> str:
    """What the task's tool says to an action."""
    try:
        if tool == "python":
            return calculate(text)
        if tool not in task.tools:
            return f"unknown tool {tool}"
        if tool == "sql":
            return query(task.tools["sql"]["init_sql"], text)
        return retrieve(task.tools["search"]["documents"], text) or "(no hits)"
    except (ValueError, KeyError, SyntaxError, ArithmeticError, sqlite3.Error) as error:
        return f"{type(error).__name__}: {error}"[:80]


# -- evaluation


@dataclass
class Trajectory:
    """One sampled trajectory on its way."""

    task: Task
    ids: list[int]
    prompt_tokens: int
    calls: list[str]
    answer: str | None = None
    turns: int = 0
    done: bool = False


@torch.inference_mode()
def evaluate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    count: int,
    seed: int,
    force_tool: bool = False,
    max_turns: int = 4,
) -> dict[str, dict[str, float]]:
    """Samples at temperature 1 on `count` held-out tasks a domain, tools executed for real.

    `force_tool` writes the right tool's opening tag for the policy: its worth once it no longer guesses.
    """
    model.eval()
    torch.manual_seed(seed)
    running: list[Trajectory] = []
    for row in range(count * len(DOMAINS)):
        task = generate(DOMAINS[row % len(DOMAINS)], "heldout", row, seed)
        text = tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in task.messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        ids = tokenizer.encode(text)
        running.append(Trajectory(task, ids, len(ids), []))
    finished = list(running)
    while running:
        for start in range(0, len(running), 128):
            forced = force_tool and running[start].turns == 0
            _turn(model, tokenizer, running[start : start + 128], forced, max_turns)
        running = [t for t in running if not t.done]
    figures: dict[str, dict[str, float]] = {}
    for domain in DOMAINS:
        group = [t for t in finished if t.task.data_source == f"demo/{domain}"]
        figures[domain] = _summary(group)
    return figures


def _turn(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batch: list[Trajectory],
    forced: bool,
    max_turns: int,
) -> None:
    """One assistant turn of each trajectory, and the observation that answers it."""
    if forced:
        for t in batch:
            t.ids.append(tokenizer.convert_tokens_to_ids(f"<{t.task.extra['calls'][0][0]}>"))
    stops = [tokenizer.convert_tokens_to_ids(token) for token in (*CLOSING, "<|end|>")]
    inputs = tokenizer.pad({"input_ids": [t.ids for t in batch]}, return_tensors="pt", padding_side="left")
    output = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=64,
        eos_token_id=stops,
        pad_token_id=tokenizer.pad_token_id,
    )
    for t, new in zip(batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        begin = len(t.ids) - int(forced)
        length = next((at + 1 for at, token in enumerate(new) if token in stops), len(new))
        t.ids += new[:length]
        t.turns += 1
        action = tokenizer.decode(t.ids[begin:], skip_special_tokens=True)
        name, _, rest = action.removeprefix("<").partition(">")
        body, closed, _ = rest.partition(f"</{name}>")
        if not closed or name == "answer" or t.turns >= max_turns:
            t.done = True
            t.answer = body if closed and name == "answer" else None
            continue
        t.calls.append(name)
        observation = observe(t.task, name, body)
        t.ids += tokenizer.encode(f"<|end|><|tool|>{observation}<|end|><|assistant|>")


def _summary(group: list[Trajectory]) -> dict[str, float]:
    """Accuracy, overall and among those that began with the right tool; tokens a trajectory."""

    def mean(values: list[float]) -> float:
        return round(sum(values) / len(values), 4) if values else float("nan")

    def right(t: Trajectory) -> float:
        return float(t.answer == t.task.ground_truth)

    began = [t for t in group if t.calls and t.calls[0] == t.task.extra["calls"][0][0]]
    two = [t for t in group if t.task.extra["two_tools"]]
    return {
        "accuracy": mean([right(t) for t in group]),
        "tool_use": mean([float(bool(t.calls)) for t in group]),
        "tool_use_two_tools": mean([float(bool(t.calls)) for t in two]),
        "accuracy_with_tool": mean([right(t) for t in began]),
        "accuracy_with_tool_two_tools": mean([right(t) for t in began if t.task.extra["two_tools"]]),
        "prompt_tokens": mean([float(t.prompt_tokens) for t in group]),
        "tokens": mean([float(len(t.ids)) for t in group]),
        "longest": float(max(len(t.ids) for t in group)),
    }


def report(figures: dict[str, dict[str, float]]) -> None:
    """A table of the figures, a line a domain."""
    for domain, values in figures.items():
        print(f"  {domain:7}" + "  ".join(f"{key} {value:.3f}" for key, value in values.items()), flush=True)
