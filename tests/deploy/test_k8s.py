"""The manifests as Kubernetes and the services read them: schemas, configs, and that all parts fit each other."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml
from k8s_manifests import (
    K8S,
    OVERLAYS,
    ROOT,
    TYPES,
    Object,
    Workload,
    cluster,
    config_files,
    loaded,
    matches,
    mounted,
    name_of,
    of_kind,
    rendered,
    services_with_configs,
    workloads,
)

import rollout_service.config
import tool_service.config
import trainer_service.config
import turnwire
from rollout_service.config import RolloutServiceConfig
from tool_service.config import ToolServiceConfig
from trainer_service.config import RunConfig
from turnwire.cli.launch import LaunchConfig
from turnwire.config import convert, parse_yaml

on_every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
ON_THE_CLUSTER = ("/run/secrets/turnwire/", "/var/lib/turnwire/")
"""Certificates, tokens and models, which are not here."""
IN_THE_IMAGE = Path("/var/lib/turnwire/examples")


@on_every_overlay
def test_every_object_is_valid_for_the_newest_kubernetes(overlay: str) -> None:
    version = kubernetes_validate.latest_version()
    for item in cluster(overlay):
        kubernetes_validate.validate(item, version, strict=True)


def test_an_object_that_is_not_valid_would_be_found() -> None:
    broken = msgspec.to_builtins(of_kind(rendered("base"), "Deployment")[0])
    broken["spec"]["template"]["spec"]["hostUser"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


@on_every_overlay
def test_every_config_is_one_that_its_service_takes(overlay: str) -> None:
    seen = set()
    for name, text in config_files(cluster(overlay)):
        config = loaded(name, text)
        if isinstance(config, ToolServiceConfig):
            problems = tool_service.config.check(config)
        elif isinstance(config, RolloutServiceConfig):
            problems = rollout_service.config.check(config)
        elif isinstance(config, LaunchConfig):
            problems = trainer_service.config.check(config.run)
        else:
            problems = trainer_service.config.check_service(config)
        assert [item for item in problems if not any(place in item.message for place in ON_THE_CLUSTER)] == []
        seen.add(name)
    assert seen == set(TYPES)


@on_every_overlay
def test_services_listen_where_their_pods_say(overlay: str) -> None:
    for workload, container, text in services_with_configs(cluster(overlay)):
        server = loaded(f"{container['name']}.yaml", text).server
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["metrics"] == server.metrics.port
        assert server.metrics.host == "0.0.0.0"
        probes = [container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
        if server.host == "127.0.0.1":
            asked = server.port
        else:
            assert ports["grpc"] == server.port
            assert ports["probe"] == server.probe_port
            asked = server.probe_port
        for probe in probes:
            if "grpc" in probe:
                assert probe["grpc"] == {"port": asked}
            else:
                words = " ".join(probe["exec"]["command"])
                assert "python -m turnwire.health " in words
                assert words.endswith(f" 127.0.0.1:{asked}")
        assert "--alive" in " ".join(container["livenessProbe"]["exec"]["command"])  # no sandboxes: no restart
        assert workload.spec["terminationGracePeriodSeconds"] > server.drain_seconds + 15


@on_every_overlay
def test_services_that_others_reach_ask_for_certificates_and_tokens(overlay: str) -> None:
    reached = 0
    for _, container, text in services_with_configs(cluster(overlay)):
        server = loaded(f"{container['name']}.yaml", text).server
        if server.host != "127.0.0.1":
            assert server.tls.client_ca
            assert server.tokens
            assert not server.allow_plaintext_beyond_loopback
            reached += 1
    assert reached == 3


def _paths(value: Any) -> set[Path]:
    if isinstance(value, dict):
        return {path for item in value.values() for path in _paths(item)}
    if isinstance(value, list):
        return {path for item in value for path in _paths(item)}
    return {Path(value)} if isinstance(value, str) and value.startswith("/") else set()


@on_every_overlay
def test_every_file_that_a_config_names_is_mounted(overlay: str) -> None:
    keys = {"tls": {"tls.crt", "tls.key", "ca.crt"}, "tokens": {"tokens.yaml"}, "token": {"token"}}
    for workload, container, text in services_with_configs(cluster(overlay)):
        volumes = mounted(workload, container)
        for path in _paths(parse_yaml(text)):
            if path.is_relative_to(IN_THE_IMAGE):
                assert (ROOT / "examples" / path.relative_to(IN_THE_IMAGE)).exists(), path
                continue
            place = next(str(parent) for parent in (path, *path.parents) if str(parent) in volumes)
            if path.is_relative_to("/run/secrets"):
                assert "secret" in volumes[place], path
                assert path.name in keys[Path(place).name], path
            else:
                assert "persistentVolumeClaim" in volumes[place], path


@on_every_overlay
def test_every_volume_that_is_claimed_is_there(overlay: str) -> None:
    objects = cluster(overlay)
    claims = {
        (item["metadata"]["namespace"], item["metadata"]["name"]) for item in of_kind(objects, "PersistentVolumeClaim")
    }
    used = {
        (workload.namespace, volume["persistentVolumeClaim"]["claimName"])
        for workload in workloads(objects)
        for volume in workload.spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == claims


@on_every_overlay
def test_the_service_and_the_job_never_share_a_folder_of_runs(overlay: str) -> None:
    runs = [
        mounted(workload, container)["/var/lib/turnwire/runs"]["persistentVolumeClaim"]["claimName"]
        for workload in workloads(cluster(overlay))
        for container in workload.containers
        if "/var/lib/turnwire/runs" in mounted(workload, container)
    ]
    assert sorted(runs) == ["runs", "train-runs"]


def _selected(objects: tuple[Object, ...], namespace: str, selector: Object) -> list[Workload]:
    return [item for item in workloads(objects) if item.namespace == namespace and matches(selector, item.labels)]


@on_every_overlay
def test_every_service_is_headless_and_leads_to_one_workload(overlay: str) -> None:
    objects = cluster(overlay)
    services = of_kind(objects, "Service")
    assert {item["metadata"]["name"] for item in services} - {"train-ranks"} == {"tool", "rollout", "trainer"}
    for item in services:
        spec = item["spec"]
        assert spec["clusterIP"] == "None"
        (workload,) = _selected(objects, item["metadata"]["namespace"], {"matchLabels": spec["selector"]})
        named = {port["name"] for container in workload.containers for port in container.get("ports", [])}
        assert {port["targetPort"] for port in spec["ports"]} <= named


@on_every_overlay
def test_every_target_is_a_service_with_that_port(overlay: str) -> None:
    objects = cluster(overlay)
    there = {
        f"{item['metadata']['name']}.{item['metadata']['namespace']}.svc:{port['port']}"
        for item in of_kind(objects, "Service")
        for port in item["spec"]["ports"]
    }
    targets = set()
    for _, container, text in services_with_configs(objects):
        config = loaded(f"{container['name']}.yaml", text)
        targets |= {getattr(config, name) for name in ("tool_target", "rollout_target") if hasattr(config, name)}
    assert targets
    assert targets <= there


@on_every_overlay
def test_every_disruption_budget_is_of_one_workload_and_every_service_has_one(overlay: str) -> None:
    objects, covered = cluster(overlay), []
    for item in of_kind(objects, "PodDisruptionBudget"):
        (workload,) = _selected(objects, item["metadata"]["namespace"], item["spec"]["selector"])
        covered.append(workload.name)
    assert sorted(covered) == ["rollout", "tool", "trainer"]


@on_every_overlay
def test_selectors_of_workloads_select_their_own_pods(overlay: str) -> None:
    for item in workloads(cluster(overlay)):
        if item.kind != "Job":
            assert matches(item.whole["spec"]["selector"], item.labels), item


@on_every_overlay
def test_one_engine_and_one_trainer(overlay: str) -> None:
    """Weights go to the one engine that the trainer is connected to; a folder of runs has one owner."""
    found = {item.name: item.whole["spec"] for item in workloads(cluster(overlay))}
    assert found["rollout"]["replicas"] == 1
    assert found["rollout"]["strategy"] == {"type": "Recreate"}
    assert found["trainer"]["replicas"] == 1


@on_every_overlay
def test_a_run_goes_on_where_its_pod_has_to_move(overlay: str) -> None:
    """By itself in the service; by the Job's next pod, which alone starts it, in a Job of one pod. Of several pods the
    first may stay where another moves."""
    found = {
        workload.name: loaded("trainer.yaml", text).resume
        for workload, container, text in services_with_configs(cluster(overlay))
        if container["name"] == "trainer"
    }
    assert found == {"trainer": True, "train": overlay == "production"}


def test_the_autoscaler_owns_the_number_of_tool_pods() -> None:
    objects = cluster("production")
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    (workload,) = [item for item in workloads(objects) if (item.kind, item.name) == (target["kind"], target["name"])]
    assert workload.namespace == scaler["metadata"]["namespace"]
    assert "replicas" not in workload.whole["spec"]
    exported = (ROOT / "tool_service" / "telemetry.py").read_text(encoding="utf-8")
    for metric in scaler["spec"]["metrics"]:
        assert f'"{metric["pods"]["metric"]["name"]}"' in exported


@on_every_overlay
def test_the_engine_computes_with_as_many_threads_as_its_pod_may_use(overlay: str) -> None:
    for _, container, text in services_with_configs(cluster(overlay)):
        if container["name"] == "rollout":
            engine = loaded("rollout.yaml", text).engine
            if engine.kind == "transformers":
                assert str(engine.threads) == container["resources"]["limits"]["cpu"]


@on_every_overlay
def test_images_are_of_this_version(overlay: str) -> None:
    for item in workloads(cluster(overlay)):
        for container in item.containers:
            name, _, tag = container["image"].partition(":")
            assert name in {"turnwire/tool", "turnwire/rollout", "turnwire/trainer"}
            assert tag.partition("-")[0] == turnwire.__version__, container["image"]


@on_every_overlay
def test_the_docs_tell_the_tier_of_each_overlay(overlay: str) -> None:
    (text,) = [text for name, text in config_files(cluster(overlay)) if name == "tool.yaml"]
    tier = loaded("tool.yaml", text).sandbox.minimum_tier
    docs = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (row,) = [line for line in docs.splitlines() if line.startswith(f"| `{overlay}` |")]
    assert f"`{tier}`" in row


def test_the_docs_name_every_secret() -> None:
    docs = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    for workload in workloads(cluster("production")):
        for volume in workload.spec["volumes"]:
            if "secret" in volume:
                assert f"secret generic {volume['secret']['secretName']} " in docs


def test_the_jobs_run_is_a_run() -> None:
    text = (K8S / "jobs" / "train" / "run.yaml").read_text(encoding="utf-8")
    run = convert(parse_yaml(text)["run"], RunConfig)
    assert run.checkpoint.every > 0  # or a pod that moves would begin again


def test_every_name_is_there_once() -> None:
    names = [name_of(item) for item in cluster("production")]
    assert len(set(names)) == len(names)


@pytest.mark.needs("prometheus")
def test_prometheus_takes_what_it_is_told_to_scrape(tmp_path: Path) -> None:
    """But for the discovery, which Debian builds Prometheus without."""
    config = yaml.safe_load((K8S / "prometheus.yml").read_text(encoding="utf-8"))
    for scrape in config["scrape_configs"]:
        del scrape["kubernetes_sd_configs"]
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    subprocess.run(["promtool", "check", "config", path], check=True, timeout=60)


@on_every_overlay
def test_prometheus_finds_every_service_by_its_name(overlay: str) -> None:
    (scrape,) = yaml.safe_load((K8S / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    (discovery,) = scrape["kubernetes_sd_configs"]
    ((key, value),) = [selector["label"].split("=") for selector in discovery["selectors"]]
    found = {
        container["name"]
        for workload in workloads(cluster(overlay))
        if workload.namespace in discovery["namespaces"]["names"] and workload.labels.get(key) == value
        for container in workload.containers
        if any(port["name"] == "metrics" for port in container.get("ports", []))
    }
    assert found == {"tool", "rollout", "trainer"}  # the jobs of deploy/observability
