"""Checkpoints: everything that a killed run needs to go on exactly where it was.

A checkpoint is a folder `step-000010`: `model/` (an ordinary transformers checkpoint with its tokenizer, float32),
`learner.pt` (optimizer and random state), `state.json` (position in data, ledger, lengths of the run's files, results
so far).

Invariant: a folder with that name is whole. It is written under another name, forced to the disk, and renamed; a kill
at any point leaves the last whole one. The state after a step is a function of the run, so the same step is never
written twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainer_service.files import sync_folder, write_json
from turnwire.errors import InternalError

_NAME = re.compile(r"step-(\d{6,})")


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What `state.json` holds.

    step: updates done. next_draw, open_draws: position in the data. ledger: trajectories by state. files: lengths of
    the run's append-only files. evaluations: by step, accuracy per data source. seconds: wall time of the run, over all
    processes.
    """

    step: int
    next_draw: int
    open_draws: list[int]
    ledger: dict[str, int]
    files: dict[str, int]
    evaluations: dict[int, dict[str, float]]
    seconds: float


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".writing-*"):
            shutil.rmtree(leftover)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self._folder / f"step-{step:06d}"

    def save(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """Write one, unless it is there. `write` puts model and learner into a folder. Prunes old ones."""
        final = self.path(state.step)
        if not final.exists():
            temporary = self._folder / f".writing-{final.name}"
            temporary.mkdir()
            write(temporary)
            write_json(temporary / "state.json", msgspec.to_builtins(state, str_keys=True))
            _sync_tree(temporary)
            temporary.rename(final)
            sync_folder(self._folder)
        for old in self._steps()[: -self._keep]:
            shutil.rmtree(self.path(old))
        return final

    def latest(self) -> tuple[Path, RunState] | None:
        """The newest whole checkpoint."""
        steps = self._steps()
        if not steps:
            return None
        path = self.path(steps[-1])
        try:
            return path, msgspec.convert(json.loads((path / "state.json").read_text()), RunState, strict=False)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            raise InternalError(
                f"the checkpoint {path} cannot be read: {error}; remove it to use the one before"
            ) from error

    def _steps(self) -> list[int]:
        matches = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)
