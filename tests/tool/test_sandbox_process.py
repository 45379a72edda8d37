# ruff: noqa: ASYNC220, ASYNC240 - a test may wait and look at files
"""The process backend's life: isolation, files, cancellation, deaths of each part, tiers."""

import ast
import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from interpreters import open_to_sandboxes, readable_interpreter
from waiting import ENDLESS, PATIENCE, eventually

import tool_service.sandbox.inside as inside
from tool_service.sandbox import (
    FileRefused,
    ProcessBackend,
    ProcessConfig,
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxUnavailable,
    Tier,
    Turn,
    TurnResult,
    TurnStatus,
)
from tool_service.sandbox.base import MIB, check_tier

pytestmark = pytest.mark.needs("isolated-sandbox")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def backend() -> AsyncIterator[ProcessBackend]:
    made = ProcessBackend()
    await made.start()
    yield made
    await made.close()


async def python(sandbox: Sandbox, code: str, seconds: float = PATIENCE, output_bytes: int = 65536) -> TurnResult:
    return await sandbox.run(Turn("python", {"code": code}, seconds, output_bytes))


def lives(process: psutil.Process) -> bool:
    """Not gone, and not a zombie that some init has yet to reap."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def test_programs_of_two_sandboxes_draw_different_random_numbers(backend: ProcessBackend) -> None:
    drawn = [await python(await backend.create(SandboxLimits()), "import random; random.random()") for _ in range(2)]
    assert drawn[0].status is drawn[1].status is TurnStatus.OK
    assert drawn[0].stdout != drawn[1].stdout


async def test_two_sandboxes_share_nothing(backend: ProcessBackend) -> None:
    one, two = await backend.create(SandboxLimits()), await backend.create(SandboxLimits())
    await python(
        one,
        "import os, subprocess; x = 1; os.environ['X'] = '1'\n"
        "for p in ('/workspace/f', '/tmp/f', '/dev/shm/f'): open(p, 'w').write('mine')\n"
        "subprocess.Popen(['sleep', '60'])",
    )
    seen = await python(
        two,
        "import os\n"
        "print('x' in globals(), 'X' in os.environ, *map(os.listdir, ('/workspace', '/tmp', '/dev/shm')),"
        " [p for p in os.listdir('/proc') if p.isdigit()])",
    )
    assert seen.stdout == b"False False [] [] [] ['1', '2']\n"
    uid = "import os; os.getuid()"
    if os.geteuid() == 0:
        assert (await python(one, uid)).stdout != (await python(two, uid)).stdout, "a uid of its own each"


async def test_background_processes_live_until_the_sandbox_ends(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits())
    before = len(below(os.getpid()))
    await python(sandbox, "import subprocess; p = subprocess.Popen(['sleep', '60'])")
    assert (await python(sandbox, "p.poll()")).stdout == b""
    assert len(below(os.getpid())) == before + 1, "the worker was there already"
    await sandbox.kill()
    assert len(below(os.getpid())) == before - 2, "all gone when kill returns"


async def test_output_is_cut_by_bytes_and_says_how_long_it_was(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits())
    result = await python(sandbox, "print('é' * 1000)\n1/0", output_bytes=101)
    assert result.status is TurnStatus.TOOL_ERROR
    assert len(result.stdout) == 101
    assert result.truncated
    assert result.total_bytes > 2001
    assert b"Traceback" in result.stderr, "a long stdout does not hide the traceback"
    result = await python(sandbox, "print('x' * 5_000_000)", output_bytes=10)
    assert (result.status, result.stdout, result.total_bytes) == (TurnStatus.OK, b"x" * 10, 5_000_001)


async def test_a_flood_costs_the_service_no_memory(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits(flood_bytes=64 * MIB))
    before = psutil.Process().memory_info().rss
    result = await python(sandbox, "while 1: print('x' * 10**6)")
    assert result.status is TurnStatus.OUTPUT_LIMIT
    assert psutil.Process().memory_info().rss - before < 8 * MIB
    assert (await python(sandbox, "1")).restarted


@pytest.mark.parametrize("meanwhile", ["pass", "os.write(1, b'.')"], ids=["in silence", "while it prints"])
async def test_what_grows_between_two_turns_is_ended(backend: ProcessBackend, meanwhile: str) -> None:
    sandbox = await backend.create(SandboxLimits(memory_bytes=64 * MIB))
    before = len(below(os.getpid()))
    grow = f"    held = bytearray(40 << 20)\n    while 1:\n      time.sleep(.2); {meanwhile}\n"
    await python(sandbox, "import os, time\nfor _ in range(3):\n  if os.fork() == 0:\n" + grow)
    await eventually(lambda: len(below(os.getpid())) < before)
    result = await python(sandbox, "1")
    assert (result.status, result.restarted) == (TurnStatus.OK, True)


async def test_cpu_time_is_limited_apart_from_wall_time(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits(cpu_seconds=0.3))
    slept = await python(sandbox, "import time; time.sleep(.6)")
    assert slept.status is TurnStatus.OK
    assert slept.cpu_seconds < 0.3 <= slept.wall_seconds
    busy = await python(sandbox, "while 1: pass")
    assert busy.status is TurnStatus.TIMEOUT
    assert "CPU" in busy.detail
    spread = await python(sandbox, "import os\nfor i in range(3): os.fork()\nwhile 1: pass")
    assert spread.status is TurnStatus.TIMEOUT
    assert "CPU" in spread.detail, "children count"


async def test_files_go_in_and_out(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits(file_bytes=MIB, workspace_bytes=4 * MIB))
    await sandbox.put_file("data/deep/a.bin", bytes(range(256)))
    assert (await python(sandbox, "len(open('data/deep/a.bin', 'rb').read())")).stdout == b"256\n"
    await python(sandbox, "open('out', 'wb').write(b'\\0result'); import os; os.truncate('data/deep/a.bin', 2)")
    assert await sandbox.get_file("out", 100) == b"\0result"
    assert await sandbox.get_file("data/deep/a.bin", 2) == b"\0\1"
    await sandbox.put_file("out", b"")
    assert await sandbox.get_file("out", 0) == b""


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        ".",
        "a\x00b",
        "x" * 5000,
        "\udc00\ud800",
        "link",
        "links/passwd",
        "folder",
        "fifo",
        "loop",
        "missing",
        "proc/1/root",
    ],
)
async def test_unsafe_paths_are_refused(backend: ProcessBackend, path: str) -> None:
    sandbox = await backend.create(SandboxLimits())
    await python(
        sandbox,
        "import os\nos.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'links'); os.symlink('/proc', 'proc')\n"
        "os.mkdir('folder'); os.mkfifo('fifo'); os.symlink('loop', 'loop')",
    )
    with pytest.raises(FileRefused):
        await sandbox.get_file(path, MIB)
    if path != "missing":
        with pytest.raises(FileRefused):
            await sandbox.put_file(path, b"x")
    assert (await python(sandbox, "1")).stdout == b"1\n"


async def test_a_file_is_judged_by_size_and_space(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits(file_bytes=2 * MIB, workspace_bytes=MIB))
    with pytest.raises(FileRefused, match="more than"):
        await sandbox.put_file("a", b"x" * (2 * MIB + 1))
    with pytest.raises(FileRefused, match="No space"):
        await sandbox.put_file("a", b"x" * (2 * MIB))
    await python(sandbox, "open('sparse', 'wb').truncate(2 << 20)")
    with pytest.raises(FileRefused, match="more than"):
        await sandbox.get_file("sparse", MIB)


async def test_cancelling_a_turn_ends_its_processes_at_once(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits())
    zygote_only = len(below(os.getpid())) - 2
    task = asyncio.create_task(python(sandbox, "import subprocess; subprocess.run(['sleep', '600'])", ENDLESS))
    await eventually(lambda: len(below(os.getpid())) == zygote_only + 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not sandbox.alive
    await eventually(lambda: len(below(os.getpid())) == zygote_only)
    assert (await python(sandbox, "1")).status is TurnStatus.SESSION_LOST


async def test_kill_is_idempotent_and_ends_a_running_turn(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits())
    task = asyncio.create_task(python(sandbox, "import time; time.sleep(600)", ENDLESS))
    await asyncio.sleep(0.1)
    await asyncio.gather(sandbox.kill(), sandbox.kill())
    assert (await task).status is TurnStatus.SESSION_LOST
    await sandbox.kill()
    assert backend.stats().running == 0
    with pytest.raises(SandboxError):
        await sandbox.put_file("a", b"")


async def test_turns_do_not_overlap(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits())
    task = asyncio.create_task(python(sandbox, "import time; time.sleep(.3); 'first'"))
    await asyncio.sleep(0)  # it has begun
    with pytest.raises(RuntimeError, match="overlap"):
        await python(sandbox, "1")
    assert (await task).stdout == b"'first'\n"


async def test_a_payload_or_runtime_that_makes_no_sense_is_our_failure(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits())
    for turn in (Turn("ruby", {}), Turn("python", {"code": 1}), Turn("sql", {"query": "select 1", "script": ""})):
        result = await sandbox.run(turn)
        assert result.status is TurnStatus.INFRA
        assert result.detail
    assert (await python(sandbox, "1")).status is TurnStatus.OK


async def test_a_sandbox_killed_from_outside_is_our_failure_and_nobody_elses(backend: ProcessBackend) -> None:
    two = await backend.create(SandboxLimits())
    await python(two, "x = 5")
    known = {p.pid for p in below(os.getpid())}
    one = await backend.create(SandboxLimits())
    (supervisor,) = [p for p in below(os.getpid()) if p.pid not in known and p.ppid() in known]
    task = asyncio.create_task(python(one, "import time; time.sleep(600)", ENDLESS))
    await asyncio.sleep(0.1)
    supervisor.kill()
    assert (await task).status is TurnStatus.INFRA
    assert not one.alive
    assert (await python(two, "x")).stdout == b"5\n"
    await eventually(lambda: backend.stats().running == 1)


async def test_the_zygotes_death_ends_all_sandboxes_and_the_next_one_works(backend: ProcessBackend) -> None:
    sandbox = await backend.create(SandboxLimits())
    task = asyncio.create_task(python(sandbox, "import time; time.sleep(600)", ENDLESS))
    await asyncio.sleep(0.1)
    family = below(os.getpid())
    (launcher,) = psutil.Process().children()
    launcher.kill()
    assert (await task).status is TurnStatus.INFRA
    await eventually(lambda: not any(map(lives, family)))
    fresh = await backend.create(SandboxLimits())
    assert (await python(fresh, "1")).stdout == b"1\n"
    assert backend.stats().running == 1


async def test_a_service_killed_outright_leaves_no_process() -> None:
    program = textwrap.dedent(
        """
        import asyncio
        from tool_service.sandbox import *
        async def main():
            backend = ProcessBackend()
            await backend.start()
            boxes = [await backend.create(SandboxLimits()) for _ in range(8)]
            turns = [asyncio.create_task(box.run(Turn("python", {"code":
                "import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(600)"}, 600))) for box in boxes]
            print("ready", flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    await eventually(lambda: len(below(process.pid)) >= 2 + 8 * 3)
    family = below(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    await eventually(lambda: not any(map(lives, family)))


async def test_signals_that_the_service_blocks_or_ignores_are_none_of_a_sandbox_s() -> None:
    backend = ProcessBackend()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        await backend.start()  # which makes a sandbox, and waits for its end
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, handler)
    sandbox = await backend.create(SandboxLimits())
    code = "import signal\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGUSR1))"
    assert (await python(sandbox, code)).stdout == b"set() 0\n"
    await backend.close()


async def test_closing_the_backend_leaves_nothing() -> None:
    descriptors, processes = len(os.listdir("/proc/self/fd")), len(below(os.getpid()))
    backend = ProcessBackend()
    await backend.start()
    sandboxes = [await backend.create(SandboxLimits()) for _ in range(5)]
    await backend.close()
    await backend.close()
    assert len(below(os.getpid())) == processes
    assert not any(sandbox.alive for sandbox in sandboxes)
    with pytest.raises(SandboxUnavailable):
        await backend.create(SandboxLimits())
    del sandboxes
    await eventually(lambda: len(os.listdir("/proc/self/fd")) == descriptors)


async def test_a_weaker_machine_is_refused_with_the_fix() -> None:
    with pytest.raises(SandboxUnavailable, match=r"asks for at least 'isolated'.*Run the service as root"):
        await ProcessBackend(ProcessConfig(tier="restricted", interpreter=readable_interpreter())).start()
    with pytest.raises(SandboxUnavailable, match="nowhere"):
        await ProcessBackend(ProcessConfig(interpreter="/nowhere/python")).start()
    check_tier("x", Tier.ISOLATED, Tier.RESTRICTED, "")


async def test_an_interpreter_that_will_not_do_is_named_and_no_weaker_wall_is_offered() -> None:
    wrong = {"/bin/true": "/bin/true gave no answer: it must be Python 3.11 or later"}
    if readable_interpreter():
        wrong[""] = "cannot read it .*: name another"
    for interpreter, says in wrong.items():
        config = ProcessConfig(tier="restricted", minimum_tier="restricted", interpreter=interpreter)
        with pytest.raises(SandboxUnavailable, match=f"{says} .sandbox.process.interpreter") as refused:
            await ProcessBackend(config).start()
        assert "minimum_tier" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "says"),
    [("/nowhere", "not on this host"), ("usr", "not absolute"), ("/dev/null", "their own"), ("/", "their own")],
)
async def test_a_path_that_sandboxes_could_not_show_is_refused(path: str, says: str) -> None:
    with pytest.raises(SandboxUnavailable, match=f"read_only_paths: {path} .*{says}"):
        await ProcessBackend(ProcessConfig(read_only_paths=("/usr", path))).start()


async def test_the_restricted_tier_frees_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_to_sandboxes(tmp_path)
    leftover = tmp_path / "turnwire-sandboxes-dead" / "box"
    leftover.mkdir(parents=True)
    config = ProcessConfig(tier="restricted", minimum_tier="restricted", interpreter=readable_interpreter())
    backend = ProcessBackend(config)
    await backend.start()
    assert not leftover.parent.exists()
    assert backend.stats().leaked_removed == 1
    sandbox = await backend.create(SandboxLimits())
    result = await python(
        sandbox,
        "import os\nfor i in range(100):\n  os.mkdir('d' * 60); os.chdir('d' * 60)\n"
        "open('f', 'w'); os.chmod('.', 0)\nprint('deep')",
    )
    assert result.stdout == b"deep\n", result
    await sandbox.kill()
    (root,) = tmp_path.iterdir()
    await eventually(lambda: list(root.iterdir()) == [])
    await backend.close()
    assert list(tmp_path.iterdir()) == []


def test_what_runs_inside_imports_the_standard_library_alone() -> None:
    for path in Path(inside.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.partition(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"
