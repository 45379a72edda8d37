"""Metrics and logs of single services in the test's process. What all three show while they train:
test_telemetry_services.py."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
import sys
import time
import types
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from waiting import ENDLESS, PATIENCE

from tool_service.config import ToolServiceConfig
from tool_service.server import ToolServer
from turnwire.client import ToolClient
from turnwire.client.channel import open_channel
from turnwire.client.tools import tool_call
from turnwire.config import convert
from turnwire.errors import ConfigError, NotFoundError, TurnwireError
from turnwire.serving import Server, ServerConfig
from turnwire.telemetry import logs, metrics, tracing
from turnwire.telemetry.config import LoggingConfig, MetricsServerConfig

PLUGINS = Path(__file__).parents[1] / "tool" / "plugins"


@pytest.fixture
async def served() -> AsyncIterator[ToolServer]:
    """A tool service with tools that need no sandbox, and metrics."""
    async with contextlib.AsyncExitStack() as stack:
        server = ToolServer(config_of(server={"metrics": {"port": 0}}))
        await stack.enter_async_context(server)
        yield server


def config_of(**sections: Any) -> ToolServiceConfig:
    values = {
        "plugins": {"directories": [str(PLUGINS)], "exclude": ["bash", "python", "sql", "unit_tests"]},
        "sessions": {"lease_seconds": ENDLESS},
        **sections,
    }
    return convert(values, ToolServiceConfig)


def address(server: ToolServer) -> str:
    assert server.server is not None
    return server.server.address


async def scrape(server: ToolServer | Server) -> dict[str, float]:
    """Values by name and labels, as `name{a="b"}`."""
    served = server.server if isinstance(server, ToolServer) else server
    assert served is not None
    assert served.metrics is not None
    text = await asyncio.to_thread(read, served.metrics.port)
    return {name: float(value) for name, value in re.findall(r"^(turnwire_\S+) (\S+)$", text, re.MULTILINE)}


async def becomes(look: Callable[[], Awaitable[Any]], expected: Any) -> None:
    """Look until it is so: what a scrape shows cannot be waited for."""
    async with asyncio.timeout(PATIENCE):
        while await look() != expected:  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
    return text


async def test_calls_are_counted_by_tool_and_by_what_went_wrong(served: ToolServer) -> None:
    async with ToolClient(address(served)) as client, await client.open("t", ["noop", "sleep"]) as session:
        await session.act("<noop>x</noop>")
        await session.act("<noop>x</noop>")
        await session.act(f"<sleep>{ENDLESS}</sleep>", timeout=0.05)
        await session.act([tool_call("not a tool")])
        await client.execute("noop", "<noop>x</noop>")
    found = await scrape(served)
    counts = {key: value for key, value in found.items() if key.startswith("turnwire_tool_call_seconds_count")}
    assert counts == {
        'turnwire_tool_call_seconds_count{error="OK",tool="noop"}': 3,
        'turnwire_tool_call_seconds_count{error="TIMEOUT",tool="sleep"}': 1,
        'turnwire_tool_call_seconds_count{error="INVALID_ACTION",tool="unknown"}': 1,
    }
    assert found['turnwire_tool_call_seconds_sum{error="TIMEOUT",tool="sleep"}'] >= 0.05
    assert found["turnwire_tool_turn_seconds_count"] == found["turnwire_tool_turns_total"] == 5


async def test_what_is_shown_of_sessions_is_what_is_there_now(served: ToolServer) -> None:
    async def sessions() -> tuple[float, float]:
        found = await scrape(served)
        return found['turnwire_tool_sessions{state="open"}'], found['turnwire_tool_sessions{state="leased"}']

    async with ToolClient(address(served)) as client:
        session = await client.open("t", ["noop"])
        assert await sessions() == (1, 0)
        assert (await scrape(served))['turnwire_rpc_running{method="Interact",service="turnwire.v1.ToolService"}'] == 1
        await session._stream.end()  # without Close
        await becomes(sessions, (0, 1))
        await session.act("<noop>x</noop>")
        assert await sessions() == (1, 0)
        found = await scrape(served)
        assert found['turnwire_tool_sessions_opened_total{resumed="false"}'] == 1
        assert found['turnwire_tool_sessions_opened_total{resumed="true"}'] == 1
        await session.close()
    assert await sessions() == (0, 0)


async def test_rpcs_are_counted_by_method_and_code_and_made_up_methods_are_not(served: ToolServer) -> None:
    async with ToolClient(address(served)) as client:
        await client.list_tools()
        for _ in range(2):
            with pytest.raises(NotFoundError):
                await client.execute("nobody", "x")
        with pytest.raises(TurnwireError):
            await client.open("t", ["nobody"])
        channel = open_channel(address(served))
        for name in ("/turnwire.v1.ToolService/MadeUp", "/other/Thing"):
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(name)(b"")
        await channel.close()
    found = await scrape(served)
    handled = {key: value for key, value in found.items() if key.startswith("turnwire_rpc_handled_total")}
    service = 'service="turnwire.v1.ToolService"'
    assert handled == {
        f'turnwire_rpc_handled_total{{code="OK",method="ListTools",{service}}}': 1,
        f'turnwire_rpc_handled_total{{code="NOT_FOUND",method="Execute",{service}}}': 2,
        f'turnwire_rpc_handled_total{{code="NOT_FOUND",method="Interact",{service}}}': 1,
    }
    timed = {re.search('method="(\\w+)"', key)[1] for key in found if key.startswith("turnwire_rpc_seconds")}  # type: ignore[index]
    assert timed == {"ListTools", "Execute"}  # a stream lives as long as what it carries


async def test_what_is_refused_at_the_gate_is_counted_too(tmp_path: Path) -> None:
    (tmp_path / "tokens.yaml").write_text(f"- {{name: somebody, role: tool, sha256: {'f' * 64}}}\n")
    server = ToolServer(config_of(server={"metrics": {"port": 0}, "tokens": str(tmp_path / "tokens.yaml")}))
    async with server as target, ToolClient(target) as client:
        for call in (client.list_tools(), client.execute("noop", "<noop>x</noop>"), client.open("t", ["noop"])):
            with pytest.raises(TurnwireError):
                await call
        found = await scrape(server)
    refused = {key: value for key, value in found.items() if "UNAUTHENTICATED" in key}
    assert refused == {
        f'turnwire_rpc_handled_total{{code="UNAUTHENTICATED",method="{method}",service="turnwire.v1.ToolService"}}': 1
        for method in ("ListTools", "Execute", "Interact")
    }


async def test_a_call_that_its_client_gives_up_is_counted_as_cancelled(served: ToolServer) -> None:
    async with ToolClient(address(served)) as client:
        call = asyncio.create_task(client.execute("sleep", f"<sleep>{ENDLESS}</sleep>"))
        running = 'turnwire_rpc_running{method="Execute",service="turnwire.v1.ToolService"}'

        async def count() -> float:
            return (await scrape(served)).get(running, 0)

        await becomes(count, 1)
        call.cancel()
        await becomes(count, 0)
    found = await scrape(served)
    assert found['turnwire_rpc_handled_total{code="CANCELLED",method="Execute",service="turnwire.v1.ToolService"}'] == 1


async def test_a_service_whose_loop_stands_still_fails_the_scrape(
    served: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "STATE_SECONDS", 0.2)
    assert served.server is not None
    assert served.server.metrics is not None
    reading = asyncio.get_running_loop().run_in_executor(None, read, served.server.metrics.port)
    time.sleep(1.0)  # noqa: ASYNC251 - stands still
    with pytest.raises(urllib.error.HTTPError, match="500"):
        await reading
    assert (await scrape(served))["turnwire_tool_turns_running"] == 0


async def test_a_port_that_is_taken_is_an_error_that_names_the_key(served: ToolServer) -> None:
    assert served.server is not None
    assert served.server.metrics is not None
    taken = served.server.metrics.port
    other = Server(ServerConfig(metrics=MetricsServerConfig(port=taken)), [])
    with pytest.raises(ConfigError, match=rf"server.metrics.port: cannot serve metrics on 127.0.0.1:{taken}: .*in use"):
        await other.start()
    nowhere = Server(ServerConfig(metrics=MetricsServerConfig(host="no.such.host.invalid")), [])
    with pytest.raises(ConfigError, match=r"server\.metrics\.host"):
        await nowhere.start()


async def test_without_a_section_nothing_is_counted_and_after_the_end_nothing_is_served(served: ToolServer) -> None:
    assert served.server is not None
    assert served.server.metrics is not None
    port = served.server.metrics.port
    await served.server.stop(0)
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(read, port)
    async with ToolServer(config_of()) as target, ToolClient(target) as client:
        await client.execute("noop", "<noop>x</noop>")
    quiet = ToolServer(config_of())
    server = await quiet.prepare()
    assert (server.metrics, quiet.sessions.metrics) == (None, None)
    await quiet.close()


async def test_gpus_are_shown_as_far_as_they_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def power(handle: int) -> int:
        raise NVMLError("Not Supported")

    module = types.ModuleType("pynvml")  # a fake: no GPU can be had here
    vars(module).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=75),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=3 * 2**30, total=8 * 2**30),
        nvmlDeviceGetPowerUsage=power,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    server = Server(ServerConfig(metrics=MetricsServerConfig(port=0)), [])
    await server.start()
    found = await scrape(server)
    await server.stop(0)
    assert {key: value for key, value in found.items() if "_gpu_" in key} == {
        f'turnwire_gpu_{name}{{gpu="{gpu}"}}': value
        for gpu in (0, 1)
        for name, value in (
            ("utilization_ratio", 0.75),
            ("memory_used_bytes", 3.0 * 2**30),
            ("memory_size_bytes", 8.0 * 2**30),
        )
    }


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What is recorded in this process, where every trace that begins here is."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=ParentBasedTraceIdRatio(1.0))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


async def test_a_session_without_a_traced_caller_is_a_trace_of_its_own(spans: InMemorySpanExporter) -> None:
    async with (
        ToolServer(config_of()) as target,
        ToolClient(target) as client,
        await client.open("t", ["noop"]) as open_,
    ):
        for _ in range(2):
            await open_.act("<noop>x</noop>")
    first, second, session = spans.get_finished_spans()
    assert [first.name, second.name, session.name] == ["execute", "execute", "session"]
    assert [span.parent and span.parent.span_id for span in (first, second)] == [session.context.span_id] * 2
    assert session.parent is None


async def test_a_caller_that_does_not_record_its_trace_decides_for_the_service(spans: InMemorySpanExporter) -> None:
    unrecorded = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))
    async with ToolServer(config_of()) as target, ToolClient(target) as client:
        with trace.use_span(unrecorded):
            async with await client.open("t", ["noop"]) as session:
                await session.act("<noop>x</noop>")
            await client.execute("noop", "<noop>x</noop>")
    assert spans.get_finished_spans() == ()


async def test_of_an_error_a_span_keeps_the_kind_and_not_the_message(spans: InMemorySpanExporter) -> None:
    with pytest.raises(NotFoundError), tracing.begin("work"):
        raise NotFoundError("what a policy wrote")
    (span,) = spans.get_finished_spans()
    assert (span.status.description, span.events) == ("NotFoundError", ())


@pytest.mark.parametrize("caller", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 100_000])
async def test_a_traceparent_that_is_none_begins_a_trace(caller: str, spans: InMemorySpanExporter) -> None:
    with tracing.begin("work", caller):
        pass
    (span,) = spans.get_finished_spans()
    assert span.parent is None


@pytest.fixture
def json_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What is logged, as objects."""
    root = logging.getLogger()
    others, level = root.handlers[:], root.level
    root.handlers.clear()  # or they would be closed
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    logs.configure_logging(LoggingConfig(format="json"))
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    root.handlers[:] = others
    root.setLevel(level)
    logging.captureWarnings(False)


