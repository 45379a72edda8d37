"""The three services as processes that are observed while they train: by an OTLP receiver, and by a real Prometheus
where there is one. A run of two steps, made once, and what was seen of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import shutil
import socket
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from waiting import PATIENCE, eventually

from turnwire.cli.launch import ServicesConfig
from turnwire.cli.services import Services
from turnwire.client import TrainerClient
from turnwire.config import convert

ROOT = Path(__file__).resolve().parents[1]
OBSERVABILITY = ROOT / "deploy" / "observability"
MODEL = str(ROOT / "examples" / "tiny_policy" / "model")
DOMAINS = ("python", "sql", "search")

RUN = {
    "name": "observed",
    "model": {"path": MODEL},
    "data": {
        part: [
            {"kind": "procedural", "generator": "demo", "arguments": {"domain": domain, "split": split}, "size": size}
            for domain in DOMAINS
        ]
        for part, split, size in (("train", "train", 50), ("eval", "heldout", 4))
    },
    "reward": {"name": "exact_match"},
    "rollout": {"group_size": 4, "final_answer": {}, "limits": {"max_turns": 3, "max_action_tokens": 48}},
    "training": {"steps": 2, "prompts_per_step": 4, "threads": 1},
    "metrics": {"tensorboard": False},
}
TRAJECTORIES = 2 * 4 * 4 + 2 * 3 * 4
"""Of two steps, and of the evaluations before and after."""


@dataclass(frozen=True)
class Span:
    """One span as the receiver got it."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """Traces that it names."""


@dataclass
class Observed:
    """What was seen. `prometheus` has each query's answer; None: there is no Prometheus here."""

    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, str] = field(default_factory=dict)
    logs: dict[str, list[str]] = field(default_factory=dict)
    prometheus: dict[str, Any] | None = None
    targets: dict[str, str] = field(default_factory=dict)
    """Health by job, as Prometheus says it."""


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _attributes(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


@contextlib.contextmanager
def otlp_receiver(spans: list[Span]) -> Iterator[str]:
    """A real receiver of OTLP over HTTP; its endpoint."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found = self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans if found else ():
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        spans.append(
                            Span(
                                service,
                                span.name,
                                span.trace_id.hex(),
                                span.span_id.hex(),
                                span.parent_span_id.hex(),
                                _attributes(span.attributes),
                                tuple(link.trace_id.hex() for link in span.links),
                            )
                        )
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(url: str) -> str:
    """The body of a GET."""
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
    return text


def expressions() -> dict[str, str]:
    """All that dashboards and alerts ask Prometheus, by where it stands; Grafana's variables are filled in."""
    found = {}
    for path in sorted((OBSERVABILITY / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                text = target["expr"].replace("$__rate_interval", "1m").replace("$run", ".*")
                found[f"{path.stem}: {panel['title']}: {target['refId']}"] = text
    for group in yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            found[f"alerts: {rule['alert']}"] = rule["expr"]
    return found


def names(expression: str) -> set[str]:
    """The metrics that an expression names."""
    return set(re.findall(r"\b(?:turnwire|process)_[a-z_]+\b", expression))


@contextlib.asynccontextmanager
async def _prometheus(folder: Path, ports: dict[str, int]) -> AsyncIterator[str]:
    """A Prometheus with the config of deploy/, that finds the services here."""
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(OBSERVABILITY / "alerts.yml")]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with (folder / "prometheus.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"),
            *(f"--web.listen-address={address}", "--log.level=warn"),
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        await process.wait()


def _query(prometheus: str, expression: str) -> Any:
    with contextlib.suppress(urllib.error.HTTPError):
        return json.loads(get(f"{prometheus}/api/v1/query?query={urllib.parse.quote(expression)}"))["data"]["result"]
    return None


async def _ask(prometheus: str, observed: Observed) -> None:
    """Wait until it has read all services after the run, and ask it everything."""

    async def over() -> bool:
        with contextlib.suppress(OSError):
            run = "turnwire_trainer_step == 2 and turnwire_trainer_run_live == 0"
            return bool(await asyncio.to_thread(_query, prometheus, run))
        return False

    async def read_again() -> bool:
        """All of them, twice: so that a rate has two samples."""
        found = await asyncio.to_thread(_query, prometheus, "timestamp(up == 1)")
        return len(found) == len(observed.metrics) and all(float(one["value"][1]) > since + 2 for one in found)

    await eventually(over, pause=0.2)
    since = time.time()
    await eventually(read_again, pause=0.2)
    queries = [*expressions().values(), *(name for text in expressions().values() for name in names(text))]
    observed.prometheus = {text: await asyncio.to_thread(_query, prometheus, text) for text in queries}
    targets = json.loads(await asyncio.to_thread(get, f"{prometheus}/api/v1/targets"))["data"]["activeTargets"]
    observed.targets = {target["labels"]["job"]: target["health"] for target in targets}


async def _observe() -> Observed:
    observed = Observed()
    with tempfile.TemporaryDirectory(prefix="turnwire-observed-") as name, otlp_receiver(observed.spans) as endpoint:
        folder = Path(name)
        server = {
            "metrics": {"port": 0},
            "tracing": {"endpoint": endpoint, "ratio": 1.0},
            "logging": {"format": "json"},
        }
        values = {
            "tool": {"server": server, "sandbox": {"pool": {"ready": 1}}},
            "rollout": {"server": server, "engine": {"model": MODEL, "threads": 1}},
            "trainer": {"server": server, "runs_folder": str(folder / "runs")},
        }
        async with contextlib.AsyncExitStack() as stack:
            services = await stack.enter_async_context(
                Services(convert(values, ServicesConfig), folder, lambda _: None)
            )
            logs = {service: Path(path) for service, path in services.logs.items()}
            ports = {
                service: int(re.search(r"metrics at http://127\.0\.0\.1:(\d+)/metrics", path.read_text())[1])  # type: ignore[index]
                for service, path in logs.items()
            }
            prometheus = shutil.which("prometheus") and await stack.enter_async_context(_prometheus(folder, ports))
            async with TrainerClient(services.targets["trainer"]) as client:
                await client.start_run("observed", yaml.safe_dump(RUN))
                async for _ in client.watch_run("observed"):
                    pass
                assert (await client.get_run("observed")).step == 2
            for service, port in ports.items():
                observed.metrics[service] = await asyncio.to_thread(get, f"http://127.0.0.1:{port}/metrics")
            if prometheus:
                await _ask(prometheus, observed)
        observed.logs = {service: path.read_text().splitlines() for service, path in logs.items()}
    return observed


@functools.cache
def observed() -> Observed:
    """What was seen of the run."""
    return asyncio.run(_observe())
