"""jobs/train-ranks: its pods find each other, rank 0 is where the run is started, and the run's end is the Job's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_manifests import K8S, Object, kubectl, of_kind, rendered, workloads
from torch.distributed.run import parse_args

OBJECTS = rendered("jobs/train-ranks")
(JOB,) = workloads(OBJECTS)
SERVICE, TRAIN = JOB.containers


def variables(node: int) -> dict[str, str]:
    """Of the pod with this index, as the kubelet sets them."""
    labels = {
        "batch.kubernetes.io/job-name": JOB.name,
        "batch.kubernetes.io/job-completion-index": str(node),
    }
    found = {}
    for item in SERVICE["env"]:
        if "value" in item:
            found[item["name"]] = item["value"]
        elif "fieldRef" in item["valueFrom"]:
            path = item["valueFrom"]["fieldRef"]["fieldPath"]
            found[item["name"]] = labels[path.removeprefix("metadata.labels['").removesuffix("']")]
    return found


def torchrun(node: int) -> Any:
    """Its arguments, as torchrun reads them."""
    command = SERVICE["command"]
    assert command[:3] == ["python", "-m", "torch.distributed.run"]
    words = list(command[3:])
    for name, value in variables(node).items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$(" in word for word in words)
    return parse_args(words)


def shell(command: list[str], node: int, folder: Path) -> subprocess.Popen[str]:
    """Start a command of the pod; `python` and `turnwire` say what they are called with."""
    for name in ("python", "turnwire"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (folder / name).chmod(0o755)
    environment = {**variables(node), "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_there_are_as_many_pods_as_torchrun_waits_for() -> None:
    spec = JOB.whole["spec"]
    assert spec["completionMode"] == "Indexed"
    assert torchrun(0).nnodes == str(spec["completions"]) == str(spec["parallelism"])


def test_the_pods_meet_at_the_one_with_index_0_by_a_name_that_their_service_gives_it() -> None:
    (service,) = of_kind(OBJECTS, "Service")
    name, (port,) = service["metadata"]["name"], service["spec"]["ports"]
    assert JOB.spec["subdomain"] == name
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True  # none is ready before they have met
    for node in range(2):
        found = torchrun(node)
        assert found.rdzv_endpoint == f"{JOB.name}-0.{name}:{port['port']}"
        assert found.local_addr == f"{JOB.name}-{node}.{name}"
        assert (found.rdzv_backend, found.rdzv_id) == ("c10d", JOB.name)
    assert {"name": port["targetPort"], "containerPort": port["port"]} in SERVICE["ports"]


def test_rank_0_is_in_the_pod_with_index_0() -> None:
    """torchrun numbers nodes in the order of their addresses."""
    addresses = [torchrun(node).local_addr for node in range(101)]
    assert min(addresses) == addresses[0]


def test_torchrun_comes_back_however_it_ends_and_finds_nothing_of_those_before() -> None:
    assert SERVICE["restartPolicy"] == "Always"
    assert variables(0)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_the_run_ends_the_job_and_other_pods_wait_until_they_are_told_to_go(tmp_path: Path) -> None:
    assert JOB.whole["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    first = shell(TRAIN["command"], 0, tmp_path)
    said, _ = first.communicate(timeout=60)
    assert said.split() == ["turnwire", "train", "/etc/turnwire/run.yaml", "--target=127.0.0.1:50053", "--run-id=train"]
    assert first.returncode == 0

    script = TRAIN["command"][-1].replace("sleep", "echo waiting; sleep")
    other = shell([*TRAIN["command"][:-1], script], 1, tmp_path)
    assert other.stdout is not None
    assert other.stdout.readline() == "waiting\n"
    other.send_signal(signal.SIGTERM)
    assert other.wait(timeout=60) != 0  # else the Job would never start it again


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_the_service_is_asked_where_it_is(probe: str, tmp_path: Path) -> None:
    answers = []
    for node in range(2):
        asked = shell(SERVICE[probe]["exec"]["command"], node, tmp_path)
        answers.append(asked.communicate(timeout=60)[0])
        assert asked.returncode == 0
    assert answers[0].startswith("python -m turnwire.health ")
    assert answers[1] == ""


def test_prometheus_asks_the_pod_that_has_the_service() -> None:
    (scrape,) = yaml.safe_load((K8S / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    label = "__meta_kubernetes_pod_label_batch_kubernetes_io_job_completion_index"
    (rule,) = [rule for rule in scrape["relabel_configs"] if rule["source_labels"] == [label]]
    assert rule["action"] == "drop"
    assert [index for index in ("", "0", "1", "10") if not re.fullmatch(rule["regex"], index)] == ["", "0"]


def test_what_every_pod_mounts_can_be_mounted_on_every_node() -> None:
    (claim,) = of_kind(OBJECTS, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_suffix_makes_it_a_further_run(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": [os.path.relpath(K8S / "jobs" / "train-ranks", tmp_path)], "nameSuffix": "-2"})
    )
    made = subprocess.run([kubectl(), "kustomize", tmp_path], capture_output=True, text=True, check=True).stdout
    objects: tuple[Object, ...] = tuple(yaml.safe_load_all(made))
    (service,), (job,) = of_kind(objects, "Service"), workloads(objects)
    assert service["metadata"]["name"] == job.spec["subdomain"] == "train-ranks-2"
    assert {"name": "RANKS", "value": "train-ranks-2"} in job.containers[0]["env"]
