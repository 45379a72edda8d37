"""Certificates: who is let in, who is not and learns why, and what happens when the files change under a server."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from certificates import client, make, serving, tls
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import eventually

import turnwire
from turnwire.cli import launch
from turnwire.client import ConnectionSecurity, ToolClient, TrainerClient
from turnwire.config import convert
from turnwire.errors import ConfigError, ExhaustedError, InvalidRequestError, TurnwireError, UnavailableError
from turnwire.security.check import check_client, check_server
from turnwire.security.config import QuotasConfig, TlsConfig
from turnwire.serving import Server, ServerConfig
from turnwire.v1 import tool_pb2, tool_pb2_grpc


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another CA."""
    return make(tmp_path_factory.mktemp("foreign"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(made, tmp_path / "certificates"))


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[Server]:
    async with serving(ServerConfig(tls=tls(folder))) as running:
        yield running


async def test_both_sides_know_each_other_by_their_certificates(server: Server, folder: Path) -> None:
    async with turnwire.connect_async(trainer=server.address, security=client(folder)) as there:
        assert (await there.trainer.get_run("mine")).run_id == "mine"
    with await asyncio.to_thread(turnwire.connect, trainer=server.address, security=client(folder)) as blocking:
        assert (await asyncio.to_thread(blocking.trainer.get_run, "mine")).run_id == "mine"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"certificate": None, "key": None}, "certificate of yours"),
        ({"certificate": "foreign/client.crt", "key": "foreign/client.key"}, "certificate of yours"),
        ({"ca": None, "certificate": None, "key": None}, "ask for TLS"),
        ({"ca": "foreign/ca.crt"}, "not vouched for"),
        ({"ca": "system"}, "not vouched for"),
        ({"server_name": "somewhere.else"}, "server_name"),
    ],
    ids=["no certificate", "a stranger's certificate", "plaintext", "a stranger's CA", "public CAs", "another name"],
)
async def test_who_is_not_let_in_is_told_what_to_look_at_and_others_are_served(
    server: Server, folder: Path, foreign: Path, changes: dict[str, Any], told: str
) -> None:
    values = {
        key: str(foreign / Path(value).name) if value and value.startswith("foreign/") else value
        for key, value in changes.items()
    }
    refused = turnwire.connect_async(trainer=server.address, security=client(folder, **values), timeout=1.5)
    with pytest.raises(UnavailableError, match=f"no trainer service answers at {server.address}: .*{told}"):
        await refused.__aenter__()
    async with TrainerClient(server.address, client(folder)) as other:
        assert await other.is_healthy()


async def test_a_plaintext_service_says_so_to_who_speaks_tls(folder: Path) -> None:
    async with serving(ServerConfig()) as plain:
        with pytest.raises(UnavailableError, match="speaks plaintext"):
            await turnwire.connect_async(tools=plain.address, security=client(folder), timeout=1.0).__aenter__()


async def test_a_name_that_the_address_does_not_have_is_given_by_hand(server: Server, folder: Path) -> None:
    address = server.address.replace("127.0.0.1", "127.0.0.2")  # in no certificate
    async with serving(ServerConfig(host="127.0.0.2", tls=tls(folder))) as elsewhere:
        address = elsewhere.address
        async with TrainerClient(address, client(folder)) as stranger:
            assert not await stranger.is_healthy(1.0)
        async with TrainerClient(address, client(folder, server_name="trainer")) as known:
            assert await known.is_healthy()


def copy(source: Path, to: Path, *names: str) -> None:
    """As a rotation does: each file is another one from one moment to the next."""
    for name in names:
        shutil.copy(source / name, to / f"{name}.new")
        (to / f"{name}.new").rename(to / name)


async def shown(address: str, ca: Path) -> int:
    """The serial number of the certificate that the server shows, by a client that is not ours; 0: none of this CA."""
    host, port = address.split(":")

    def look() -> int:
        context = ssl.create_default_context(cafile=str(ca))
        try:
            with (
                socket.create_connection((host, int(port)), 5) as plain,
                context.wrap_socket(plain, server_hostname=host) as secure,
            ):
                return int(secure.getpeercert()["serialNumber"], 16)  # type: ignore[index, arg-type]
        except ssl.SSLCertVerificationError:
            return 0

    return await asyncio.to_thread(look)


