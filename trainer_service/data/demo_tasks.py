"""The demo's tasks: arithmetic, questions over a database, questions over a few documents.

Invariants (tests/trainer/test_demo_tasks.py holds them):

- `generate` is a pure function of its arguments: the same task in every process, after every resume.
- Train and held-out share no instance. An instance's content (prompt and tool contexts) is hashed with
  blake2b, and the hash alone decides which split may hold it; a draw on the wrong side is thrown away and
  drawn again.
- No answer can be memorised. The database and the documents are drawn anew for each task, so the same
  question has another answer in another task; only a call of the tool can know it.

Names are made up, short and without meaning, numbers have two or three digits, and prompts are terse: the
policy that learns on these is a character model of under two million weights, and its time is proportional
to tokens.

About three in ten of the `sql` and `search` tasks need two tools in one trajectory: look a number up, then
compute with it. Every task offers `python`; `sql` and `search` are offered where the task has a database or
documents for them.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any, Final, Literal

from trainer_service.data.task import Message, Task

Domain = Literal["python", "sql", "search"]
Split = Literal["train", "heldout"]
DOMAINS: Final[tuple[Domain, ...]] = ("python", "sql", "search")
SPLITS: Final[tuple[Split, ...]] = ("train", "heldout")

TWO_TOOL_SHARE: Final = 0.3
"""Share of the `sql` and `search` tasks that need `python` as well."""
HELDOUT_SHARE: Final = 0.2
"""Share of the space of instances that only the held-out split may draw."""
SEARCH_TOP_K: Final = 1
"""Hits the demo's `search` tool returns: one keeps observations short, and makes the query matter."""

_TABLES: Final[tuple[tuple[str, str, tuple[str, str]], ...]] = (
    ("items", "name", ("price", "stock")),
    ("staff", "name", ("age", "salary")),
    ("towns", "town", ("area", "homes")),
    ("ships", "ship", ("crew", "tons")),
    ("books", "title", ("pages", "price")),
    ("farms", "owner", ("area", "cows")),
    ("teams", "team", ("goals", "wins")),
    ("hills", "hill", ("height", "trees")),
)
"""Table, key column, number columns."""

_AGGREGATES: Final = {"total": "sum", "highest": "max", "lowest": "min"}
_NAME_FACTS: Final = ("capital", "ruler", "river", "founder", "port")
_NUMBER_FACTS: Final = ("height", "area", "age", "depth")
_OPERATIONS: Final = {"times": "*", "plus": "+", "minus": "-"}
_CONSONANTS: Final = "bdfgklmnprstvz"
_VOWELS: Final = "aiou"


def generate(domain: str, split: str, index: int, seed: int) -> Task:
    """The task number `index` of a domain's split under a seed; ValueError for an unknown domain or split.

    `extra` holds `two_tools`, `kind` and `calls`: the reference solution as a list of `[tool, text]`, from
    which the tiny policy's demonstrations are made. `ground_truth` is the text between the `<answer>` tags.
    """
    if domain not in _DRAW:
        raise ValueError(f"unknown demo domain {domain!r}: choose from {', '.join(DOMAINS)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose from {', '.join(SPLITS)}")
    rng = random.Random(_digest(f"{domain}/{split}/{index}/{seed}"))
    while True:
        prompt, answer, context, extra = _DRAW[domain](rng)
        tools: dict[str, dict[str, Any]] = {"python": {}, **context}
        if split_of(prompt, tools) == split:
            break
    return Task(
        task_id=f"demo-{domain}-{split}-{seed}-{index}",
        messages=(Message("user", prompt),),
        data_source=f"demo/{domain}",
        ground_truth=answer,
        tools=tools,
        extra=extra,
    )


def split_of(prompt: str, tools: dict[str, dict[str, Any]]) -> Split:
    """The only split that may hold an instance with this content."""
    fraction = _digest(json.dumps([prompt, tools], sort_keys=True)) / 2**64
    return "heldout" if fraction < HELDOUT_SHARE else "train"


def random_name(rng: random.Random) -> str:
    """A made-up name of two syllables, one of 3136: too many to guess, short enough to copy."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(2)).capitalize()


def _digest(text: str) -> int:
    """A stable 64-bit hash; Python's own differs between processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


_Drawn = tuple[str, str, dict[str, dict[str, Any]], dict[str, Any]]
"""Prompt, answer, tool contexts beyond `python`, extra."""


