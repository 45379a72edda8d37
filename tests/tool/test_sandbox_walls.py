"""Walls of one tier that the conformance tables do not show: what a sandbox without namespaces can reach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from interpreters import open_to_sandboxes, readable_interpreter

from tool_service.sandbox import ProcessBackend, ProcessConfig, Sandbox, SandboxLimits, Turn, TurnStatus
from tool_service.sandbox.inside import jail, landlock

SECRET = "canary-of-the-machine"

with_landlock = pytest.mark.skipif(landlock.ABI < landlock.SIGNAL_SCOPE_ABI, reason="needs Landlock of Linux 6.12")


@pytest.fixture
async def restricted() -> AsyncIterator[ProcessBackend]:
    config = ProcessConfig(tier="restricted", minimum_tier="restricted", interpreter=readable_interpreter())
    backend = ProcessBackend(config)
    await backend.start()
    yield backend
    await backend.close()


async def python(sandbox: Sandbox, code: str) -> str:
    result = await sandbox.run(Turn("python", {"code": code}, 10.0))
    assert result.status is TurnStatus.OK, result
    return result.stdout.decode()


def attempts(*calls: str) -> str:
    """A program that tries each and prints what came of it."""
    tries = "\n".join(
        f"try: print('done', {call})\nexcept OSError as error: print(type(error).__name__)" for call in calls
    )
    return f"import os, subprocess, sys\n{tries}"


@with_landlock
async def test_a_file_that_everybody_may_read_is_closed(restricted: ProcessBackend, tmp_path: Path) -> None:
    open_to_sandboxes(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o666)
    with contextlib.suppress(OSError):  # a file system without
        os.setxattr(secret, "user.given", SECRET.encode())
    seen = await python(
        await restricted.create(SandboxLimits()),
        attempts(
            f"open('{secret}').read()",
            f"open('{secret}', 'a')",
            f"os.listdir('{tmp_path}')",
            f"os.rename('{secret}', 'mine')",
            f"os.unlink('{secret}')",
            f"os.truncate('{secret}', 0)",
            f"os.link('{secret}', 'mine')",
            f"os.setxattr('{secret}', 'user.x', b'1')",
            f"os.getxattr('{secret}', 'user.given')",
            f"subprocess.check_output(['cat', '{secret}'])" + " or 1/0",
        ).replace("except OSError", "except (OSError, subprocess.SubprocessError)"),
    )
    assert "done" not in seen
    assert secret.read_text() == SECRET


@with_landlock
async def test_two_sandboxes_without_namespaces_share_nothing(restricted: ProcessBackend) -> None:
    one, two = await restricted.create(SandboxLimits()), await restricted.create(SandboxLimits())
    folder = (
        await python(one, "import os; open('f', 'w').write('x'); os.chmod('.', 0o777); print(os.getcwd())")
    ).strip()
    pid = (await python(one, "print(os.getpid())")).strip()
    seen = await python(
        two,
        attempts(
            f"open('{folder}/f')",
            f"os.listdir('{folder}')",
            f"open('{folder}/g', 'w')",
            "open('/dev/shm/left', 'w')",
            "open('/tmp/left', 'w')",
            f"os.kill({pid}, 0)",
            f"open('/proc/{pid}/status')",
            f"open('/proc/{pid}/cmdline')",
            f"os.sched_setaffinity({pid}, [0])",
        ),
    )
    assert "done" not in seen
    assert seen.count("PermissionError") >= 8


@with_landlock
async def test_of_proc_a_worker_reads_itself_and_figures_of_the_machine(restricted: ProcessBackend) -> None:
    code = attempts(
        "open('/proc/self/status').read(4)",
        "len(os.listdir('/proc/self/fd'))",
        "open('/proc/meminfo').read(8)",
        "open('/proc/self/mountinfo')",
        "open('/proc/self/net/tcp')",
        "open('/proc/self/comm', 'w').write('x')",
        "os.listdir('/proc')",
    )
    seen = (await python(await restricted.create(SandboxLimits()), code)).splitlines()
    assert [line.split()[0] for line in seen] == ["done"] * 3 + ["PermissionError"] * 4


async def test_what_others_of_the_machine_use_is_not_held_against_a_sandbox(restricted: ProcessBackend) -> None:
    sandbox = await restricted.create(SandboxLimits(cpu_seconds=0.5))
    busy = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        assert await python(sandbox, "import time; time.sleep(2); print('slept')") == "slept\n"
    finally:
        busy.kill()
        await busy.wait()


@with_landlock
@pytest.mark.needs("isolated-sandbox")
async def test_landlock_is_a_second_line_in_the_isolated_tier() -> None:
    backend = ProcessBackend()
    await backend.start()
    sandbox = await backend.create(SandboxLimits())
    calls = ("open('/proc/self/comm', 'w').write('x')", "open('/proc/self/oom_score_adj', 'w').write('0')")
    assert await python(sandbox, attempts(*calls)) == "PermissionError\n" * 2
    assert backend.facts["landlock"] == f"version {landlock.ABI}"
    await backend.close()


def test_what_may_be_read_without_a_root_of_its_own_holds_no_place_of_people_or_services() -> None:
    shown = jail.readable_paths(["/opt/data-set-that-is-not-there"])
    assert "/usr" in shown
    closed = (
        "/",
        "/etc",
        "/home",
        "/root",
        "/var",
        "/run",
        "/tmp",
        "/dev",
        "/proc",
        "/sys",
        "/etc/passwd",
        "/etc/shadow",
    )
    assert not set(closed) & set(shown)
    assert not any(path.startswith("/opt") for path in shown)


@pytest.mark.parametrize(("version", "rights"), [(1, 13), (2, 14), (3, 15), (4, 15), (5, 16), (7, 16)])
def test_rights_are_those_that_a_kernel_knows(version: int, rights: int) -> None:
    """An unknown one would make the kernel refuse the whole set."""
    assert landlock.known(version) == (1 << rights) - 1
