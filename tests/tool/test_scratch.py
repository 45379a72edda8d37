"""Folders of the restricted tier, where one service sweeps while another begins or ends."""

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tool_service.sandbox.scratch import Scratch


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def before_the_next_lock(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Between finding a folder and locking it, where no event tells that somebody is."""
    lock = fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        happens()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)


def test_a_service_begins_although_its_new_folder_is_swept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_the_next_lock(monkeypatch, lambda: Scratch().sweep())
    scratch = Scratch()
    assert sorted(os.listdir(scratch.make("a1", os.geteuid()))) == ["tmp", "work"]
    assert Scratch().sweep() == 0, "it lives"
    scratch.close()
    assert os.listdir(place) == []


def test_a_sweep_passes_over_a_folder_whose_service_has_just_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Scratch()
    ending.make("a1", os.geteuid())
    before_the_next_lock(monkeypatch, ending.close)
    assert Scratch().sweep() == 0
