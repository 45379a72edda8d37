"""The docker backend's life on a real engine: walls, control, deaths of each part, leftovers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from docker_harness import (
    accepted_runtime,
    client,
    container_of,
    containers,
    docker_config,
    foreign_container,
    new_owner,
    python,
    running_backend,
    until,
)
from waiting import ENDLESS

from tool_service.sandbox import (
    FileRefused,
    PoolExhausted,
    SandboxError,
    SandboxLimits,
    SandboxUnavailable,
    Tier,
    TurnStatus,
    WarmPool,
    docker_container,
)
from tool_service.sandbox.base import MIB
from tool_service.sandbox.docker import DockerBackend
from tool_service.sandbox.docker_container import INSTANCE, OWNER, SANDBOX
from tool_service.sandbox.instance import Instance

pytestmark = pytest.mark.needs("docker")

ROOT = Path(__file__).resolve().parents[2]
LIMITS = SandboxLimits()


@pytest.fixture
async def backend() -> AsyncIterator[DockerBackend]:
    async with running_backend() as made:
        yield made


async def test_the_walls_are_there_as_seen_from_the_inside(backend: DockerBackend) -> None:
    facts = backend.facts
    assert backend.tier is Tier.ISOLATED
    assert int(facts["uid"]) >= docker_config().uid_base
    assert facts["capabilities"] == "none"
    assert facts["no new privileges"] == "yes"
    assert facts["seccomp"] == "filter"
    assert facts["network"] == "none"
    assert "lo" in facts["network interfaces"]
    assert facts["root"] == "read-only"
    assert facts["cgroup pids"] == str(LIMITS.processes + 16)
    assert facts["cgroup cpus"] == "1"
    assert facts["processes"] == str(LIMITS.processes)
    assert (facts["/workspace"], facts["/tmp"], facts["/dev/shm"]) == (
        "80 MiB, 10240 inodes",
        "32 MiB, 4096 inodes",
        "16 MiB, 2048 inodes",
    )


async def test_the_engine_was_told_of_every_wall(backend: DockerBackend) -> None:
    sandbox = await backend.create(LIMITS)
    made = await asyncio.to_thread(container_of, sandbox)
    host = made.attrs["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["CapDrop"]) == ("none", True, ["ALL"])
    assert (host["IpcMode"], host["AutoRemove"], host["Privileged"]) == ("private", True, False)
    assert host["Binds"] in (None, [])
    assert host["Memory"] == host["MemorySwap"]
    assert host["LogConfig"]["Type"] == "none", "a flood must not fill the engine's disk"
    assert "no-new-privileges" in host["SecurityOpt"]
    (profile,) = (json.loads(text.removeprefix("seccomp=")) for text in host["SecurityOpt"] if "seccomp=" in text)
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert made.labels[SANDBOX] == sandbox.id


async def test_two_sandboxes_share_nothing(backend: DockerBackend) -> None:
    one, two = await asyncio.gather(backend.create(LIMITS), backend.create(LIMITS))
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
    assert re.fullmatch(rb"False False \[\] \[\] \[\] \['1', '\d+'\]\n", seen.stdout), seen
    uid = "import os; os.getuid()"
    assert (await python(one, uid)).stdout != (await python(two, uid)).stdout, "a uid of its own each"


async def test_programs_of_the_shipped_image_find_their_own_servers_by_name(backend: DockerBackend) -> None:
    done = await python(
        await backend.create(LIMITS),
        "import socket\n"
        "for name in ('localhost', socket.gethostname()):\n"
        "    server = socket.create_server((name, 0))\n"
        "    socket.create_connection(server.getsockname()); print(name)",
    )
    assert done.stdout == b"localhost\nsandbox\n", done


async def test_files_go_in_and_out(backend: DockerBackend) -> None:
    sandbox = await backend.create(LIMITS)
    data = os.urandom(20 * MIB)
    await sandbox.put_file("deep/er/file", data)
    assert await sandbox.get_file("deep/er/file", 32 * MIB) == data
    for path in ("../x", "/etc/passwd", "a//b"):
        with pytest.raises(FileRefused):
            await sandbox.put_file(path, b"")
    await python(sandbox, "import os; os.symlink('/etc/passwd', 'link')")
    with pytest.raises(FileRefused):
        await sandbox.get_file("link", MIB)


async def test_the_largest_file_costs_the_supervisor_neither_its_life_nor_its_memory(backend: DockerBackend) -> None:
    limits = SandboxLimits(memory_bytes=64 * MIB, file_bytes=64 * MIB, workspace_bytes=128 * MIB)
    sandbox = await backend.create(limits)
    await sandbox.put_file("big", b"x" * (60 * MIB))
    assert len(await sandbox.get_file("big", 64 * MIB)) == 60 * MIB
    assert sandbox.alive


async def test_a_flood_costs_the_service_no_memory(backend: DockerBackend) -> None:
    sandbox = await backend.create(SandboxLimits(flood_bytes=64 * MIB))
    before = psutil.Process().memory_info().rss
    result = await python(sandbox, "while 1: print('x' * 10**6)")
    assert result.status is TurnStatus.OUTPUT_LIMIT
    assert psutil.Process().memory_info().rss - before < 8 * MIB


async def test_memory_that_the_watchdog_cannot_see_in_time_is_the_programs_failure_all_the_same(
    backend: DockerBackend,
) -> None:
    """Socket buffers and page tables count for the cgroup alone: its kill is MEMORY, not a signal."""
    sandbox = await backend.create(SandboxLimits(memory_bytes=64 * MIB, file_bytes=MIB, workspace_bytes=16 * MIB))
    result = await python(
        sandbox,
        "import socket\nkept = []\nwhile 1:\n  a, b = socket.socketpair(); a.setblocking(False); kept.append((a, b))\n"
        "  a.setsockopt(1, 7, 10**9)\n  try:\n    while 1: a.send(b'x' * 65536)\n  except BlockingIOError: pass",
        30,
    )
    assert result.status in (TurnStatus.MEMORY, TurnStatus.TOOL_ERROR), result
    assert result.status is not TurnStatus.TOOL_ERROR or b"Too many open files" in result.stderr


async def test_full_folders_do_not_cost_the_supervisor_its_life(backend: DockerBackend) -> None:
    sandbox = await backend.create(
        SandboxLimits(memory_bytes=32 * MIB, file_bytes=256 * MIB, workspace_bytes=256 * MIB)
    )
    fill = (
        "for p in ('/workspace', '/tmp', '/dev/shm'):\n  try:\n    with open(p + '/f', 'wb', 0) as f:\n"
        "      while 1: f.write(bytes(1 << 20))\n  except OSError: pass"
    )
    for _ in range(3):
        assert (await python(sandbox, fill)).status in (TurnStatus.MEMORY, TurnStatus.OK)
    assert sandbox.alive


async def test_cancelling_a_turn_ends_the_container(backend: DockerBackend) -> None:
    sandbox = await backend.create(LIMITS)
    made = await asyncio.to_thread(container_of, sandbox)
    turn = asyncio.create_task(python(sandbox, "import time; time.sleep(600)", ENDLESS))
    await asyncio.sleep(0.2)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await sandbox.kill()
    assert made.id not in {one.id for one in client().containers.list(all=True)}


async def test_cancelling_a_creation_at_any_moment_leaves_nothing(backend: DockerBackend) -> None:
    for pause in (0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5):
        creation = asyncio.create_task(backend.create(LIMITS))
        await asyncio.sleep(pause)
        creation.cancel()
        for sandbox in await asyncio.gather(creation, return_exceptions=True):
            if not isinstance(sandbox, BaseException):
                await sandbox.kill()
    assert await until(lambda: backend.stats().running == 0)


async def test_a_container_that_is_killed_in_mid_turn_is_our_failure_and_harms_no_other(backend: DockerBackend) -> None:
    victim, neighbour = await asyncio.gather(backend.create(LIMITS), backend.create(LIMITS))
    await python(neighbour, "x = 41")
    turn = asyncio.create_task(python(victim, "import time; time.sleep(600)", ENDLESS))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(container_of(victim).kill)
    assert (await turn).status is TurnStatus.INFRA
    assert not victim.alive
    assert (await python(victim, "1")).status is TurnStatus.INFRA
    with pytest.raises(SandboxError):
        await victim.put_file("f", b"")
    assert (await python(neighbour, "x + 1")).stdout == b"42\n"
    await victim.kill()
    assert backend.stats().running == 1


async def test_a_paused_container_is_our_failure_and_not_a_slow_program(backend: DockerBackend) -> None:
    sandbox = await backend.create(LIMITS)
    await asyncio.to_thread(container_of(sandbox).pause)
    result = await python(sandbox, "1", 0.5)
    assert result.status is TurnStatus.INFRA
    assert "paused" in result.detail
    await sandbox.kill()
    assert backend.stats().running == 0


async def test_a_pool_hands_out_neither_paused_nor_dead_containers(backend: DockerBackend) -> None:
    pool = WarmPool(backend, size=2, limits=LIMITS, max_total=4)
    await pool.start()
    paused, killed = pool._ready
    await asyncio.to_thread(container_of(paused).pause)
    await asyncio.to_thread(container_of(killed).kill)
    taken = await pool.take()
    assert taken.id not in (paused.id, killed.id)
    assert (await python(taken, "1")).status is TurnStatus.OK
    await pool.close()


async def test_a_pool_that_is_exhausted_says_when_to_come_back(backend: DockerBackend) -> None:
    pool = WarmPool(backend, size=1, limits=LIMITS, max_total=1, wait_seconds=0.2)
    await pool.start()
    await pool.take()
    with pytest.raises(PoolExhausted) as full:
        await pool.take()
    assert full.value.retry_seconds > 0
    await pool.close()


async def test_a_recycled_container_serves_again_and_shows_nothing(backend: DockerBackend) -> None:
    pool = WarmPool(backend, size=1, limits=LIMITS, max_total=1, recycle=True)
    await pool.start()
    ids = set()
    for _ in range(3):
        sandbox = await pool.take()
        ids.add(sandbox.id)
        seen = await python(
            sandbox,
            "import os\nprint('x' in globals(), os.getcwd(), *map(os.listdir, ('/workspace', '/tmp', '/dev/shm')))",
        )
        assert seen.stdout == b"False /workspace [] [] []\n"
        assert not seen.restarted
        await python(
            sandbox,
            "import os, subprocess; x = 1; os.makedirs('a/b'); open('a/b/f', 'w').write('mine'); os.chmod('a', 0)\n"
            "open('/dev/shm/s', 'w'); os.symlink('/etc', '/tmp/l'); os.chmod('/workspace', 0)\n"
            "p = subprocess.Popen(['sleep', '60'])",
        )
        await pool.discard(sandbox)
    assert len(ids) == 1
    await pool.close()


async def test_an_image_that_is_missing_is_named_with_the_way_to_build_it() -> None:
    owner = new_owner()
    for image, hint in (("turnwire/sandbox-nowhere:1", "docker build -t turnwire/sandbox-nowhere:1"),):
        with pytest.raises(SandboxUnavailable, match=hint):
            await DockerBackend(docker_config(image=image), owner=owner).start()
    with pytest.raises(SandboxUnavailable, match="cannot be pulled"):
        await DockerBackend(docker_config(image="localhost:9/nowhere:1", pull="missing"), owner=owner).start()
    assert containers(owner) == []


async def test_an_engine_that_is_not_there_is_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="cannot be reached"):
        await DockerBackend(docker_config(host=f"unix://{tmp_path}/none.sock")).start()
    listener = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with listener, pytest.raises(SandboxUnavailable, match="cannot be reached"):
        await DockerBackend(docker_config(host=address, allow_plaintext_engine=True, control_seconds=1)).start()


async def test_a_path_that_is_not_on_the_engine_s_host_is_refused_and_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(SandboxUnavailable, match=f"does not exist: {missing}"):
        await DockerBackend(docker_config(read_only_paths=(str(missing),)), owner=new_owner()).start()
    assert not missing.exists()


async def test_an_engine_that_ignores_what_it_was_asked_for_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, owner = docker_container.specification, new_owner()

    def weaker(*arguments: Any) -> dict[str, Any]:
        asked = whole(*arguments)
        return {**asked, "HostConfig": {**asked["HostConfig"], "ReadonlyRootfs": False}}

    monkeypatch.setattr(docker_container, "specification", weaker)
    with pytest.raises(SandboxUnavailable, match="root is 'writable', not 'read-only'"):
        await DockerBackend(docker_config(), owner=owner).start()
    assert containers(owner) == []


async def test_a_runtime_with_known_escapes_is_refused_on_this_engine_too() -> None:
    if accepted_runtime() >= "1.2.8":
        pytest.skip("this engine's runc has none")
    with pytest.raises(SandboxUnavailable, match="accept_runtime_version"):
        await DockerBackend(docker_config(accept_runtime_version="")).start()


async def test_a_sweep_takes_the_leftovers_of_dead_services_of_this_owner_alone(backend: DockerBackend) -> None:
    owner = backend.facts["owner"]
    ours = await backend.create(LIMITS)
    living = Instance(owner)
    living.announce()
    dead = {OWNER: owner, INSTANCE: "0" * 16, SANDBOX: "1" * 16}
    with (
        foreign_container(dead) as leftover,
        foreign_container({**dead, INSTANCE: living.id}) as of_a_living_service,
        foreign_container({**dead, OWNER: new_owner()}) as of_another_owner,
        foreign_container({}) as unrelated,
    ):
        assert [one.container for one in await backend.leftovers()] == [leftover.id]
        removed = backend.stats().leaked_removed
        assert await backend.sweep() == 1
        assert await backend.sweep() == 0
        assert backend.stats().leaked_removed == removed + 1
        for kept in (of_a_living_service, of_another_owner, unrelated):
            kept.reload()
            assert kept.status == "running"
    assert (await python(ours, "1")).status is TurnStatus.OK
    living.close()


async def test_what_an_engine_lists_and_no_longer_has_is_no_leftover(
    backend: DockerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, it starts with such entries now and then, and keeps them until it starts again. The entry is made up, as
    it cannot be brought about at will; that the container is not there is said by the engine."""
    labels = {OWNER: backend.facts["owner"], INSTANCE: "0" * 16, SANDBOX: "1" * 16}
    entry = {"Id": "f" * 64, "State": "dead", "Status": "Dead", "Labels": labels}
    monkeypatch.setattr(backend._engine.client, "containers", lambda **_: [entry])
    assert await backend.leftovers() == []
    assert await backend.sweep() == 0
    assert backend.stats().leaked_removed == 0
