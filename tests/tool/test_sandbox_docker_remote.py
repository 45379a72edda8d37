"""An engine that is reached over TCP with certificates on both sides: the real one, behind a relay."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from docker_harness import containers, docker_config, new_owner, python, running_backend

from tool_service.sandbox import SandboxLimits, SandboxUnavailable
from tool_service.sandbox.docker import DockerBackend
from tool_service.sandbox.docker_config import DockerConfig, endpoint_of

pytestmark = [
    pytest.mark.needs("docker"),
    pytest.mark.skipif(not shutil.which("openssl"), reason="certificates are made with openssl"),
]


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, capture_output=True, check=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, cert.pem and key.pem, as Docker's clients have them; the server shows the same."""
    folder = tmp_path_factory.mktemp("tls")
    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl(folder, *made, "-subj", "/CN=ca", "-keyout", "ca-key.pem", "-out", "ca.pem")
    openssl(folder, "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-keyout", "key.pem", "-out", "request")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    signing = ("x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial")
    openssl(folder, *signing, "-days", "2", "-extfile", "names", "-out", "cert.pem")
    return folder


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.fixture
async def address(certificates: Path) -> AsyncIterator[str]:
    """tcp://host:port of a relay to this machine's engine."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.pem"))
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine = await asyncio.open_unix_connection(endpoint_of(DockerConfig()).unix_path)
        ways = (relay(reader, engine[1]), relay(engine[0], writer))
        await asyncio.gather(*ways, return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_a_remote_engine_is_driven_over_tls(address: str, certificates: Path) -> None:
    owner = new_owner()
    async with running_backend(owner, host=address, tls_folder=str(certificates)) as backend:
        sandbox = await backend.create(SandboxLimits())
        data = bytes(range(256)) * 8192
        await sandbox.put_file("f", data)
        assert await sandbox.get_file("f", 4 << 20) == data
        assert (await python(sandbox, "x = 41\nx + 1")).stdout == b"42\n"
        assert len(containers(owner)) == 1
        await sandbox.kill()
        assert containers(owner) == []


async def test_a_client_without_a_certificate_of_the_engines_authority_is_told(
    address: str, tmp_path: Path, certificates: Path
) -> None:
    for name in ("cert.pem", "key.pem"):
        shutil.copy(certificates / name, tmp_path / name)
    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl(tmp_path, *made, "-subj", "/CN=another", "-keyout", "ca-key.pem", "-out", "ca.pem")
    with pytest.raises(SandboxUnavailable, match="cannot be reached"):
        await DockerBackend(docker_config(host=address, tls_folder=str(tmp_path))).start()
