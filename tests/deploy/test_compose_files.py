"""docker-compose.yml and its overlays: taken by every Compose there is, and with nothing in them that is refused."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_stack import ROOT, compose_commands

from rollout_service.config import RolloutServiceConfig
from tool_service.config import ToolServiceConfig
from trainer_service.config import TrainerServiceConfig
from turnwire.config import load

OVERLAYS = ("docker-compose.gpu.yml", "docker-compose.vllm.yml")
FILES = ["docker-compose.yml", *OVERLAYS]


def services(file: str = "docker-compose.yml") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / file).read_text())["services"]
    return found


@pytest.mark.needs("compose")
@pytest.mark.parametrize(
    "overlays", [chosen for size in range(3) for chosen in itertools.combinations(OVERLAYS, size)], ids="+".join
)
def test_every_compose_takes_it(overlays: tuple[str, ...], tmp_path: Path) -> None:
    files = [word for file in ("docker-compose.yml", *overlays) for word in ("-f", file)]
    for command in compose_commands():
        done = subprocess.run(
            [*command, *files, "config", "--services"],
            cwd=ROOT,
            env=os.environ | {"DOCKER_GID": "999", "TURNWIRE_SECRETS": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)
        assert {"tool", "rollout", "trainer", "prometheus", "grafana"} <= set(done.stdout.split()), command
        assert "obsolete" not in done.stderr, done.stderr


@pytest.mark.parametrize("name", services())
def test_a_service_is_limited_unprivileged_pinned_and_published_on_this_machine_alone(name: str) -> None:
    service = services()[name]
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & service.keys()
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    tag = service["image"].rpartition(":")[2].rpartition("-")[2].rstrip("}")
    assert tag
    assert tag != "latest"
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")
    if name != "client":  # which is run by hand, and ends by itself
        assert service["restart"] == "unless-stopped"
        assert service["logging"]["options"]["max-size"]


def test_secrets_are_files_and_reach_only_who_needs_them() -> None:
    """A service holds its own key and its own token, and no environment holds any."""
    for name, service in services().items():
        held = {secret["source"] for secret in service.get("secrets", ())}
        others = {"tool", "rollout", "trainer", "client", "admin"} - {name} - ({"admin"} if name == "client" else set())
        assert not {secret for secret in held if secret.endswith(("_key", "_token")) and secret.split("_")[0] in others}
        for variable, value in service.get("environment", {}).items():
            assert not any(word in variable for word in ("TOKEN", "KEY", "PASSWORD")) or value.startswith(
                "/run/secrets/"
            )


def test_the_engines_socket_is_given_to_the_tool_service_alone() -> None:
    assert [name for name, service in services().items() if "docker.sock" in str(service.get("volumes"))] == ["tool"]


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("tool.yaml", ToolServiceConfig),
        ("rollout.yaml", RolloutServiceConfig),
        ("rollout-vllm.yaml", RolloutServiceConfig),
        ("trainer.yaml", TrainerServiceConfig),
    ],
)
def test_the_services_configs_are_of_their_types_and_ask_for_certificates_and_tokens(
    file: str, kind: type[Any]
) -> None:
    config = load(ROOT / "deploy/compose" / file, kind)
    assert config.server.tls.client_ca
    assert config.server.tokens
    assert not config.server.allow_plaintext_beyond_loopback
