"""What no pod of ours may be or lack, on any overlay. Where one differs, the difference is named here."""

from __future__ import annotations

import json
import re
import runpy
from typing import Any

import pytest
from k8s_manifests import (
    K8S,
    OVERLAYS,
    Object,
    Workload,
    cluster,
    of_kind,
    rendered,
    workloads,
)

on_every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)

BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP"),
    *("SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}


def breaches(workload: Workload) -> tuple[set[str], set[str]]:
    """What the Pod Security Standards "baseline" and "restricted" have against a pod (the latter: beside the former's),
    by the fields that our pods use."""
    baseline, restricted = set(), set()
    spec = workload.spec
    pod = spec.get("securityContext", {})
    baseline |= {name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)}
    for volume in spec["volumes"]:
        kinds = set(volume) - {"name"}
        if "hostPath" in kinds:
            baseline.add("hostPath")
        if not kinds <= RESTRICTED_VOLUMES:
            restricted.add("volumes")
    for container in workload.containers:
        own = container.get("securityContext", {})
        added = set(own.get("capabilities", {}).get("add", []))
        if own.get("privileged"):
            baseline.add("privileged")
        if not added <= BASELINE_CAPABILITIES:
            baseline.add("capabilities")
        if own.get("procMount", "Default") != "Default":
            baseline.add("procMount")
        for profile in ("seccompProfile", "appArmorProfile"):
            if (own.get(profile) or pod.get(profile) or {}).get("type") == "Unconfined":
                baseline.add(profile)
        if any("hostPort" in port for port in container.get("ports", [])):
            baseline.add("hostPort")
        if own.get("allowPrivilegeEscalation") is not False:
            restricted.add("allowPrivilegeEscalation")
        if not own.get("runAsNonRoot", pod.get("runAsNonRoot")) or own.get("runAsUser", pod.get("runAsUser")) == 0:
            restricted.add("runAsNonRoot")
        if not (own.get("seccompProfile") or pod.get("seccompProfile")):
            restricted.add("seccompProfile")
        if own.get("capabilities", {}).get("drop") != ["ALL"] or not added <= {"NET_BIND_SERVICE"}:
            restricted.add("capabilities")
    return baseline, restricted


def exceptions(overlay: str, workload: Workload) -> tuple[set[str], set[str]]:
    """What is known and meant: docs/kubernetes.md says why."""
    if workload.name == "tool" and overlay == "production":
        return {"procMount", "appArmorProfile"}, set()
    if workload.name == "tool" and overlay == "gvisor":
        return set(), {"runAsNonRoot", "capabilities"}
    return set(), set()


@on_every_overlay
def test_every_pod_is_restricted_but_for_what_is_named(overlay: str) -> None:
    for workload in workloads(cluster(overlay)):
        assert breaches(workload) == exceptions(overlay, workload), workload


@on_every_overlay
def test_every_namespace_enforces_the_strictest_level_that_its_pods_keep(overlay: str) -> None:
    objects = cluster(overlay)
    for item in of_kind(objects, "Namespace"):
        found = [
            breaches(workload) for workload in workloads(objects) if workload.namespace == item["metadata"]["name"]
        ]
        assert found
        level = "restricted"
        if any(restricted for _, restricted in found):
            level = "baseline"
        if any(baseline for baseline, _ in found):
            level = "privileged"
        labels = item["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == level
        assert labels["pod-security.kubernetes.io/warn"] == "restricted"
        if level == "privileged":  # then our own policy refuses the rest
            (binding,) = of_kind(objects, "ValidatingAdmissionPolicyBinding")
            assert binding["spec"]["validationActions"] == ["Deny"]
            assert binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"] == {
                "kubernetes.io/metadata.name": item["metadata"]["name"]
            }


@on_every_overlay
def test_every_pod_has_a_user_namespace_where_sandboxes_are(overlay: str) -> None:
    (tool,) = [workload for workload in workloads(cluster(overlay)) if workload.name == "tool"]
    if overlay == "gvisor":
        assert tool.spec["runtimeClassName"] in {
            item["metadata"]["name"] for item in of_kind(cluster(overlay), "RuntimeClass")
        }
    else:
        assert tool.spec["hostUsers"] is False


@on_every_overlay
def test_every_container_has_requests_limits_probes_and_a_read_only_root(overlay: str) -> None:
    for workload in workloads(cluster(overlay)):
        for container in workload.containers:
            where = f"{workload}: {container['name']}"
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert {"cpu", "memory", "ephemeral-storage"} <= set(limits), where
            assert {"cpu", "memory", "ephemeral-storage"} <= set(requests), where
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, where
            if container["name"] != "train":  # that one ends by itself
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), where


