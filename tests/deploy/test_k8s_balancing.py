"""A headless service's name, as a pod's resolver sees it, spreads a client's calls over the pods behind it."""

from __future__ import annotations

import json
import subprocess

from headless_name import CALLS, PODS
from k8s_manifests import ROOT, cluster, loaded, services_with_configs
from pod_container import CONTAINERS, container_of

pytestmark = CONTAINERS

RESOLVER = [
    *("--user=0", "--dns=127.0.0.1", "--dns-option=ndots:5"),  # as the kubelet writes /etc/resolv.conf
    *(f"--dns-search={domain}" for domain in ("turnwire.svc.cluster.local", "svc.cluster.local", "cluster.local")),
]


def test_calls_to_the_tool_service_reach_every_pod() -> None:
    (target,) = {
        loaded("rollout.yaml", text).tool_target
        for _, container, text in services_with_configs(cluster("production"))
        if container["name"] == "rollout"
    }
    script = "/app/tests/deploy/headless_name.py"
    done = subprocess.run(
        container_of(RESOLVER, script, target), capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert sum(counts.values()) == CALLS
    assert set(counts) == set(PODS)
    assert min(counts.values()) >= CALLS // len(PODS) // 2
