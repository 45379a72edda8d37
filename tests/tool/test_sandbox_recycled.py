"""What a sandbox that is used again tells of who had it before: nothing, or it is not used again."""

from __future__ import annotations

import docker_harness
import pytest

from tool_service.sandbox import ProcessBackend, SandboxLimits, Turn, TurnStatus

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
REMEMBERS = """
import os, re
memory, found = os.open('/proc/self/mem', os.O_RDONLY), set()
for line in open('/proc/self/maps'):
    ends = [int(part, 16) for part in line.split()[0].split('-')]
    if line.split()[1].startswith('rw'):
        found.update(re.findall(rb'TOLD_IN_[A-Z]+', os.pread(memory, ends[1] - ends[0], ends[0])))
print(sorted(found))
"""


@pytest.mark.needs("docker")
async def test_who_comes_next_finds_nothing_in_its_memory_of_what_the_first_was_sent() -> None:
    async with docker_harness.running_backend() as containers:
        sandbox = await containers.create(SandboxLimits())
        for _ in range(2):
            seen = (await sandbox.run(Turn("python", {"code": REMEMBERS}))).stdout
            assert seen == b"[]\n"
            tests = "assert f(1) == 'TOLD_IN_TESTS'"
            await sandbox.run(Turn("tests", {"code": "f = str # TOLD_IN_CODE", "tests": tests}))
            await sandbox.run(Turn("sql", {"query": "select 'TOLD_IN_SQL'"}))
            await sandbox.put_file("f", b"TOLD_IN_FILES" * 1000)
            await sandbox.get_file("f", 20_000)
            await sandbox.run(Turn("python", {"code": "print('TOLD_IN_' + 'OUTPUT')"}))
            assert await sandbox.reset() == ""


@pytest.mark.needs("isolated-sandbox")
async def test_a_sandbox_whose_memory_cannot_be_had_anew_is_not_used_again() -> None:
    processes = ProcessBackend()
    await processes.start()
    sandbox = await processes.create(SandboxLimits())
    assert "memory holds what it was sent" in await sandbox.reset()
    await processes.close()


@pytest.mark.needs("docker")
async def test_who_comes_next_sees_what_the_first_saw() -> None:
    async with docker_harness.running_backend() as containers:
        sandbox = await containers.create(SandboxLimits())
        first = (await sandbox.run(Turn("python", {"code": SEEN}))).stdout
        assert (await sandbox.run(Turn("python", {"code": LEAVES}))).status is TurnStatus.OK
        assert await sandbox.reset() == ""
        assert (await sandbox.run(Turn("python", {"code": SEEN}))).stdout == first
        assert (await sandbox.run(Turn("python", {"code": CONNECTS}))).status is TurnStatus.OK
        assert await sandbox.reset() == "connections"
