"""The sandboxes of a tool pod, in a container that is hardened as the pod's manifest says.

Docker stands in for the kubelet: the same user, capabilities, seccomp profile, masks of /proc, read-only root and /tmp.
It cannot give one container a user namespace (hostUsers); our pods take nothing from having one but procMount, which
Docker gives without.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path

import pytest
from k8s_manifests import K8S, ROOT, Object, Workload, cluster, config_of, loaded, mounted, workloads
from pod_container import CONTAINERS, container_of

from tool_service.config import ToolServiceConfig

PROBE = """
import asyncio, json, sys
from tool_service.sandbox import ProcessBackend
from tool_service.sandbox.process import ProcessConfig

async def main(tier):
    backend = ProcessBackend(ProcessConfig(minimum_tier=tier))
    await backend.start()
    await backend.close()
    print(json.dumps(backend.facts))

asyncio.run(main(sys.argv[1]))
"""


def hardened(workload: Workload, container: Object) -> list[str]:
    """Options of `docker run` for a container of a pod."""
    own, pod = container["securityContext"], workload.spec["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    options = ["--read-only", "--network=none", "--security-opt=no-new-privileges"]
    options.append(f"--user={pod['runAsUser']}:{pod['runAsGroup']}")
    options += [f"--cap-drop={name}" for name in own["capabilities"]["drop"]]
    options += [f"--cap-add={name}" for name in own["capabilities"].get("add", [])]
    seccomp = own.get("seccompProfile") or pod["seccompProfile"]
    if seccomp["type"] == "Localhost":
        options.append(f"--security-opt=seccomp={K8S / 'nodes' / 'seccomp' / seccomp['localhostProfile']}")
    if own.get("appArmorProfile", {}).get("type") == "Unconfined":
        options.append("--security-opt=apparmor=unconfined")
    if own.get("procMount") == "Unmasked":
        options.append("--security-opt=systempaths=unconfined")
    assert mounted(workload, container)["/tmp"]["emptyDir"]["medium"] == "Memory"
    options += ["--tmpfs=/tmp:exec,mode=1777,size=256m"]
    return options


def tool_pod(overlay: str) -> tuple[Workload, Object, ToolServiceConfig]:
    objects = cluster(overlay)
    (workload,) = [item for item in workloads(objects) if item.name == "tool"]
    (container,) = workload.containers
    text = config_of(objects, workload, container)["tool.yaml"]
    return workload, container, loaded("tool.yaml", text)


def probe(options: list[str], tier: str) -> subprocess.CompletedProcess[str]:
    command = container_of(options, "-c", PROBE, tier)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def secrets_for(container: Object, folder: Path) -> list[str]:
    """The pod's secrets as volumes, made by deploy/certificates/make and readable as the kubelet makes them."""
    made = folder / "made"
    subprocess.run([ROOT / "deploy" / "certificates" / "make", made], check=True)
    sources = {
        "tls": {"tls.crt": "tool.crt", "tls.key": "tool.key", "ca.crt": "ca.crt"},
        "tokens": {"tokens.yaml": "tokens.yaml"},
    }
    places = {mount["mountPath"] for mount in container["volumeMounts"]}
    for secret, files in sources.items():
        assert f"/run/secrets/turnwire/{secret}" in places
        (folder / secret).mkdir()
        for name, source in files.items():
            (folder / secret / name).write_bytes((made / source).read_bytes())
    return [f"--volume={folder / secret}:/run/secrets/turnwire/{secret}:ro" for secret in sources]


pytestmark = CONTAINERS


@pytest.mark.parametrize("overlay", ["cpu", "production", "gvisor"])
def test_a_tool_pod_gives_the_tier_that_its_config_asks_for(overlay: str) -> None:
    workload, container, config = tool_pod(overlay)
    done = probe(hardened(workload, container), config.sandbox.minimum_tier)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # clearing up after itself needs its capabilities, too
    facts = json.loads(done.stdout)
    assert facts["tier"] == config.sandbox.minimum_tier
    assert facts["capabilities"] == "none"
    assert facts["network"] == "none"


@pytest.mark.parametrize("given", ["--security-opt=systempaths=unconfined", "--security-opt=seccomp="])
def test_the_isolated_tier_takes_each_of_what_the_production_pod_is_given(given: str) -> None:
    workload, container, config = tool_pod("production")
    assert config.sandbox.minimum_tier == "isolated"
    options = [option for option in hardened(workload, container) if not option.startswith(given)]
    assert len(options) == len(hardened(workload, container)) - 1
    done = probe(options, "isolated")
    assert done.returncode != 0
    assert "asks for at least 'isolated'" in done.stderr


@pytest.mark.parametrize("overlay", ["cpu", "production", "gvisor"])
def test_the_tool_service_serves_in_its_pod_with_its_config_and_its_probes_pass(overlay: str, tmp_path: Path) -> None:
    workload, container, _ = tool_pod(overlay)
    config = tmp_path / "etc"
    config.mkdir()
    (config / "tool.yaml").write_text(config_of(cluster(overlay), workload, container)["tool.yaml"])
    tmp_path.chmod(0o755)
    name = f"turnwire-test-{uuid.uuid4().hex[:12]}"
    options = [*hardened(workload, container), f"--name={name}", f"--volume={config}:/etc/turnwire:ro"]
    command = container["command"]
    assert command[0] == "python"
    service = subprocess.Popen(
        container_of([*options, *secrets_for(container, tmp_path)], *command[1:]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert service.stdout is not None
        first = service.stdout.readline()
        assert first == "listening on 0.0.0.0:50051\n", service.stderr and service.stderr.read()
        alive = container["livenessProbe"]["exec"]["command"]
        ready = ["python", "-m", "turnwire.health", f"127.0.0.1:{container['readinessProbe']['grpc']['port']}"]
        for words in (ready, alive):
            asked = subprocess.run(
                ["docker", "exec", name, "python3", *words[1:]], capture_output=True, text=True, check=False
            )
            assert asked.returncode == 0, asked.stderr
    finally:
        subprocess.run(["docker", "stop", "--time=30", name], capture_output=True, check=False)
        _, log = service.communicate(timeout=60)
    assert service.returncode == 0, log
