"""Conservation: each trajectory that a run asks for ends in exactly one state.

Invariant: at every moment `asked = trained + filtered + evaluated + failed + open`, and each key is closed once. A
breach is a bug and raises at once. The file has one line per closed key, written before the checkpoint that counts it;
resuming cuts it back to that checkpoint, and what was open then is asked for again. So the sums hold across a crash.
"""

from __future__ import annotations

import json
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainer_service.files import AppendFile


class State(StrEnum):
    """How a trajectory ended."""

    TRAINED = "trained"
    """It was in an update."""
    FILTERED = "filtered"
    """It was complete, and left out on purpose: the reason says why."""
    EVALUATED = "evaluated"
    """It was judged and not meant for training."""
    FAILED = "failed"
    """Infrastructure failed it more often than `rollout.retry` allows, or its reward could not be computed."""


class LedgerError(RuntimeError):
    """The books do not balance: a bug in the trainer."""


class Ledger:
    """The books of a run. `train_key` and `evaluation_key` name trajectories."""

    def __init__(self, file: AppendFile, counts: dict[str, int] | None = None) -> None:
        """Start empty, or from the counts of a checkpoint."""
        self._file = file
        self._counts = Counter({State(name): count for name, count in (counts or {}).items()})
        self._open: set[str] = set()

    def ask(self, key: str) -> None:
        """A trajectory is asked for."""
        if key in self._open:
            raise LedgerError(f"{key} was asked for twice")
        self._open.add(key)

    def close(self, key: str, state: State, step: int, reason: str = "") -> None:
        """It ended. `step` is the number of updates done when it was decided."""
        if key not in self._open:
            raise LedgerError(f"{key} ended as {state}, but it is not open")
        self._open.remove(key)
        self._counts[state] += 1
        self._file.write({"key": key, "state": state.value, "step": step, **({"reason": reason} if reason else {})})

    @property
    def open(self) -> int:
        """Asked for and not ended."""
        return len(self._open)

    def counts(self) -> dict[str, int]:
        """How many ended in each state."""
        return {state.value: self._counts[state] for state in State}


def train_key(draw: int, sample: int | str) -> str:
    """Of a trajectory for training."""
    return f"train/{draw}/{sample}"


def evaluation_key(step: int, task: int, sample: int) -> str:
    """Of a trajectory of the evaluation after `step`."""
    return f"eval/{step}/{task}/{sample}"


def audit(path: Path) -> dict[str, Any]:
    """Read a ledger file again: counts by state, reasons of failures, keys that ended twice (there must be none)."""
    counts: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            counts[entry["state"]] += 1
            seen[entry["key"]] += 1
            if entry["state"] == State.FAILED:
                failures[entry["reason"]] += 1
    twice = sorted(key for key, count in seen.items() if count > 1)
    return {"counts": dict(counts), "failures": dict(failures.most_common(20)), "twice": twice}
