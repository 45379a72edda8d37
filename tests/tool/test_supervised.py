"""A sandbox as the service sees it, by what its supervisor says: that it is ready, or over, as a program let something
not die."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from waiting import PATIENCE

from tool_service.sandbox import SandboxUnavailable, Turn, TurnStatus
from tool_service.sandbox.inside import frames
from tool_service.sandbox.supervised import SupervisedSandbox

TURN = Turn("python", {"code": "1"}, 5.0)
MEMORY, OVER = {"status": "MEMORY"}, {"over": True}


async def sandbox_of(said: dict[str, Any], *more: dict[str, Any]) -> tuple[SupervisedSandbox, socket.socket]:
    """One whose supervisor has said all that already: a real one cannot be brought to a process that does not die."""
    ours, theirs = socket.socketpair()
    sandbox = SupervisedSandbox("a1", lambda _: None, TurnStatus.INFRA)
    await asyncio.get_running_loop().create_unix_connection(lambda: sandbox, sock=ours)
    running = asyncio.ensure_future(sandbox.run(TURN))
    await asyncio.sleep(0)
    theirs.sendall(b"".join(map(frames.encode, (said, *more))))
    assert (await running).status.name == said.get("status", "SESSION_LOST")
    return sandbox, theirs


@pytest.mark.parametrize("said", [(MEMORY, OVER), (OVER,)], ids=["with its last answer", "in place of an answer"])
async def test_a_sandbox_that_is_over_by_its_programs_doing_is_lost_and_no_failure_of_ours(said: Any) -> None:
    sandbox, theirs = await sandbox_of(*said)
    with theirs:
        assert not sandbox.alive
        assert (await sandbox.run(TURN)).status is TurnStatus.SESSION_LOST


async def test_a_supervisor_that_dies_without_a_word_is_a_failure_of_ours() -> None:
    sandbox, theirs = await sandbox_of(MEMORY)
    theirs.close()
    assert (await sandbox.run(TURN)).status is TurnStatus.INFRA


@pytest.mark.parametrize("said", [{"ready": True}, {"failed": "no room"}], ids=["ready", "failed"])
async def test_a_supervisor_that_speaks_before_anybody_waits_for_it_is_heard(said: dict[str, Any]) -> None:
    """An engine that is slow to say that it has started a container: that one may be ready by then."""
    ours, theirs = socket.socketpair()
    sandbox = SupervisedSandbox("a1", lambda _: None, TurnStatus.INFRA)
    await asyncio.get_running_loop().create_unix_connection(lambda: sandbox, sock=ours)
    with theirs:
        theirs.sendall(frames.encode(said))
        for _ in range(3):  # the loop's turns: it is read
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            if "failed" in said:
                with pytest.raises(SandboxUnavailable, match="no room"):
                    await sandbox.wait_ready()
            else:
                await sandbox.wait_ready()
