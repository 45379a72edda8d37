"""The commands of docs/kubernetes.md: what they make is what the pods mount, and what the services can use."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from k8s_manifests import K8S, ROOT, Object, cluster, kubectl, loaded, services_with_configs, workloads

import rollout_service.config
import tool_service.config
import trainer_service.config
from rollout_service.config import RolloutServiceConfig
from tool_service.config import ToolServiceConfig
from trainer_service.config import TrainerServiceConfig
from turnwire.security.config import ConnectionSecurity
from turnwire.security.tls import channel_credentials, server_credentials
from turnwire.security.tokens import TokenTable, read_token

DOCS = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
SHIM = """#!/bin/sh
exec {kubectl} "$@" --dry-run=client -o yaml >>{made}
"""


def commands(word: str) -> str:
    """The block of the docs with this in it."""
    (block,) = [block for block in re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL) if word in block]
    return str(block)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """What the docs' commands would have the cluster make."""
    home = tmp_path_factory.mktemp("clone")
    (home / "deploy" / "certificates").mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "certificates" / "make", home / "deploy" / "certificates" / "make")
    made, shim = home / "made.yaml", home / "bin" / "kubectl"
    shim.parent.mkdir()
    shim.write_text(SHIM.format(kubectl=kubectl(), made=made).replace(">>", "| sed '1i ---' >>").replace("exec ", ""))
    shim.chmod(0o755)
    path = f"{shim.parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-euc", commands("secret generic")], cwd=home, env=os.environ | {"PATH": path}, check=True)
    return [item for item in yaml.safe_load_all(made.read_text(encoding="utf-8")) if item]


def _written(secrets: list[Object], namespace: str, spec: Object, folder: Path) -> None:
    """The pod's secrets, as the kubelet would put them below `folder`."""
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for mount in container["volumeMounts"]:
            volume = next(item for item in spec["volumes"] if item["name"] == mount["name"])
            if "secret" not in volume:
                continue
            (secret,) = [
                item
                for item in secrets
                if (item["metadata"]["namespace"], item["metadata"]["name"])
                == (namespace, volume["secret"]["secretName"])
            ]
            place = folder / mount["mountPath"].lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            for name, data in secret["data"].items():
                (place / name).write_bytes(base64.b64decode(data))


def test_the_secrets_are_valid_and_none_is_made_that_no_pod_mounts(secrets: list[Object]) -> None:
    for item in secrets:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
    mounted = {
        (workload.namespace, volume["secret"]["secretName"])
        for workload in workloads(cluster("production"))
        for volume in workload.spec["volumes"]
        if "secret" in volume
    }
    assert {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in secrets} == mounted


def test_every_service_can_use_the_secrets_that_its_pod_mounts(secrets: list[Object], tmp_path: Path) -> None:
    for number, (workload, container, text) in enumerate(services_with_configs(cluster("production"))):
        folder = tmp_path / str(number)
        _written(secrets, workload.namespace, workload.spec, folder)
        here = text.replace("/run/secrets", f"{folder}/run/secrets")
        config = loaded(f"{container['name']}.yaml", here)
        if config.server.tls is not None:
            server_credentials(config.server.tls)
            TokenTable(config.server.tokens)
        if not isinstance(config, ToolServiceConfig):
            channel_credentials(config.client)
        check = {
            ToolServiceConfig: tool_service.config.check,
            RolloutServiceConfig: rollout_service.config.check,
            TrainerServiceConfig: trainer_service.config.check_service,
        }[type(config)]
        assert [problem for problem in check(config) if "/run/secrets" in problem.message] == []


def test_tokens_have_the_roles_that_their_holders_need(secrets: list[Object], tmp_path: Path) -> None:
    table = tmp_path / "tokens.yaml"
    data = {item["metadata"]["name"]: item["data"] for item in secrets}
    table.write_bytes(base64.b64decode(data["tokens"]["tokens.yaml"]))
    for name, role in (("rollout", "tool"), ("trainer", "trainer")):
        token = tmp_path / name
        token.write_bytes(base64.b64decode(data[f"{name}-token"]["token"]))
        assert TokenTable(str(table)).holder(f"Bearer {read_token(str(token))}").role.label == role


def test_certificates_name_the_targets_of_the_configs(secrets: list[Object], tmp_path: Path) -> None:
    names: dict[str, str] = {}
    for item in secrets:
        if "tls.crt" in item["data"]:
            path = tmp_path / "tls.crt"
            path.write_bytes(base64.b64decode(item["data"]["tls.crt"]))
            shown = subprocess.run(
                ["openssl", "x509", "-in", path, "-noout", "-ext", "subjectAltName,extendedKeyUsage"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            names[item["metadata"]["name"].removesuffix("-tls")] = shown
    for _, container, text in services_with_configs(cluster("production")):
        config = loaded(f"{container['name']}.yaml", text)
        for target in (getattr(config, "tool_target", ""), getattr(config, "rollout_target", "")):
            if target:
                host = target.rpartition(":")[0]
                assert f"DNS:{host}" in names[host.partition(".")[0]]
        if isinstance(getattr(config, "client", None), ConnectionSecurity):
            assert config.client.server_name is None
    assert all("TLS Web Client Authentication" in shown for shown in names.values())


def test_folders_that_the_docs_apply_are_there() -> None:
    folders = re.findall(r"kubectl apply -k (deploy/k8s/\S+)", DOCS)
    assert folders
    for folder in folders:
        assert (ROOT / folder / "kustomization.yaml").is_file()


def test_every_file_of_deploy_k8s_is_used() -> None:
    named = "\n".join(
        path.read_text(encoding="utf-8")
        for path in [*K8S.rglob("kustomization.yaml"), K8S / "nodes" / "make_seccomp_profile.py"]
    )
    for path in K8S.rglob("*"):
        if path.is_file() and path.name not in ("kustomization.yaml", "make_seccomp_profile.py", "prometheus.yml"):
            assert path.name in named, path
