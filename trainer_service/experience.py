"""From groups to what is trained on: which trajectories are in, and why the others are not.

Pure functions. A trajectory that infrastructure or its reward failed is not in a group any more, so it is in neither
the loss nor the baseline; what is left out on purpose is named with its reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_service import names
from trainer_service.batch import TokenSequence
from trainer_service.config import AlgorithmConfig
from trainer_service.groups import Group, Judged
from trainer_service.learner import Experience
from turnwire.errors import InvalidRequestError
from turnwire.v1 import rollout_pb2


@dataclass(frozen=True)
class Selection:
    """What one update learns from. `rows` has, for each sequence of `experience`, its trajectory; `experience` is None
    where nothing is left. `filtered` are trajectories with the reason why they are not in it."""

    experience: Experience | None
    rows: list[Judged]
    filtered: list[tuple[Judged, str]]


def select(algorithm: AlgorithmConfig, groups: Sequence[Group]) -> Selection:
    """Decide group by group. Raises InvalidRequestError for a reward without a part that gdpo is to normalise."""
    kept: list[tuple[Group, list[Judged]]] = []
    filtered: list[tuple[Judged, str]] = []
    for group in groups:
        judged = [member for member in group.members if isinstance(member, Judged)]
        full = [member for member in judged if any(segment.weight_spans for segment in _segments(member))]
        filtered += [(member, "nothing was sampled") for member in judged if member not in full]
        reason = _why_not(algorithm, group, full)
        if reason:
            filtered += [(member, reason) for member in full]
        elif full:
            kept.append((group, full))
    rows = [(group, member, segment) for group, members in kept for member in members for segment in _segments(member)]
    if not rows:
        return Selection(None, [], filtered)
    greedy = None
    if algorithm.advantage_estimator in names.NEEDS_GREEDY_BASELINE:
        greedy = [group.greedy.score.value for group, _, _ in rows if isinstance(group.greedy, Judged)]
    experience = Experience(
        sequences=[TokenSequence.from_segment(segment) for _, _, segment in rows],
        rewards=[member.score.value for _, member, _ in rows],
        groups=[group.draw for group, _, _ in rows],
        greedy_rewards=greedy,
        reward_parts=_parts(algorithm, [member for _, member, _ in rows]),
    )
    return Selection(experience, [member for _, member, _ in rows], filtered)


def _segments(member: Judged) -> Sequence[rollout_pb2.Segment]:
    return member.sampled.trajectory.segments


def _why_not(algorithm: AlgorithmConfig, group: Group, members: list[Judged]) -> str:
    if not members:
        return ""
    if algorithm.advantage_estimator in names.NEEDS_GREEDY_BASELINE and not isinstance(group.greedy, Judged):
        return "its group has no greedy trajectory to compare with"
    if algorithm.advantage_estimator in names.COMPARES_GROUP and len(members) < 2:
        return "its group has no other trajectory to compare with"
    if algorithm.filter_zero_variance and len({member.score.value for member in members}) == 1:
        return "all rewards of the group are equal"
    return ""


def _parts(
    algorithm: AlgorithmConfig, members: list[Judged]
) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    values: dict[str, list[float]] = defaultdict(list)
    for member in members:
        for name in algorithm.reward_parts:
            if name not in member.score.parts:
                known = ", ".join(member.score.parts) or "none"
                raise InvalidRequestError(
                    f"algorithm.reward_parts names {name!r}, but the reward of {member.task.data_source} has: {known}"
                )
            values[name].append(member.score.parts[name])
    return {name: np.array(numbers, np.float32) for name, numbers in values.items()}


def spread(groups: Sequence[Group], count: int) -> list[Judged]:
    """Some judged trajectories of a batch for people to look at: first one of each group, then a second one …"""
    columns = [[member for member in group.members if isinstance(member, Judged)] for group in groups]
    longest = max((len(column) for column in columns), default=0)
    chosen = [column[place] for place in range(longest) for column in columns if place < len(column)]
    return chosen[:count]
