"""The hostile suite on the docker backend."""

from __future__ import annotations

import pytest
from docker_harness import containers, docker_config, new_owner
from test_sandbox_cases import failures
from waiting import PATIENCE

from tool_service.sandbox.docker import DockerBackend
from tool_service.sandbox.hostile import CASES, examine
from tool_service.sandbox.hostile.case import DOCKER


@pytest.mark.needs("docker")
@pytest.mark.timeout(1800)
async def test_every_case_has_its_outcome_and_leaves_nothing() -> None:
    owner = new_owner()
    report = await examine(lambda: DockerBackend(docker_config(), owner=owner), CASES, (1, 8), latest=PATIENCE)
    assert not failures(report), "\n\n".join(failures(report))
    assert set(report.not_promised) == {case.id for case in CASES if DOCKER not in case.backends}
    assert containers(owner) == []
