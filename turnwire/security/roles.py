"""Which role each method of the contract needs. This table is the only place that says so."""

from __future__ import annotations

import enum


class Role(enum.IntEnum):
    """Each may do what the ones before it may."""

    VIEWER = 1
    """Look: what there is, how it is, how runs go."""
    TOOL = 2
    """Run tools. The rollout service needs it."""
    ROLLOUT = 3
    """Generate with the policy, and score."""
    TRAINER = 4
    """Change the policy. The trainer service needs it."""
    ADMIN = 5
    """Start and stop runs."""

    @property
    def label(self) -> str:
        """As token files and messages have it."""
        return self.name.lower()


_TOOL, _ROLLOUT, _TRAINER = (f"/turnwire.v1.{name}Service/" for name in ("Tool", "Rollout", "Trainer"))

NEEDED: dict[str, Role] = {
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.VIEWER,
    _TOOL + "ListTools": Role.VIEWER,
    _TOOL + "GetStatus": Role.VIEWER,
    _TOOL + "Interact": Role.TOOL,
    _TOOL + "Execute": Role.TOOL,
    _ROLLOUT + "GetServerInfo": Role.VIEWER,
    _ROLLOUT + "GetWeightInfo": Role.VIEWER,
    _ROLLOUT + "Rollout": Role.ROLLOUT,
    _ROLLOUT + "Generate": Role.ROLLOUT,
    _ROLLOUT + "Score": Role.ROLLOUT,
    _ROLLOUT + "UpdateWeights": Role.TRAINER,
    _ROLLOUT + "Pause": Role.TRAINER,
    _ROLLOUT + "Resume": Role.TRAINER,
    _TRAINER + "ListRuns": Role.VIEWER,
    _TRAINER + "GetRun": Role.VIEWER,
    _TRAINER + "WatchRun": Role.VIEWER,
    _TRAINER + "StartRun": Role.ADMIN,
    _TRAINER + "StopRun": Role.ADMIN,
}
"""By full name. What is not here needs the highest role."""

CHECK = "/grpc.health.v1.Health/Check"

OPEN = frozenset({CHECK, "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/List"})
"""Needs no token: those who ask are probes, and what they learn is one word."""
