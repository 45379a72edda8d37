"""What differs between a run's config and the one that it is started with again, and which of it may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from trainer_service.config import RunConfig

_FREE = ("checkpoint.", "evaluation.after", "evaluation.before", "evaluation.every", "metrics.", "rollout.retry.")
"""Beginnings of keys that change neither what a run trains on nor with which losses. Of an evaluation it is when, and
not on what: accuracies of one run stay comparable."""

_UNSET = object()


def differences(old: RunConfig, new: RunConfig) -> dict[str, str]:
    """By key, as `training.steps`: what it is and was, for people."""
    before, after = dict(_leaves(msgspec.to_builtins(old))), dict(_leaves(msgspec.to_builtins(new)))
    return {
        key: f"{key} is {_show(after, key)}, and was {_show(before, key)}"
        for key in {**before, **after}
        if before.get(key, _UNSET) != after.get(key, _UNSET)
    }


def refused(old: RunConfig, new: RunConfig) -> list[str]:
    """The differences with which a run cannot go on as if it had been so from the start."""
    longer = new.training.steps > old.training.steps and new.optimizer.schedule == "constant"
    free = (*_FREE, "training.steps") if longer else _FREE
    return [text for key, text in differences(old, new).items() if not key.startswith(free)]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key, as in overrides on a command line."""
    if isinstance(value, dict | list) and value:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _show(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not there"