async def test_a_line_about_a_trajectory_says_which_one(json_logs: Any, spans: InMemorySpanExporter) -> None:
    async with ToolServer(config_of()) as target, ToolClient(target) as client:
        session = await client.open("trajectory-7", ["trouble"])
        await session.act("<trouble>crash</trouble>")
        await session.close()
    lines = [line for line in json_logs() if line["logger"] == "tool_service.toolset"]
    assert lines
    trace_id = trace.format_trace_id(spans.get_finished_spans()[-1].context.trace_id)
    assert {(line["trajectory_id"], line["trace_id"]) for line in lines} == {("trajectory-7", trace_id)}


async def test_lines_of_other_tasks_say_nothing_of_it_and_a_traceback_is_in_its_line(json_logs: Any) -> None:
    async def about(name: str) -> None:
        logs.run_id.set(name)
        await asyncio.sleep(0)
        await asyncio.to_thread(logging.getLogger("work").info, "of %s", name)

    await asyncio.gather(about("a"), about("b"))
    logging.getLogger("work").error("failed", exc_info=KeyError("lost"))
    *of_runs, failed = [line for line in json_logs() if line["logger"] == "work"]
    assert {(line["message"], line["run_id"]) for line in of_runs} == {("of a", "a"), ("of b", "b")}
    assert "run_id" not in failed
    assert "trajectory_id" not in failed
    assert (failed["level"], failed["message"]) == ("ERROR", "failed")
    assert "KeyError: 'lost'" in failed["exception"]
