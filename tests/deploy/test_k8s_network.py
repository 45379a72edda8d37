"""Who may talk to whom, by the NetworkPolicies as a network plugin would apply them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from k8s_manifests import OVERLAYS, Object, cluster, matches, of_kind, workloads

on_every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@dataclass(frozen=True)
class End:
    """A pod, or with `namespace` None something outside of the cluster."""

    namespace: str | None
    labels: dict[str, str]

    @property
    def namespace_labels(self) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace or ""}


DNS = End("kube-system", {"k8s-app": "kube-dns"})
PROMETHEUS = End("monitoring", {"app.kubernetes.io/name": "prometheus"})
CLIENT = End("turnwire", {"turnwire.dev/client": "true"})
STRANGER_HERE = End("turnwire", {"app.kubernetes.io/name": "anything"})
STRANGER = End("default", {"app.kubernetes.io/name": "trainer"})
API_SERVER = End("kube-system", {"component": "kube-apiserver"})
OUTSIDE = End(None, {})


def _peer_matches(peer: Object, policy_namespace: str, end: End) -> bool:
    assert "ipBlock" not in peer
    if end.namespace is None:
        return False
    if "namespaceSelector" in peer:
        if not matches(peer["namespaceSelector"], end.namespace_labels):
            return False
    elif end.namespace != policy_namespace:
        return False
    return "podSelector" not in peer or matches(peer["podSelector"], end.labels)


def _side(objects: tuple[Object, ...], direction: str, own: End, other: End, port: int, protocol: str) -> bool:
    """Whether the policies of one end's namespace let it through: all is open to a pod that none selects."""
    closed = False
    for item in of_kind(objects, "NetworkPolicy"):
        namespace, spec = item["metadata"]["namespace"], item["spec"]
        if namespace != own.namespace or not matches(spec["podSelector"], own.labels):
            continue
        if direction not in spec["policyTypes"]:
            continue
        closed = True
        for rule in spec.get(direction.lower(), []):
            peers = rule["from" if direction == "Ingress" else "to"]
            ports = {(entry["port"], entry["protocol"]) for entry in rule.get("ports", [])}
            open_to = not ports or (port, protocol) in ports
            if open_to and any(_peer_matches(peer, namespace, other) for peer in peers):
                return True
    return not closed


def may_talk(objects: tuple[Object, ...], source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    return _side(objects, "Egress", source, target, port, protocol) and _side(
        objects, "Ingress", target, source, port, protocol
    )


def ends(objects: tuple[Object, ...]) -> dict[str, End]:
    return {item.name: End(item.namespace, item.labels) for item in workloads(objects)}


@on_every_overlay
def test_every_namespace_of_ours_denies_by_default(overlay: str) -> None:
    objects = cluster(overlay)
    denying = {
        item["metadata"]["namespace"]
        for item in of_kind(objects, "NetworkPolicy")
        if item["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    }
    assert denying == {item.namespace for item in workloads(objects)}


@on_every_overlay
@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        ("rollout", "tool", 50051),
        ("trainer", "tool", 50051),
        ("trainer", "rollout", 50052),
        ("train", "tool", 50051),
        ("train", "rollout", 50052),
    ],
)
def test_what_the_services_need_of_each_other_is_open(overlay: str, source: str, target: str, port: int) -> None:
    objects = cluster(overlay)
    found = ends(objects)
    assert may_talk(objects, found[source], found[target], port)


@on_every_overlay
def test_names_metrics_and_clients_get_through(overlay: str) -> None:
    objects = cluster(overlay)
    found = ends(objects)
    for name in ("rollout", "trainer", "train"):  # who connects by a name
        assert may_talk(objects, found[name], DNS, 53, "UDP")
        assert may_talk(objects, found[name], DNS, 53, "TCP")
    for end in found.values():
        assert may_talk(objects, PROMETHEUS, end, 9464)
    assert may_talk(objects, CLIENT, found["trainer"], 50053)
    assert may_talk(objects, CLIENT, found["rollout"], 50052)
    assert may_talk(objects, CLIENT, DNS, 53, "UDP")


@on_every_overlay
def test_nothing_leaves_a_tool_pod(overlay: str) -> None:
    objects = cluster(overlay)
    found = ends(objects)
    for target in (DNS, API_SERVER, OUTSIDE, STRANGER, PROMETHEUS, *found.values()):
        for port in (53, 443, 6443, 9464, 50051, 50052, 50053):
            for protocol in ("TCP", "UDP"):
                assert not may_talk(objects, found["tool"], target, port, protocol), target


@on_every_overlay
def test_nothing_leaves_the_cluster(overlay: str) -> None:
    objects = cluster(overlay)
    for name, end in ends(objects).items():
        for target in (OUTSIDE, API_SERVER):
            for port in (80, 443, 6443):
                assert not may_talk(objects, end, target, port), name


@on_every_overlay
def test_strangers_reach_nothing(overlay: str) -> None:
    objects = cluster(overlay)
    found = ends(objects)
    for stranger in (STRANGER, STRANGER_HERE, OUTSIDE):
        for name, port in (("tool", 50051), ("rollout", 50052), ("trainer", 50053)):
            assert not _side(objects, "Ingress", found[name], stranger, port, "TCP"), name
            assert not _side(objects, "Ingress", found[name], stranger, 9464, "TCP"), name
            assert not _side(objects, "Ingress", found[name], stranger, 9465, "TCP"), name


@on_every_overlay
def test_the_rollout_service_cannot_reach_the_trainer(overlay: str) -> None:
    objects = cluster(overlay)
    found = ends(objects)
    assert not may_talk(objects, found["rollout"], found["trainer"], 50053)


@pytest.mark.parametrize("port", [29500, 40000])
def test_the_pods_of_a_run_on_several_nodes_reach_each_other_on_any_port_and_nobody_else_does(port: int) -> None:
    objects = cluster("production")
    found = ends(objects)
    ranks = found["train"]
    assert may_talk(objects, ranks, ranks, port)
    for other in (
        CLIENT,
        PROMETHEUS,
        STRANGER,
        STRANGER_HERE,
        OUTSIDE,
        *(end for end in found.values() if end != ranks),
    ):
        assert not _side(objects, "Ingress", ranks, other, port, "TCP"), other
        assert not _side(objects, "Egress", ranks, other, port, "TCP"), other
