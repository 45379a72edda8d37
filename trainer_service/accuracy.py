"""What an evaluation found, by data source: accuracy over what could be judged, and what failed.

A trajectory that infrastructure failed, or whose reward could not be computed, is unknown, so it is neither a 0 nor a
1: the accuracy is over the rest, and the failures are told beside it wherever it is shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from trainer_service.groups import Failed, Judged, Member


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one data source.

    trajectories: that failed. tasks: of which all trajectories failed, so that the accuracy leaves them out.
    reason: why the first of them failed.
    """

    trajectories: int
    tasks: int
    reason: str


@dataclass(frozen=True)
class Accuracies:
    """By data source.

    accuracy: mean over its tasks of the mean reward of their judged trajectories; None where none was judged.
    tasks: how many tasks that is the mean over. failures: only sources of which something failed.
    """

    accuracy: dict[str, float | None]
    tasks: dict[str, int]
    failures: dict[str, Failures]


def accuracies(members: Iterable[Member]) -> Accuracies:
    """Of all trajectories of an evaluation."""
    rewards: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    failed: dict[str, list[Failed]] = defaultdict(list)
    for member in members:
        of_task = rewards[member.task.data_source][member.task.task_id]
        if isinstance(member, Judged):
            of_task.append(member.score.value)
        else:
            failed[member.task.data_source].append(member)
    result = Accuracies({}, {}, {})
    for source, tasks in sorted(rewards.items()):
        means = [float(np.mean(values)) for values in tasks.values() if values]
        result.accuracy[source] = float(np.mean(means)) if means else None
        result.tasks[source] = len(means)
        if lost := failed[source]:
            result.failures[source] = Failures(
                trajectories=len(lost), tasks=len(tasks) - len(means), reason=lost[0].reason
            )
    return result