@on_every_overlay
def test_every_writable_folder_has_a_size(overlay: str) -> None:
    for workload in workloads(cluster(overlay)):
        for volume in workload.spec["volumes"]:
            if "emptyDir" in volume:
                assert "sizeLimit" in volume["emptyDir"], f"{workload}: {volume['name']}"


@on_every_overlay
def test_folders_on_disk_fit_into_the_pods_ephemeral_storage(overlay: str) -> None:
    """Past it the pod is evicted, by writing what it was told it may."""

    def gib(text: str) -> float:
        number, unit = re.fullmatch(r"(\d+)(Gi|Mi)", text).groups()  # type: ignore[union-attr]
        return int(number) / (1 if unit == "Gi" else 1024)

    for workload in workloads(cluster(overlay)):
        limit = max(gib(container["resources"]["limits"]["ephemeral-storage"]) for container in workload.containers)
        disk = [
            gib(volume["emptyDir"]["sizeLimit"])
            for volume in workload.spec["volumes"]
            if "emptyDir" in volume and volume["emptyDir"].get("medium") != "Memory"
        ]
        assert sum(disk) <= limit, workload


@on_every_overlay
def test_no_image_is_named_by_a_tag_that_moves(overlay: str) -> None:
    for workload in workloads(cluster(overlay)):
        for container in workload.containers:
            _, separator, tag = container["image"].rpartition(":")
            assert separator, container["image"]
            assert tag not in ("latest", "dev", "main"), container["image"]


@on_every_overlay
def test_no_pod_can_talk_to_the_api_server(overlay: str) -> None:
    objects = cluster(overlay)
    assert of_kind(objects, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding") == []
    accounts = {
        (item["metadata"]["namespace"], item["metadata"]["name"]): item for item in of_kind(objects, "ServiceAccount")
    }
    for workload in workloads(objects):
        assert workload.spec["automountServiceAccountToken"] is False, workload
        assert workload.spec["enableServiceLinks"] is False, workload
        account = accounts[workload.namespace, workload.spec["serviceAccountName"]]
        assert account["automountServiceAccountToken"] is False


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in [key, *_strings(item)]]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def _secrets_in(objects: tuple[Object, ...]) -> list[str]:
    wrong = [item["metadata"]["name"] for item in of_kind(objects, "Secret")]
    wrong += [text for text in _strings(list(objects)) if "PRIVATE KEY" in text or "BEGIN CERTIFICATE" in text]
    wrong += [text for text in _strings(list(objects)) if re.search(r"\b[0-9a-f]{64}\b", text)]
    for workload in workloads(objects):
        for container in workload.containers:
            wrong += [
                item["name"]
                for item in container.get("env", [])
                if re.search("TOKEN|SECRET|PASSWORD|KEY", item["name"])
            ]
    return wrong


@on_every_overlay
def test_no_secret_stands_in_a_manifest(overlay: str) -> None:
    assert _secrets_in(cluster(overlay)) == []


def test_a_secret_in_a_manifest_would_be_found() -> None:
    token = {"kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"tokens.yaml": f"- sha256: {'0f' * 32}"}}
    assert _secrets_in((token,)) != []


@on_every_overlay
def test_secrets_are_mounted_for_the_services_user_alone(overlay: str) -> None:
    for workload in workloads(cluster(overlay)):
        for volume in workload.spec["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, f"{workload}: {volume['name']}"


def test_the_tool_pod_has_no_token_that_lets_it_call_others() -> None:
    (tool,) = [workload for workload in workloads(rendered("base")) if workload.name == "tool"]
    names = {volume["secret"]["secretName"] for volume in tool.spec["volumes"] if "secret" in volume}
    assert names == {"tool-tls", "tokens"}


def test_the_seccomp_profile_is_what_the_table_of_system_calls_says() -> None:
    made = runpy.run_path(str(K8S / "nodes" / "make_seccomp_profile.py"))["profile"]()
    written = json.loads((K8S / "nodes" / "seccomp" / "turnwire-tool.json").read_text(encoding="utf-8"))
    assert written == made, "run deploy/k8s/nodes/make_seccomp_profile.py"
    (own,) = [
        container["securityContext"]["seccompProfile"]
        for workload in workloads(cluster("production"))
        for container in workload.containers
        if workload.name == "tool"
    ]
    assert own == {"type": "Localhost", "localhostProfile": "turnwire-tool.json"}
