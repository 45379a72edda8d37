"""What the docker backend refuses before it makes anything: versions, addresses, images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tool_service.sandbox import SandboxLimits, SandboxUnavailable
from tool_service.sandbox.base import MIB
from tool_service.sandbox.docker_config import DockerConfig, endpoint_of
from tool_service.sandbox.docker_container import memory_bytes, specification
from tool_service.sandbox.docker_runtime import check_runtime, is_vulnerable, runc_version


@pytest.mark.parametrize(
    ("version", "vulnerable"),
    [
        ("1.0.0-rc6", True),  # CVE-2019-5736
        ("1.1.11", True),  # CVE-2024-21626
        ("1.1.12", True),
        ("1.1.5+ds1-1+deb12u1", True),
        ("1.2.7", True),
        ("1.2.8", False),
        ("1.3.2", True),
        ("1.3.3", False),
        ("1.4.0-rc.1", True),
        ("1.4.0-rc.2", True),
        ("1.4.0-rc.3", False),
        ("1.4.0", False),
        ("v1.5.1", False),
        ("2.0.0", False),
        ("unknown", True),
        ("", True),
    ],
)
def test_versions_of_runc_with_known_escapes_are_known(version: str, vulnerable: bool) -> None:
    assert is_vulnerable(version) is vulnerable


def engine_version(runc: str, commit: str = "") -> dict[str, Any]:
    return {"Components": [{"Name": "runc", "Version": runc, "Details": {"GitCommit": commit}}]}


def test_a_vulnerable_runtime_is_accepted_only_under_its_exact_version() -> None:
    version = engine_version("1.1.5+ds1", "1.1.5+ds1-1+deb12u1")
    assert runc_version(version) == "1.1.5+ds1-1+deb12u1", "a distribution's revision is part of it"
    for accepted in ("", "1.1.5", "1.1.5+ds1-1"):
        with pytest.raises(SandboxUnavailable, match=r"accept_runtime_version: \"1\.1\.5\+ds1-1\+deb12u1\""):
            check_runtime(DockerConfig(accept_runtime_version=accepted), version, "runc")
    assert check_runtime(DockerConfig(accept_runtime_version="1.1.5+ds1-1+deb12u1"), version, "runc").startswith(
        "runc "
    )
    assert check_runtime(DockerConfig(), engine_version("1.3.3", "v1.3.3-0-gd842d77"), "runc") == "runc 1.3.3"
    with pytest.raises(SandboxUnavailable, match="unknown"):
        check_runtime(DockerConfig(), {}, "runc")


def test_another_runtime_is_not_judged_by_the_version_of_runc() -> None:
    assert check_runtime(DockerConfig(runtime="runsc"), engine_version("1.1.5"), "runc") == "runsc"
    assert check_runtime(DockerConfig(), {}, "crun") == "crun"


@pytest.mark.parametrize("name", ["io.containerd.runc.v2", "mine"])
def test_runc_is_judged_under_each_of_its_names(name: str) -> None:
    runtimes = {"io.containerd.runc.v2": {"path": "runc"}, "mine": {"path": "/opt/bin/runc"}, "runsc": {"path": "x"}}
    with pytest.raises(SandboxUnavailable, match=r"runc 1\.3\.2"):
        check_runtime(DockerConfig(runtime=name), engine_version("1.3.2"), "runc", runtimes)
    assert check_runtime(DockerConfig(runtime="runsc"), engine_version("1.3.2"), "runc", runtimes) == "runsc"


def test_the_engine_is_where_the_configuration_or_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert endpoint_of(DockerConfig()).unix_path == "/var/run/docker.sock"
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/user/1000/docker.sock")
    assert endpoint_of(DockerConfig()).unix_path == "/run/user/1000/docker.sock"
    assert endpoint_of(DockerConfig(host="unix:///other.sock")).unix_path == "/other.sock"
    remote = endpoint_of(DockerConfig(host="tcp://engine:2375", allow_plaintext_engine=True))
    assert (remote.host, remote.port, remote.ssl_context()) == ("engine", 2375, None)


def test_a_remote_engine_without_tls_is_refused_unless_accepted_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DOCKER_TLS_VERIFY", raising=False)
    with pytest.raises(SandboxUnavailable, match="allow_plaintext_engine"):
        endpoint_of(DockerConfig(host="tcp://engine:2375"))
    with pytest.raises(SandboxUnavailable, match=r"lacks ca\.pem, cert\.pem, key\.pem"):
        endpoint_of(DockerConfig(host="tcp://engine", tls_folder=str(tmp_path)))
    for address in ("ssh://engine", "engine:2375", "unix://", "http://engine"):
        with pytest.raises(SandboxUnavailable, match="must be"):
            endpoint_of(DockerConfig(host=address))


def test_folders_together_stay_within_the_workspace_and_the_walls_behind_the_watchdog_are_wider() -> None:
    limits = SandboxLimits(memory_bytes=64 * MIB, workspace_bytes=160 * MIB, workspace_inodes=800, file_bytes=MIB)
    host = specification(DockerConfig(), limits, 12345, {})["HostConfig"]
    options = [dict(part.split("=") for part in text.split(",") if "=" in part) for text in host["Tmpfs"].values()]
    assert sum(int(one["size"]) for one in options) == 160 * MIB
    assert sum(int(one["nr_inodes"]) for one in options) == 800
    assert {one["uid"] for one in options} == {"12345"}
    assert memory_bytes(limits) > 160 * MIB + 32 * MIB, "full folders leave the supervisor room"
    assert host["Memory"] == host["MemorySwap"] == memory_bytes(limits)