async def test_a_changed_certificate_is_shown_without_a_restart_and_calls_that_run_go_on(
    server: Server, folder: Path, foreign: Path
) -> None:
    async with ToolClient(server.address, client(folder)) as before:
        stub = tool_pb2_grpc.ToolServiceStub(before.channel)
        stream = stub.Interact()
        await stream.write(tool_pb2.InteractRequest())
        assert (await stream.read()).HasField("opened")

        copy(foreign, folder, "trainer.crt", "trainer.key", "ca.crt")

        async def another() -> bool:
            return await shown(server.address, foreign / "ca.crt") != 0

        await eventually(another, pause=0.1)
        async with ToolClient(server.address, client(foreign)) as new:
            assert await new.is_healthy()
        await stream.write(tool_pb2.InteractRequest())
        assert (await stream.read()).HasField("opened")
        stream.cancel()


async def test_half_of_a_change_is_not_used(
    server: Server, folder: Path, foreign: Path, made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy(foreign, folder, "trainer.crt")  # its key is still the old one

    async def noticed() -> bool:
        assert await shown(server.address, made / "ca.crt") != 0
        return "what they said before stays" in caplog.text

    await eventually(noticed, pause=0.1)
    assert "KEY_VALUES_MISMATCH" in caplog.text
    (folder / "trainer.crt").unlink()
    await asyncio.sleep(1.1)
    assert await shown(server.address, made / "ca.crt") != 0
    copy(foreign, folder, "trainer.crt", "trainer.key")

    async def whole() -> bool:
        return await shown(server.address, foreign / "ca.crt") != 0

    await eventually(whole, pause=0.1)


async def test_a_client_takes_up_its_changed_certificate_with_its_next_call(folder: Path) -> None:
    """The server tells clients apart by their certificates, and lets each have one call in flight."""
    make(folder, "second")
    config = ServerConfig(tls=tls(folder), quotas=QuotasConfig(streams=1))
    async with serving(config) as server, ToolClient(server.address, client(folder)) as tools:
        stream = tool_pb2_grpc.ToolServiceStub(tools.channel).Interact()
        await stream.write(tool_pb2.InteractRequest())
        assert (await stream.read()).HasField("opened")
        with pytest.raises(ExhaustedError, match="certificate client has 1 calls"):
            await tools.get_status()
        for end in ("crt", "key"):
            shutil.copy(folder / f"second.{end}", folder / f"client.{end}")

        async def another() -> bool:
            try:
                await tools.get_status()
            except ExhaustedError:
                return False
            return True

        await eventually(another, pause=0.1)
        await stream.write(tool_pb2.InteractRequest())  # on the old connection still
        assert (await stream.read()).HasField("opened")
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


def test_certificates_of_the_script_hold_for_openssl(made: Path) -> None:
    for name in ("tool", "rollout", "trainer", "client"):
        verify = ["openssl", "verify", "-CAfile", made / "ca.crt", made / f"{name}.crt"]
        assert subprocess.run(verify, capture_output=True, check=False).returncode == 0
        text = subprocess.run(
            ["openssl", "x509", "-in", made / f"{name}.crt", "-noout", "-text"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for host in (f"DNS:{name}", f"DNS:turnwire-{name}.turnwire.svc", "DNS:localhost", "IP Address:127.0.0.1"):
            assert host in text
    assert {file.stat().st_mode & 0o077 for file in made.iterdir()} == {0}


def test_the_script_keeps_what_is_there_and_adds_what_is_missing(folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "tool.crt").unlink()
    make(folder, "more", HOSTS="train.example.org 10.0.0.7 fe80::1")
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert set(after) - set(before) == {"more.crt", "more.key"}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"tool.crt", "tool.key", "ca.srl"}
    text = subprocess.run(
        ["openssl", "x509", "-in", folder / "more.crt", "-noout", "-text"], capture_output=True, text=True, check=True
    ).stdout
    for host in ("DNS:train.example.org", "IP Address:10.0.0.7", "IP Address:FE80:0:0:0:0:0:0:1"):
        assert host in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": "0.0.0.0"}, "set tls"),
        ({"host": "::"}, "set tls"),
        ({"host": "10.0.0.7", "tokens": "t"}, "show all tokens"),
        ({"host": "10.0.0.7", "tokens": "t", "allow_plaintext_beyond_loopback": True}, "show all tokens"),
    ],
)
def test_plaintext_beyond_loopback_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(values, ServerConfig)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"certificate": "c"}, "go together"),
        ({"key": "k", "ca": "c"}, "go together"),
        ({"certificate": "c", "key": "k"}, "name the ca"),
        ({"server_name": "tool"}, "name the ca"),
    ],
)
def test_a_client_without_what_belongs_together_is_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(values, ConnectionSecurity)


