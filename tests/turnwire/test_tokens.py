"""Tokens and roles: each method for those who may, a typed refusal for the others, and no token where people read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from certificates import add_token, client, make, serving, tls
from commands import ROOT
from waiting import PROGRAM, eventually

from turnwire.client import ConnectionSecurity, RolloutClient, ToolClient, TrainerClient, open_channel
from turnwire.errors import ConfigError, PermissionDeniedError, TurnwireError, UnauthenticatedError
from turnwire.security.roles import NEEDED, Role
from turnwire.security.tokens import TokenTable, read_token
from turnwire.serving import Server, ServerConfig
from turnwire.v1 import common_pb2, rollout_pb2, tool_pb2, trainer_pb2


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("certificates"))
    for role in Role:
        add_token(folder, f"a-{role.label}", role.label)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(made, tmp_path / "certificates"))


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[Server]:
    config = ServerConfig(tls=tls(folder, mutual=False), tokens=str(folder / "tokens.yaml"))
    async with serving(config) as running:
        yield running


def contract() -> set[str]:
    """The full name of every method."""
    return {
        f"/{service.full_name}/{method.name}"
        for module in (tool_pb2, rollout_pb2, trainer_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def test_every_method_of_the_contract_has_a_role_and_nothing_else_has() -> None:
    assert {method for method in NEEDED if "/turnwire." in method} == contract()


@pytest.mark.parametrize("role", Role, ids=lambda role: role.label)
async def test_a_role_may_call_what_it_may_and_is_told_which_role_the_rest_needs(
    server: Server, folder: Path, role: Role
) -> None:
    async with open_channel(server.address, client(folder, f"a-{role.label}")) as channel:
        for method in sorted(contract()):
            code, details = await ended(channel, method)
            if role >= NEEDED[method]:
                assert code is grpc.StatusCode.OK, method
            else:
                assert code is grpc.StatusCode.PERMISSION_DENIED, method
                name = method.rpartition("/")[2]
                needed = f"{name} needs the role {NEEDED[method].label}; the token of a-{role.label} has the role"
                assert needed in details


async def ended(channel: grpc.aio.Channel, method: str, *metadata: tuple[str, str]) -> tuple[grpc.StatusCode, str]:
    """The status of a call with one empty message, of whatever kind the method is."""
    call: Any = channel.stream_stream(method)(iter([b""]), timeout=10, metadata=metadata)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return await call.code(), ""


@pytest.mark.parametrize("shown", [(), (("authorization", ""),), (("authorization", "Bearer "),)])
async def test_nobody_calls_anything_without_a_token(
    server: Server, folder: Path, shown: tuple[tuple[str, str], ...]
) -> None:
    async with open_channel(server.address, client(folder)) as channel:
        for method in sorted({*contract(), *NEEDED}):
            code, _ = await ended(channel, method, *shown)
            assert code is grpc.StatusCode.UNAUTHENTICATED, method


@pytest.mark.parametrize(
    "shown",
    [
        "Bearer token-of-a-admi",
        "Bearer token-of-a-adminn",
        "Bearer Token-of-a-admin",
        "Digest token-of-a-admin",
        "Bearer  token-of-a-admin",
        "token-of-a-admin",
        f"Bearer {hashlib.sha256(b'token-of-a-admin').hexdigest()}",
        "Bearer " + "x" * 4000,
    ],
)
async def test_a_wrong_token_is_refused_without_being_repeated_and_others_are_served(
    server: Server, folder: Path, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        ToolClient(server.address, client(folder)) as stranger,
        ToolClient(server.address, client(folder, "admin")) as known,
    ):
        call: Any = stranger.channel.unary_unary("/turnwire.v1.ToolService/ListTools")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", metadata=(("authorization", shown),))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "not known" in str(caught.value.details())
        assert shown not in f"{caught.value!r}{caught.value.trailing_metadata()}{caplog.text}"
        await known.get_status()
        assert await stranger.is_healthy(), "health needs no token"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_scheme_is_written_in_any_case(server: Server, folder: Path, scheme: str) -> None:
    async with open_channel(server.address, client(folder)) as channel:
        call: Any = channel.unary_unary("/turnwire.v1.ToolService/ListTools")
        await call(b"", metadata=(("authorization", f"{scheme} token-of-a-viewer"),))


async def test_every_client_raises_the_refusal_as_its_class(server: Server, folder: Path) -> None:
    tensor = ("w", common_pb2.DATA_TYPE_FLOAT32, [4_000_000], bytes(16_000_000))
    for security, kind in (
        (client(folder), UnauthenticatedError),
        (client(folder, "viewer"), PermissionDeniedError),
    ):
        async with (
            ToolClient(server.address, security) as tools,
            RolloutClient(server.address, security) as rollout,
            TrainerClient(server.address, security) as trainer,
        ):
            with pytest.raises(kind):
                await tools.open("mine", ["python"])
            with pytest.raises(kind):
                await tools.execute("python", "1")
            with pytest.raises(kind):
                await rollout.generate([1], 1)
            with pytest.raises(kind):
                async for _ in rollout.run([]):
                    pass
            with pytest.raises(kind):
                await rollout.update_weights([tensor], 1)
            with pytest.raises(kind):
                await trainer.start_run("mine", "")
            if kind is UnauthenticatedError:
                with pytest.raises(kind):
                    async for _ in trainer.watch_run("mine"):
                        pass


async def test_tokens_come_and_go_without_a_restart(
    server: Server, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = folder / "tokens.yaml"
    async with ToolClient(server.address, client(folder, "viewer")) as viewer:
        await viewer.get_status()
        whole = file.read_text()

        async def may(*, call: bool) -> bool:
            try:
                await viewer.get_status()
            except UnauthenticatedError:
                return not call
            return call

        file.write_text("".join(line for line in whole.splitlines(keepends=True) if "name: viewer" not in line))
        await eventually(lambda: may(call=False), pause=0.1)
        file.write_text(whole)
        await eventually(lambda: may(call=True), pause=0.1)

        file.write_text("a-broken-file-that-holds-hunter2")

        async def noticed() -> bool:
            await viewer.get_status()
            return "what they said before stays" in caplog.text

        await eventually(noticed, pause=0.1)
        assert "hunter2" not in caplog.text


async def test_a_client_shows_its_new_token_with_the_next_call_after_a_change(server: Server, folder: Path) -> None:
    async with ToolClient(server.address, client(folder, "viewer")) as tools:
        with pytest.raises(PermissionDeniedError):
            await tools.execute("python", "1")
        shutil.copy(folder / "admin.token", folder / "viewer.token")

        async def allowed() -> bool:
            try:
                await tools.execute("python", "1")
            except PermissionDeniedError:
                return False
            return True

        await eventually(allowed, pause=0.1)


DIGEST = hashlib.sha256(b"x").hexdigest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "list of"),
        ("hunter2", "list of"),
        ("- hunter2", "name, role, sha256"),
        ("- {name: hunter2", "list of"),
        ("tokens: [hunter2]", "list of"),
        ("[]", "list of"),
        (f"- {{name: a, role: admin, sha256: {DIGEST}, token: hunter2}}", "nothing else"),
        (f"- {{name: a, role: root, sha256: {DIGEST}}}", "admin, rollout, tool, trainer, viewer"),
        ("- {name: a, role: admin, sha256: hunter2}", "never the token itself"),
        (f"- {{name: '', role: admin, sha256: {DIGEST}}}", "name"),
        (f"- {{name: a, role: [admin], sha256: {DIGEST}}}", "no role"),
        ("- {name: a, role: admin, sha256: 7}", "64 hexadecimal"),
        (f"- {{name: a, role: admin, sha256: {'7' * 64}}}", "64 hexadecimal digits in quotes"),
        (f"- {{name: a, role: admin, sha256: 12e{'7' * 61}}}", "64 hexadecimal digits in quotes"),
        (f"- &a {{name: a, role: admin, sha256: {DIGEST}}}\n- {{name: b, role: tool, sha256: {DIGEST}}}", "same token"),
        (
            f"- {{name: a, role: tool, sha256: {DIGEST}}}\n- {{name: a, role: tool, sha256: {DIGEST[::-1]}}}",
            "'a' is there twice",
        ),
    ],
)
def test_a_tokens_file_that_is_none_is_refused_without_showing_what_it_holds(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        TokenTable(str(file))
    assert "hunter2" not in f"{caught.value}{caught.value.__cause__}"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="list of"):
        TokenTable(str(file))


@pytest.mark.parametrize("content", [b"", b"\n\n", "schlüssel".encode(), b"two words", b"two\nlines", b"bell\x07"])
def test_a_token_file_that_holds_none_is_refused_without_showing_what_it_holds(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="holds no token") as caught:
        read_token(str(file))
    assert not content.strip() or content.decode().strip() not in str(caught.value)


def test_a_token_is_in_no_repr(folder: Path) -> None:
    table = TokenTable(str(folder / "tokens.yaml"))
    assert table.holder("Bearer token-of-a-admin").role is Role.ADMIN
    security = ConnectionSecurity(token_file=str(folder / "a-admin.token"))
    seen = f"{table!r}{table._file.get()!r}{security!r}{vars(table)!r}"
    assert "token-of-a-admin" not in seen


async def test_a_json_list_is_a_tokens_file_too(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(f'[{{"name": "a", "role": "tool", "sha256": "{DIGEST.upper()}"}}]')
    assert TokenTable(str(file)).holder("Bearer x").name == "a"


async def test_the_service_says_how_to_show_a_token(server: Server, folder: Path) -> None:
    async with ToolClient(server.address, client(folder)) as tools:
        with pytest.raises(TurnwireError, match="authorization: Bearer"):
            await tools.get_status()


def turnwire_tools(address: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`turnwire tools --target`, with the options or the environment."""
    command = [sys.executable, "-m", "turnwire.cli", "tools", "--json", "--target", address, *options]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=PROGRAM, check=False, cwd=ROOT
    )


