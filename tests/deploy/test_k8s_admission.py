"""The admission policy of the tool service's namespace, whose expressions are evaluated as the API server would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from k8s_manifests import Object, cluster, of_kind, workloads

celpy = pytest.importorskip("celpy", reason="the package cel-python is not installed")

(POLICY,) = of_kind(cluster("production"), "ValidatingAdmissionPolicy")
(TOOL,) = [workload for workload in workloads(cluster("production")) if workload.name == "tool"]
ENVIRONMENT = celpy.Environment()


def evaluated(expression: str, **values: Any) -> Any:
    """`values` and the result are CEL's own types."""
    return ENVIRONMENT.program(ENVIRONMENT.compile(expression)).evaluate(values)


def refusals(spec: Object) -> list[str]:
    """Why a pod with this spec is not admitted."""
    pod = celpy.json_to_cel({"spec": spec})
    (variable,) = POLICY["spec"]["variables"]
    value = evaluated(variable["expression"], object=pod)
    variables = celpy.celtypes.MapType({celpy.celtypes.StringType(variable["name"]): value})
    return [
        rule["message"]
        for rule in POLICY["spec"]["validations"]
        if not evaluated(rule["expression"], object=pod, variables=variables)
    ]


def test_our_own_pod_is_admitted() -> None:
    assert refusals(TOOL.spec) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda spec, own: own.update(privileged=True), "no privileged container"),
        (lambda spec, own: own.pop("allowPrivilegeEscalation"), "allowPrivilegeEscalation"),
        (lambda spec, own: own.update(allowPrivilegeEscalation=True), "allowPrivilegeEscalation"),
        (lambda spec, own: own["capabilities"].update(add=["SYS_ADMIN"]), "capabilities"),
        (lambda spec, own: own.pop("capabilities"), "capabilities"),
        (lambda spec, own: own["seccompProfile"].update(type="Unconfined"), "seccomp"),
        (lambda spec, own: spec["securityContext"].pop("seccompProfile"), "seccomp"),
        (lambda spec, own: own.update(runAsNonRoot=False), "runAsNonRoot"),
        (lambda spec, own: spec["securityContext"].update(runAsNonRoot=False), "runAsNonRoot"),
        (lambda spec, own: spec.pop("hostUsers"), "hostUsers"),
        (lambda spec, own: spec.update(hostUsers=True), "hostUsers"),
        (lambda spec, own: spec.update(hostNetwork=True), "hostNetwork"),
        (lambda spec, own: spec.update(hostPID=True), "hostPID"),
        (lambda spec, own: spec.update(hostIPC=True), "hostIPC"),
        (lambda spec, own: spec["volumes"].append({"name": "node", "hostPath": {"path": "/"}}), "volumes"),
        (lambda spec, own: spec["volumes"].append({"name": "api", "projected": {"sources": []}}), "volumes"),
        (lambda spec, own: spec.update(initContainers=[{"name": "first"}]), "allowPrivilegeEscalation"),
        (lambda spec, own: spec.update(ephemeralContainers=[{"name": "debug"}]), "allowPrivilegeEscalation"),
    ],
)
def test_a_pod_that_asks_for_more_is_not(change: Callable[[Object, Object], None], reason: str) -> None:
    spec = copy.deepcopy(TOOL.spec)
    change(spec, spec["containers"][0]["securityContext"])
    assert any(reason in message for message in refusals(spec))
