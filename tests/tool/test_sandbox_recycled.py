"""What a sandbox that is used again tells of who had it before: nothing, or it is not used again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import docker_harness
import pytest

from tool_service.sandbox import ProcessBackend, Sandbox, SandboxLimits, Turn, TurnStatus

SEEN = """
import fcntl, os
print([fcntl.fcntl(fd, what) for fd in (1, 2) for what in (fcntl.F_GETFL, fcntl.F_GETOWN, 11, 1032)])  # signal, size
print(os.sched_getaffinity(0), os.getpriority(0, 0), os.umask(0o022), sorted(os.environ))
print([os.listdir(path) for path in ('.', '/tmp', '/dev/shm')], os.listxattr('.'))
"""
LEAVES = """
import fcntl, os
for fd in (1, 2):
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, 10, 34)
    fcntl.fcntl(fd, 1031, 8192)
for pid in (0, 1, os.getppid()):
    os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
os.nice(5); os.umask(0o777); os.environ['LEFT'] = 'x'
open('f', 'w').close(); open('/tmp/f', 'w').close(); os.setxattr('.', 'user.x', b'y')
"""
CONNECTS = """
import socket
server = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
client.close(); peer.close()
"""


@contextlib.asynccontextmanager
async def sandbox_of(backend: str) -> AsyncIterator[Sandbox]:
    if backend == "docker":
        async with docker_harness.running_backend() as containers:
            yield await containers.create(SandboxLimits())
    else:
        processes = ProcessBackend()
        await processes.start()
        yield await processes.create(SandboxLimits())
        await processes.close()


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("process", marks=pytest.mark.needs("isolated-sandbox")),
        pytest.param("docker", marks=pytest.mark.needs("docker")),
    ],
)
async def test_who_comes_next_sees_what_the_first_saw(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        first = (await sandbox.run(Turn("python", {"code": SEEN}))).stdout
        assert (await sandbox.run(Turn("python", {"code": LEAVES}))).status is TurnStatus.OK
        assert await sandbox.reset() == ""
        assert (await sandbox.run(Turn("python", {"code": SEEN}))).stdout == first
        assert (await sandbox.run(Turn("python", {"code": CONNECTS}))).status is TurnStatus.OK
        assert await sandbox.reset() == "connections"
