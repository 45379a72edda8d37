"""An engine that stops, dies and comes back: a second one of the tests' own, so that nobody else's containers die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from docker_harness import docker_config, new_owner, python, until

from tool_service.sandbox import SandboxLimits, SandboxUnavailable, TurnStatus, WarmPool
from tool_service.sandbox.docker import DockerBackend
from tool_service.sandbox.docker_config import DEFAULT_IMAGE

pytestmark = [
    pytest.mark.needs("docker"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("dockerd"), reason="a second engine needs root and dockerd"
    ),
]

LIMITS = SandboxLimits()


class OwnEngine:
    """`dockerd` with folders and a socket of its own, without any network."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.host = f"unix://{folder}/docker.sock"

    def start(self) -> None:
        folder = self._folder
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                (
                    # In a network namespace of its own: an engine without a bridge deletes the other engine's.
                    *("unshare", "--net"),
                    *("dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "-H", self.host),
                    *("--pidfile", f"{folder}/pid", "--bridge=none", "--iptables=false", "--ip-forward=false"),
                ),
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while self.docker("info").returncode != 0:
            assert self._process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def docker(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["docker", "-H", self.host, *words], capture_output=True, check=False)

    def containers(self) -> bytes:
        return self.docker("ps", "-aq").stdout

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        assert self._process is not None
        containerd = psutil.Process(int((self._folder / "exec/containerd/containerd.pid").read_text()))
        self._process.send_signal(how)
        self._process.wait(60)
        with contextlib.suppress(psutil.NoSuchProcess):  # it would be in the next one's way
            containerd.kill()
            containerd.wait(30)


@pytest.fixture(scope="module")
def engine() -> Iterator[OwnEngine]:
    folder = Path(tempfile.mkdtemp(prefix="tw-"))  # short: sockets are below it
    made = OwnEngine(folder)
    made.start()
    saved = subprocess.Popen(["docker", "save", DEFAULT_IMAGE], stdout=subprocess.PIPE)
    subprocess.run(["docker", "-H", made.host, "load"], stdin=saved.stdout, capture_output=True, check=True)
    assert saved.wait() == 0
    yield made
    made.stop()
    subprocess.run(["umount", f"{folder}/data"], check=False)  # the engine mounts it onto itself
    shutil.rmtree(folder)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_an_engine_that_goes_is_our_failure_and_one_that_comes_back_serves_again(
    engine: OwnEngine, how: signal.Signals
) -> None:
    backend = DockerBackend(docker_config(host=engine.host, control_seconds=10), owner=new_owner())
    await backend.start()
    pool = WarmPool(backend, size=1, limits=LIMITS, max_total=4, wait_seconds=60)
    await pool.start()
    taken = await pool.take()
    turn = asyncio.create_task(python(taken, "import time; time.sleep(60)", 60))
    await asyncio.sleep(0.3)

    await asyncio.to_thread(engine.stop, how)
    assert (await turn).status is TurnStatus.INFRA
    with pytest.raises(SandboxUnavailable, match=r"cannot be reached|did not start"):
        await backend.create(LIMITS)
    await pool.discard(taken)

    await asyncio.to_thread(engine.start)
    again = await pool.take()
    assert (await python(again, "1 + 1")).stdout == b"2\n"
    await pool.close()
    for _ in range(100):  # creations that failed while it was away end in the background
        await backend.sweep()
        if backend.stats().running == 0:
            break
        await asyncio.sleep(0.1)
    assert backend.stats().running == 0
    await backend.close()
    assert await until(lambda: engine.containers() == b"")


async def test_a_service_can_be_closed_while_its_engine_is_away(engine: OwnEngine) -> None:
    backend = DockerBackend(docker_config(host=engine.host, control_seconds=5), owner=new_owner())
    await backend.start()
    await backend.create(LIMITS)
    await asyncio.to_thread(engine.stop)
    await backend.close()
    await asyncio.to_thread(engine.start)
    assert await until(lambda: engine.containers() == b"")


async def test_a_service_does_not_start_without_its_engine(engine: OwnEngine) -> None:
    await asyncio.to_thread(engine.stop)
    try:
        with pytest.raises(SandboxUnavailable, match=f"{engine.host}.* cannot be reached"):
            await DockerBackend(docker_config(host=engine.host), owner=new_owner()).start()
    finally:
        await asyncio.to_thread(engine.start)