@contextlib.contextmanager
def tool_service(config: Path) -> Iterator[str]:
    """The service as a process; its paths start at the config's folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tool_service", "--config", str(config)]
    with subprocess.Popen(command, cwd=config.parent, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield running.stdout.readline().removeprefix("listening on ").strip()
        finally:
            running.terminate()
    assert running.returncode == 0


def test_commands_show_what_their_options_or_the_environment_say(folder: Path) -> None:
    config = folder / "tool.yaml"
    server = {"tls": {"certificate": "tool.crt", "key": "tool.key", "client_ca": "ca.crt"}, "tokens": "tokens.yaml"}
    config.write_text(json.dumps({"server": server, "plugins": {"exclude": ["python", "bash", "sql", "unit_tests"]}}))
    files = {"ca": "ca.crt", "certificate": "client.crt", "key": "client.key", "token_file": "viewer.token"}
    paths = {name: str(folder / file) for name, file in files.items()}
    options = [part for name, path in paths.items() for part in (f"--{name.replace('_', '-')}", path)]
    with tool_service(config) as address:
        shown = turnwire_tools(address, *options)
        assert shown.returncode == 0, shown.stderr
        assert [tool["name"] for tool in json.loads(shown.stdout)] == ["search"]
        from_environment = turnwire_tools(address, **{f"TURNWIRE_{name.upper()}": path for name, path in paths.items()})
        assert json.loads(from_environment.stdout) == json.loads(shown.stdout)

        without_token = turnwire_tools(address, *options[:-2])
        assert without_token.returncode == 1
        assert "asks for a token" in without_token.stderr
        without_ca = turnwire_tools(address, "--certificate", paths["certificate"], "--key", paths["key"])
        assert without_ca.returncode == 2
        assert "name the ca" in without_ca.stderr
