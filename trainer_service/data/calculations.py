"""Calculations for a language model with a `python` tool: multi-step arithmetic, and word problems.

Invariants (tests/trainer/test_calculations.py holds them):

- `generate` is a pure function of its arguments: the same task in every process, after every resume.
- Train and held-out share no prompt: its hash alone decides which split may hold it (`demo_tasks.split_of`).
- The numbers are too large for a small model's head, and the answer is nowhere in the prompt.

`extra` holds `kind` (what is asked, by name), and `expression`: the calculation in Python, of which `ground_truth` is
the value. The expression is what a demonstration computes; the policy is not shown it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, Literal

from trainer_service.data.demo_tasks import SPLITS, split_of
from trainer_service.data.task import Message, Task
from turnwire.config import nearest

Domain = Literal["arithmetic", "word_problems"]
DOMAINS: Final[tuple[Domain, ...]] = ("arithmetic", "word_problems")
SYSTEM_PROMPT: Final = "Calculate with <python>code</python>, or answer with <answer>number</answer>."

_NAMES: Final = (
    *("Ada", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "James", "Kate", "Leo", "Maria"),
    *("Nina", "Omar", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Yusuf"),
)
_THINGS: Final = (
    *("pencils", "marbles", "stamps", "cards", "apples", "oranges", "buttons", "candles", "cookies", "shells"),
    *("stickers", "bottles", "tiles", "nails", "toys", "eggs"),
)
_GOODS: Final = ("shirts", "books", "lamps", "chairs", "cups", "bags", "hats", "clocks", "plants", "games")

_Drawn = tuple[str, str]
"""Prompt, expression."""


def generate(domain: str, split: str, index: int, seed: int, kinds: Sequence[str] = ()) -> Task:
    """The task number `index` of a domain's split under a seed. kinds: only these; none: all of the domain.

    Raises ValueError as `check`.
    """
    check(domain, split, kinds)
    rng = random.Random(f"{domain}/{split}/{index}/{seed}")
    while True:
        kind = rng.choice(kinds or tuple(KINDS[domain]))
        prompt, spaced = KINDS[domain][kind](rng)
        if split_of(prompt, {}) == split:
            break
    expression = spaced.replace(" ", "")
    return Task(
        task_id=f"calculations-{domain}-{split}-{seed}-{index}",
        messages=(Message("system", SYSTEM_PROMPT), Message("user", prompt)),
        data_source=f"calculations/{domain}",
        ground_truth=eval(expression, {"__builtins__": {}}),  # noqa: S307 - made right here, of numbers alone
        tools={"python": {}},
        extra={"kind": kind, "expression": expression},
    )


def check(domain: str, split: str, kinds: Sequence[str] = ()) -> None:
    """Raises ValueError for a name that there is not."""
    if domain not in KINDS:
        raise ValueError(f"domain {domain!r}: {nearest(domain, DOMAINS)}")
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: {nearest(split, SPLITS)}")
    for name in kinds:
        if name not in KINDS[domain]:
            raise ValueError(f"kind {name!r}: {nearest(name, list(KINDS[domain]))}")


# -- arithmetic


def _formula(rng: random.Random) -> _Drawn:
    """Two to four operations, written as a formula."""
    a, b, c, d, e = (rng.randint(112, 989) for _ in range(5))
    k, m = rng.randint(12, 98), rng.randint(12, 98)
    expression = rng.choice(
        (
            f"{a} * {k} + {b}",
            f"{a} * {k} - {b}",
            f"({a} + {b}) * {k}",
            f"{a} * {b} - {c}",
            f"{a} * {k} + {b} * {m}",
            f"({a} + {b}) * {k} - {c}",
            f"{a} * {k} - {b} + {c}",
            f"({a} + {b}) * ({c} + {k})",
            f"{a} * {k} + {b} * {m} - {c}",
            f"({a} + {b} + {c}) * {k} - {d}",
            f"{a} * {k} + {b} + {c} - {e}",
        )
    )
    shown = expression.replace("*", rng.choice(("*", "x", "times")))
    return rng.choice(("What is {}?", "Compute {}.", "Calculate {}.", "{} = ?")).format(shown), expression


def _steps(rng: random.Random) -> _Drawn:
    """Two to four operations, told step by step."""
    a, k, b, c = rng.randint(112, 989), rng.randint(12, 98), rng.randint(112, 989), rng.randint(112, 989)
    expression, told = rng.choice(
        (
            (f"{a} * {k} + {b}", f"Multiply {a} by {k}, then add {b}."),
            (f"{a} * {k} - {b}", f"Multiply {a} by {k}, then subtract {b}."),
            (f"({a} + {b}) * {k}", f"Add {a} and {b}, then multiply by {k}."),
            (f"({a} + {b}) * {k} - {c}", f"Add {a} and {b}, multiply by {k}, then subtract {c}."),
            (f"{a} * {k} + {b} - {c}", f"Multiply {a} by {k}, add {b}, then subtract {c}."),
            (f"({a} + {b} + {c}) * {k}", f"Add {a}, {b} and {c}, then multiply by {k}."),
        )
    )
    return told, expression


# -- word problems


def _packs(rng: random.Random) -> _Drawn:
    name, things, pack = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(("boxes", "packs", "bags", "crates"))
    a, b = rng.randint(23, 98), rng.randint(24, 96)
    c = rng.randint(101, 499)
    told = rng.choice(
        (
            f"{name} buys {a} {pack} of {b} {things} and gives away {c}. How many {things} are left?",
            f"There are {b} {things} in each of {a} {pack}. {name} takes {c} {things}. How many remain?",
        )
    )
    return told, f"{a} * {b} - {c}"


def _two_goods(rng: random.Random) -> _Drawn:
    name, (first, second) = rng.choice(_NAMES), rng.sample(_GOODS, 2)
    a, p, b, q = (rng.randint(13, 89) for _ in range(4))
    told = rng.choice(
        (
            f"{name} buys {a} {first} for {p} dollars each and {b} {second} for {q} dollars each. "
            "How many dollars is that?",
            f"A shop sells {a} {first} at {p} dollars and {b} {second} at {q} dollars. How many dollars does it take?",
        )
    )
    return told, f"{a} * {p} + {b} * {q}"


def _savings(rng: random.Random) -> _Drawn:
    name, period = rng.choice(_NAMES), rng.choice(("week", "month", "day"))
    a, b, c = rng.randint(234, 987), rng.randint(34, 189), rng.randint(13, 58)
    told = rng.choice(
        (
            f"{name} has {a} dollars and saves {b} dollars each {period}. How many dollars after {c} {period}s?",
            f"{name} saves {b} dollars a {period} for {c} {period}s. There were {a} dollars before. How many now?",
        )
    )
    return told, f"{a} + {b} * {c}"


def _wages(rng: random.Random) -> _Drawn:
    name = rng.choice(_NAMES)
    a, b, c = rng.randint(13, 48), rng.randint(6, 11), rng.randint(14, 89)
    told = rng.choice(
        (
            f"{name} earns {a} dollars an hour and works {b} hours a day. How many dollars in {c} days?",
            f"For {c} days {name} works {b} hours a day at {a} dollars an hour. How many dollars is that?",
        )
    )
    return told, f"{a} * {b} * {c}"


def _change(rng: random.Random) -> _Drawn:
    name, goods = rng.choice(_NAMES), rng.choice(_GOODS)
    a, p = rng.randint(13, 59), rng.randint(17, 89)
    money = a * p + rng.randint(102, 989)
    told = rng.choice(
        (
            f"{name} has {money} dollars and buys {a} {goods} for {p} dollars each. How many dollars are left?",
            f"Out of {money} dollars, {name} pays for {a} {goods} at {p} dollars each. How many dollars remain?",
        )
    )
    return told, f"{money} - {a} * {p}"


def _journey(rng: random.Random) -> _Drawn:
    what = rng.choice(("train", "truck", "bus", "ship"))
    a, h, b, k = rng.randint(43, 98), rng.randint(12, 39), rng.randint(43, 98), rng.randint(12, 39)
    told = rng.choice(
        (
            f"A {what} goes {a} km an hour for {h} hours, then {b} km an hour for {k} hours. How many km in all?",
            f"A {what} travels {h} hours at {a} km an hour and {k} hours at {b} km an hour. How many km is that?",
        )
    )
    return told, f"{a} * {h} + {b} * {k}"


def _compared(rng: random.Random) -> _Drawn:
    (one, other, third), things = rng.sample(_NAMES, 3), rng.choice(_THINGS)
    a, b, c = rng.randint(112, 879), rng.randint(12, 48), rng.randint(112, 879)
    if rng.random() < 0.5:
        told = f"{one} has {a} {things}. {other} has {b} times as many. {third} has {c} more than {other}. "
        return told + f"How many does {third} have?", f"{a} * {b} + {c}"
    told = f"{one} has {a} {things}, and {other} has {b} times as many. How many do they have together?"
    return told, f"{a} + {a} * {b}"


def _seats(rng: random.Random) -> _Drawn:
    place = rng.choice(("hall", "theatre", "stadium", "cinema"))
    a, b = rng.randint(23, 98), rng.randint(24, 96)
    c = rng.randint(101, 499)
    told = rng.choice(
        (
            f"A {place} has {a} rows of {b} seats. {c} seats are taken. How many are free?",
            f"{c} people sit in a {place} with {a} rows of {b} seats. How many seats are empty?",
        )
    )
    return told, f"{a} * {b} - {c}"


def _shared(rng: random.Random) -> _Drawn:
    (one, other), things = rng.sample(_NAMES, 2), rng.choice(_THINGS)
    each, c = rng.randint(112, 489), rng.randint(13, 48)
    a = rng.randint(each * c // 4, each * c // 2)
    b = each * c - a
    told = rng.choice(
        (
            f"{one} has {a} {things} and {other} has {b}. They share them among {c} children. How many does each get?",
            f"{a} {things} of {one} and {b} of {other} are put equally into {c} boxes. How many are in a box?",
        )
    )
    return told, f"({a} + {b}) // {c}"


def _factory(rng: random.Random) -> _Drawn:
    things = rng.choice(_THINGS)
    a, b, c, d = rng.randint(112, 389), rng.randint(13, 58), rng.randint(101, 989), rng.randint(3, 28)
    told = rng.choice(
        (
            f"A factory makes {a} {things} a day for {b} days. {c} are broken, the others are sold "
            f"for {d} dollars each. How many dollars is that?",
            f"In {b} days a factory makes {a} {things} a day. It keeps {c} and sells the rest at {d} dollars each. "
            "How many dollars does it get?",
        )
    )
    return told, f"({a} * {b} - {c}) * {d}"


KINDS: Final[dict[str, dict[str, Callable[[random.Random], _Drawn]]]] = {
    "arithmetic": {"formula": _formula, "steps": _steps},
    "word_problems": {
        "packs": _packs,
        "two_goods": _two_goods,
        "savings": _savings,
        "wages": _wages,
        "change": _change,
        "journey": _journey,
        "compared": _compared,
        "seats": _seats,
        "shared": _shared,
        "factory": _factory,
    },
}
"""By domain, what can be asked."""
