"""`python -m turnwire.health`, which the health checks of containers run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compose_stack import ROOT, free_port

from turnwire.security.config import TlsConfig
from turnwire.serving import Server, ServerConfig


def health(*arguments: str, folder: Path | None = None, name: str = "client") -> subprocess.CompletedProcess[str]:
    """Run it; with the certificates of a folder, as `name`."""
    environment = dict(os.environ)
    if folder is not None:
        environment |= {
            "TURNWIRE_CA": str(folder / "ca.crt"),
            "TURNWIRE_CERTIFICATE": str(folder / f"{name}.crt"),
            "TURNWIRE_KEY": str(folder / f"{name}.key"),
        }
    command = [sys.executable, "-m", "turnwire.health", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment, cwd=ROOT)


async def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Beside the event loop that serves."""
    return await asyncio.to_thread(lambda: health(*arguments, folder=folder))


async def test_it_tells_whether_a_service_serves() -> None:
    server = Server(ServerConfig(), ["turnwire.v1.ToolService"])
    await server.start()
    try:
        assert (await run(server.address)).returncode == 0
        await server.set_serving(False)
        refused = await run(server.address)
        assert (refused.returncode, refused.stderr) == (1, f"{server.address}: NOT_SERVING\n")
        assert (await run("--alive", server.address)).returncode == 0
    finally:
        await server.stop(0)


@pytest.mark.parametrize("flag", [(), ("--alive",)])
def test_where_nobody_answers_it_says_so_in_time(flag: tuple[str, ...]) -> None:
    done = health(*flag, "--timeout", "0.5", f"127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "DEADLINE_EXCEEDED" in done.stderr or "UNAVAILABLE" in done.stderr


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    subprocess.run([ROOT / "deploy/certificates/make", tmp_path], check=True, capture_output=True)
    return tmp_path


async def test_it_shows_its_certificate_where_a_service_asks_for_one(certificates: Path) -> None:
    folder = certificates
    tls = TlsConfig(
        certificate=str(folder / "tool.crt"), key=str(folder / "tool.key"), client_ca=str(folder / "ca.crt")
    )
    server = Server(ServerConfig(tls=tls), ["turnwire.v1.ToolService"])
    await server.start()
    try:
        assert (await run(server.address, folder=folder)).returncode == 0
        assert (await run("--timeout", "1", server.address)).returncode == 1
    finally:
        await server.stop(0)


def test_it_loads_nothing_heavy() -> None:
    code = "import sys, turnwire.health; print({'torch', 'numpy', 'rich', 'opentelemetry'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"