def _names(rng: random.Random, count: int) -> list[str]:
    """That many different names."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[random_name(rng)] = None
    return list(found)


def _extra(kind: str, calls: list[list[str]]) -> dict[str, Any]:
    return {"kind": kind, "two_tools": len(calls) > 1, "calls": calls}


def _then_compute(rng: random.Random, value: int) -> tuple[str, str, str]:
    """A second step on a looked-up number: how the prompt says it, the expression, its result."""
    word = rng.choice(list(_OPERATIONS))
    operand = rng.randint(12, 99)
    expression = f"{value}{_OPERATIONS[word]}{operand}"
    result = {"times": value * operand, "plus": value + operand, "minus": value - operand}[word]
    return f"{word} {operand}", expression, str(result)


def _draw_python(rng: random.Random) -> _Drawn:
    """Arithmetic whose result has four digits or more, nearly always."""
    a, b, c = rng.randint(101, 999), rng.randint(12, 99), rng.randint(101, 999)
    expression, result = rng.choice(
        [
            (f"{a}*{b}", a * b),
            (f"{a}*{c}", a * c),
            (f"{a}*{b}+{c}", a * b + c),
            (f"{a}*{b}-{c}", a * b - c),
            (f"({a}+{c})*{b}", (a + c) * b),
        ]
    )
    return f"Compute {expression}.", str(result), {}, _extra("arithmetic", [["python", expression]])


def _draw_sql(rng: random.Random) -> _Drawn:
    table, key, columns = rng.choice(_TABLES)
    names = _names(rng, rng.randint(4, 7))
    cells = [(rng.randint(101, 999), rng.randint(101, 999)) for _ in names]
    values = ",".join(f"('{name}',{first},{second})" for name, (first, second) in zip(names, cells, strict=True))
    context = {
        "sql": {
            "init_sql": f"create table {table}({key} text,{columns[0]} int,{columns[1]} int);"
            f"insert into {table} values{values};"
        }
    }
    heading = f"{table}({key},{','.join(columns)}): "
    picked = rng.randrange(2)
    column = columns[picked]
    row = rng.randrange(len(names))
    name, value = names[row], cells[row][picked]
    lookup = f"select {column} from {table} where {key}='{name}'"  # noqa: S608 - names are our own
    if rng.random() < TWO_TOOL_SHARE:
        said, expression, result = _then_compute(rng, value)
        prompt = f"{heading}{column} of {name}, {said}?"
        return prompt, result, context, _extra("compute", [["sql", lookup], ["python", expression]])
    if rng.random() < 0.35:
        word = rng.choice(list(_AGGREGATES))
        numbers = [pair[picked] for pair in cells]
        answer = {"total": sum(numbers), "highest": max(numbers), "lowest": min(numbers)}[word]
        query = f"select {_AGGREGATES[word]}({column}) from {table}"  # noqa: S608
        return f"{heading}{word} {column}?", str(answer), context, _extra("aggregate", [["sql", query]])
    return f"{heading}{column} of {name}?", str(value), context, _extra("lookup", [["sql", lookup]])


def _draw_search(rng: random.Random) -> _Drawn:
    """Three places with three facts each.

    Every word of a sentence but the fact's value stands in other documents too: a query must name both the
    place and the fact.
    """
    places = _names(rng, 3)
    facts = [*rng.sample(_NAME_FACTS, 2), *rng.sample(_NUMBER_FACTS, 1)]
    known: dict[tuple[str, str], str] = {}
    taken = set(places)
    for place in places:
        for fact in facts:
            value = str(rng.randint(101, 999))
            if fact in _NAME_FACTS:
                value = next(name for name in iter(lambda: random_name(rng), "") if name not in taken)
                taken.add(value)
            known[place, fact] = value
    order = list(known)
    rng.shuffle(order)
    documents = [
        {"id": f"d{number}", "title": place, "text": f"The {fact} of {place} is {known[place, fact]}."}
        for number, (place, fact) in enumerate(order, start=1)
    ]
    context = {"search": {"documents": documents}}
    place = rng.choice(places)
    if rng.random() < TWO_TOOL_SHARE:
        fact = facts[2]
        said, expression, result = _then_compute(rng, int(known[place, fact]))
        calls = [["search", f"{fact} of {place}"], ["python", expression]]
        return f"What is the {fact} of {place}, {said}?", result, context, _extra("compute", calls)
    fact = rng.choice(facts)
    prompt = f"What is the {fact} of {place}?"
    return prompt, known[place, fact], context, _extra("lookup", [["search", f"{fact} of {place}"]])


_DRAW: Final = {"python": _draw_python, "sql": _draw_sql, "search": _draw_search}