async def test_a_token_is_not_sent_in_plaintext_to_another_machine(folder: Path) -> None:
    security = ConnectionSecurity(token_file=str(folder / "admin.token"))
    for target in ("10.0.0.7:50051", "tool:50051", "127.0.0.1.example.org:1", "[2001:db8::1]:50051"):
        with pytest.raises(InvalidRequestError, match=r"not sent to .* in plaintext"):
            ToolClient(target, security)
        assert [problem.key for problem in check_client(security, [target])] == ["client"]
    for target in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
        await ToolClient(target, security).close()


def test_a_check_names_every_file_that_cannot_be_used(folder: Path, foreign: Path, tmp_path: Path) -> None:
    assert check_server(tls(folder), str(folder / "tokens.yaml")) == []
    assert check_client(client(folder, "admin"), ["tool:50051"]) == []
    (tmp_path / "text").write_text("certainly not PEM")
    nothing, text = str(tmp_path / "nothing"), str(tmp_path / "text")
    problems = check_server(TlsConfig(certificate=nothing, key=nothing, client_ca=text), nothing)
    assert [problem.key for problem in problems] == [
        "server.tls.certificate",
        "server.tls.key",
        "server.tls.client_ca",
        "server.tokens",
    ]
    mixed = TlsConfig(certificate=str(folder / "tool.crt"), key=str(foreign / "tool.key"))
    assert [problem.key for problem in check_server(mixed, None)] == ["server.tls.certificate"]
    problems = check_client(client(folder, ca=text, certificate=text, token_file=text), ["tool:50051"])
    assert [problem.key for problem in problems] == ["client.ca", "client.certificate", "client.token_file"]
    assert "certainly" not in str(problems)


def test_the_check_of_a_whole_config_names_them_by_their_keys(tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    overrides = [f"services.{name}.server.tokens={nothing}" for name in ("tool", "rollout", "trainer")]
    overrides += [f"services.{name}.client={{ca: {nothing}}}" for name in ("rollout", "trainer")]
    assert {problem.key for problem in launch.examine("demo", overrides).problems} == {
        "services.tool.server.tokens",
        "services.rollout.server.tokens",
        "services.rollout.client.ca",
        "services.trainer.server.tokens",
        "services.trainer.client.ca",
    }


async def test_files_that_are_not_there_are_named_when_a_client_is_made(folder: Path) -> None:
    with pytest.raises(TurnwireError, match=r"ca: .*nothing\.crt cannot be read"):
        ToolClient("127.0.0.1:1", client(folder, ca=str(folder / "nothing.crt")))


async def test_probes_that_speak_no_tls_have_a_port_where_health_alone_is_served(folder: Path) -> None:
    free = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = free.sockets[0].getsockname()[1]
    free.close()
    await free.wait_closed()
    async with (
        serving(ServerConfig(tls=tls(folder), tokens=str(folder / "tokens.yaml"), probe_port=port)) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="turnwire.v1.ToolService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        tools: Any = tool_pb2_grpc.ToolServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tools.ListTools(tool_pb2.ListToolsRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await server.drain()
        answer = await health.Check(health_pb2.HealthCheckRequest(service="turnwire.v1.ToolService"))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_connection_that_has_grown_old_is_replaced_and_no_call_notices(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwire.serving.CONNECTION_AGE_MS", 200)
    async with (
        serving(ServerConfig(tls=tls(folder))) as server,
        ToolClient(server.address, client(folder)) as tools,
    ):
        stub = tool_pb2_grpc.ToolServiceStub(tools.channel)
        stream = stub.Interact()
        connections = set()
        while len(connections) < 5:
            await stream.write(tool_pb2.InteractRequest())
            assert (await stream.read()).HasField("opened")
            calls = [stub.GetStatus(tool_pb2.GetStatusRequest()) for _ in range(10)]
            await asyncio.gather(*calls)
            connections |= {dict(await call.trailing_metadata())["peer"] for call in calls}
            assert (await stub.Interact(iter([tool_pb2.InteractRequest()])).read()).HasField("opened")


async def test_connections_that_say_nothing_or_nonsense_hold_up_nobody(server: Server, folder: Path) -> None:
    host, port = server.address.split(":")
    async with contextlib.AsyncExitStack() as stack:
        for number in range(300):
            _, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(
                (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", b"PRI * HTTP/2.0\r\n\r\n")[number % 4]
            )
        async with TrainerClient(server.address, client(folder)) as other:
            await other.wait_until_ready(10.0)
            assert (await other.get_run("mine")).run_id == "mine"
