"""A second Docker engine of the tests' own, which may be stopped, killed and filled without harm to anybody's
containers."""

from __future__ import annotations

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
from waiting import PATIENCE

from tool_service.sandbox.docker_config import DEFAULT_IMAGE

BASE_IMAGE = "python:3.11-slim-bookworm"
"""Under the name of the default image, in a fraction of its size."""


class OwnEngine:
    """`dockerd` with folders and a socket of its own, without any network."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.host = f"unix://{folder}/docker.sock"
        self.data = f"{folder}/data"

    def start(self) -> None:
        folder = self._folder
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                (
                    # In a network namespace of its own: an engine without a bridge deletes the other engine's.
                    *("unshare", "--net"),
                    *("dockerd", "--data-root", self.data, "--exec-root", f"{folder}/exec", "-H", self.host),
                    *("--pidfile", f"{folder}/pid", "--bridge=none", "--iptables=false", "--ip-forward=false"),
                ),
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + PATIENCE
        while self.docker("info").returncode != 0:
            assert self._process.poll() is None, self.log()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def docker(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["docker", "-H", self.host, *words], capture_output=True, check=False)

    def containers(self) -> list[str]:
        """Ids, names and states of all that there are: an engine that was killed lists some that it no longer has."""
        listed = self.docker("ps", "-aq", "--no-trunc").stdout.decode().split()
        found = [self.docker("inspect", "--format", "{{.Id}} {{.Name}} {{.State.Status}}", one) for one in listed]
        return [one.stdout.decode().strip() for one in found if one.returncode == 0]

    def clear(self) -> list[str]:
        """Have it run, and hold nothing; what was there once all that ends by itself had had its time."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        deadline = time.monotonic() + PATIENCE
        while (left := self.containers()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for one in left:
            self.docker("rm", "-f", "-v", one.split()[0])
        return left

    def log(self) -> str:
        return (self._folder / "log").read_text()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        assert self._process is not None
        containerd = psutil.Process(int((self._folder / "exec/containerd/containerd.pid").read_text()))
        self._process.send_signal(how)
        self._process.wait(PATIENCE)
        with contextlib.suppress(psutil.NoSuchProcess):  # it would be in the next one's way
            containerd.kill()
            containerd.wait(PATIENCE)


def serve() -> Iterator[OwnEngine]:
    """An engine with the default image, on a disk of its own in memory; for a fixture of tests that need `docker`."""
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        pytest.skip("a second engine needs root and dockerd")
    folder = Path(tempfile.mkdtemp(prefix="tw-"))  # short: sockets are below it
    made = OwnEngine(folder)
    os.mkdir(made.data)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", made.data], check=True)
    made.start()
    with subprocess.Popen(["docker", "save", BASE_IMAGE], stdout=subprocess.PIPE) as saved:
        subprocess.run(["docker", "-H", made.host, "load"], stdin=saved.stdout, capture_output=True, check=True)
    assert saved.returncode == 0
    assert made.docker("tag", BASE_IMAGE, DEFAULT_IMAGE).returncode == 0
    yield made
    made.stop()
    while subprocess.run(["umount", made.data], capture_output=True, check=False).returncode == 0:
        pass  # the engine mounts it onto itself
    shutil.rmtree(folder)
