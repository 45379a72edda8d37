"""CPU time of the tools that work in a workspace: of one call, and of what a call leaves running."""

import pytest
from tool_harness import Trajectory, children, error_of, nothing_left, text_of
from waiting import eventually
from workspace_harness import service_on, turns

pytestmark = pytest.mark.needs("isolated-sandbox")


async def test_a_call_has_a_limit_of_cpu_time_of_its_own() -> None:
    config = {"cpu_seconds": 0.3}
    async with service_on("process", tools={"python": config, "bash": config}) as service, nothing_left(service):
        for tool, code in (("python", "while True: pass"), ("bash", "while :; do :; done")):
            (observation,) = await turns(service, tool, code)
            assert error_of(observation) == "TIMEOUT"
            assert "0.3 s of CPU time" in observation.error_detail


@pytest.mark.parametrize("script", ["sleep 1", "exec sleep 1", "exec 1>&- 2>&-; sleep 1", "set -n"])
async def test_waiting_for_a_script_uses_no_cpu_time(script: str) -> None:
    async with service_on("process", tools={"bash": {"cpu_seconds": 0.3}}) as service:
        (observation,) = await turns(service, "bash", script)
        assert error_of(observation) in ("", "SESSION_LOST")


async def test_a_job_that_computes_between_calls_is_ended_when_it_has_used_what_a_call_may() -> None:
    async with service_on("process", sandbox={"limits": {"cpu_seconds": 0.3}}) as service:
        trajectory = Trajectory(service)
        await trajectory.open("bash")
        await trajectory.act(0, "<bash>x=1; echo $x</bash>")
        known = children()
        await trajectory.act(1, "<bash>while :; do :; done & </bash>")
        await eventually(lambda: not known <= children())
        answer = await trajectory.act(2, "<bash>echo ${x-lost}</bash>")
        assert text_of(answer.observations[0]).endswith("are lost]\nlost")
        await trajectory.close()
