"""Checkpoints: everything that a killed run needs to go on exactly where it was.

A checkpoint is a folder `step-000010`: `model/` (an ordinary transformers checkpoint with its tokenizer, float32),
`learner.pt` (optimizer and random state), `state.json` (ledger, lengths of the run's files, results so far, and the
checksums of all other files). The place in the data follows from the step.

Invariant: a folder with that name is whole. It is written under another name, forced to the disk, and renamed; it is
renamed again before it is removed. So a kill at any point leaves the last whole one. What a disk makes of it later is
found by the checksums: then the folder is set aside as `damaged-step-000010-…`, and the one before it is used. The
state after a step is a function of the run, so the same step is never written twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainer_service.accuracy import Failures
from trainer_service.files import sync_folder, write_json
from turnwire.errors import InternalError

_NAME = re.compile(r"step-(\d{6,})")
_STATE = "state.json"
_UNFINISHED = ".unfinished-"
"""Begins the name of a folder that is being written or removed."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What `state.json` holds.

    step: updates done. ledger: trajectories by state. files: lengths of the run's append-only files. evaluations,
    evaluation_failures: by step, accuracy per data source, and what failed of it. seconds: wall time of the run, over
    all processes.
    """

    step: int
    ledger: dict[str, int]
    files: dict[str, int]
    evaluations: dict[int, dict[str, float | None]]
    evaluation_failures: dict[int, dict[str, Failures]] = {}
    seconds: float


class _StateFile(msgspec.Struct, frozen=True, kw_only=True):
    """`state.json`. checksums: CRC-32 of every other file of the checkpoint, by its path in it."""

    state: RunState
    checksums: dict[str, int]


class Checkpoints:
    """The checkpoints of one run. `set_aside` has the damaged ones that `latest` met, by their new names."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self.set_aside: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        for leftover in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self._folder / f"step-{step:06d}"

    def save(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """Write one, unless it is there. `write` puts model and learner into a folder. Prunes old ones."""
        final = self.path(state.step)
        if not final.exists():
            temporary = self._unfinished(final)
            temporary.mkdir()
            write(temporary)
            files = (path for path in sorted(temporary.rglob("*")) if path.is_file())
            checksums = {path.relative_to(temporary).as_posix(): _checksum(path) for path in files}
            file = _StateFile(state=state, checksums=checksums)
            write_json(temporary / _STATE, msgspec.to_builtins(file, str_keys=True))
            _sync_tree(temporary)
            temporary.rename(final)
            sync_folder(self._folder)
        for old in self._steps()[: -self._keep]:
            shutil.rmtree(self.path(old).rename(self._unfinished(self.path(old))))
        return final

    def latest(self) -> tuple[Path, RunState] | None:
        """The newest whole checkpoint. It reads every byte of it, which takes its time."""
        for step in reversed(self._steps()):
            path = self.path(step)
            if (state := _read(path)) is not None:
                return path, state
            self.set_aside.append(path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}")))
            sync_folder(self._folder)
        return None

    def _unfinished(self, path: Path) -> Path:
        return path.with_name(f"{_UNFINISHED}{path.name}")

    def _steps(self) -> list[int]:
        matches = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)


def _read(path: Path) -> RunState | None:
    """The state of a checkpoint, None if it is damaged. Raises InternalError if another version wrote it."""
    try:
        values = json.loads((path / _STATE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    try:
        file = msgspec.convert(values, _StateFile, strict=False)
    except msgspec.ValidationError as error:
        raise InternalError(f"another version of the trainer wrote the checkpoint {path}: {error}") from error
    whole = all((path / name).is_file() and _checksum(path / name) == sum_ for name, sum_ in file.checksums.items())
    return file.state if whole else None


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)
