"""`turnwire sandbox`, as a user's shell runs it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from click.testing import CliRunner, Result
from waiting import PATIENCE, PROGRAM

from tool_service.sandbox import hostile
from tool_service.sandbox.docker_config import DEFAULT_IMAGE
from tool_service.sandbox.docker_container import INSTANCE, OWNER, SANDBOX
from tool_service.sandbox.hostile.case import case, py
from tool_service.sandbox.instance import Instance
from turnwire.cli import sandbox, sandbox_report

isolated = pytest.mark.needs("isolated-sandbox")


def turnwire(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(sandbox.command, arguments)


@isolated
def test_a_check_says_what_holds_and_what_a_sandbox_sees() -> None:
    command = [sys.executable, "-m", "turnwire.cli", "sandbox", "check", "limits.processes=48"]
    command += ["--only", "state-persists,B9-stop,G1-environment"]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if " 1 " in line][:3] == ["ordinary", "B", "G"]
    assert any(line.split() == ["processes", "48"] for line in lines)
    assert lines[-1].startswith("process, tier isolated: all 3 cases hold, one by one (0:")


@isolated
def test_a_check_for_programs() -> None:
    done = turnwire("check", "--only", "B9-stop,F6*", "--parallel", "2", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert {key: found[key] for key in ("backend", "tier", "ok", "problems", "not_promised")} == {
        "backend": "process",
        "tier": "isolated",
        "ok": True,
        "problems": [],
        "not_promised": [],
    }
    assert found["facts"]["capabilities"] == "none"
    stop = next(one for one in found["cases"] if one["id"] == "B9-stop")
    assert stop["rows"] == ["B9"]
    assert stop["survived"]
    assert stop["tries"] == "SIGSTOP to its own group"
    assert [run["at_once"] for run in stop["runs"]] == [1, 2]
    assert [run["kinds"] for run in stop["runs"]] == [["TIMEOUT", "OK"]] * 2
    assert all(run["problems"] == [] and run["seconds"] > 0.5 for run in stop["runs"])


@isolated
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_check_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with running_check(tmp_path) as running:
        running.send_signal(number)
        running.send_signal(number)
        assert running.wait(PATIENCE) == 128 + number
    assert list(tmp_path.iterdir()) == []


@isolated
def test_a_check_whose_terminal_closes_goes_on_under_nohup(tmp_path: Path) -> None:
    with running_check(tmp_path, "nohup") as running:
        running.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.5)
        running.terminate()
        assert running.wait(PATIENCE) == 128 + signal.SIGTERM


@isolated
def test_what_a_killed_check_laid_out_falls_to_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_check(tmp_path) as running:
        running.kill()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert json.loads(turnwire("sweep", "--json").stdout)["removed"] == 1
    assert list(tmp_path.iterdir()) == []


@isolated
def test_a_check_has_room_in_folders_of_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("long" * 40)  # longer than the address of a socket can be
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert turnwire("check", "--only", "F7-*").exit_code == 0
    assert list(deep.iterdir()) == []


@contextlib.contextmanager
def running_check(temporary: Path, *prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    """One that takes long, and has laid out its bait."""
    command = [*prefix, sys.executable, "-m", "turnwire.cli", "sandbox", "check", "--only", "A25*,B1*"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whatever the tests run under
    ) as running:
        while not list(temporary.glob("turnwire-sandboxes-*/check")):
            assert running.poll() is None
            time.sleep(0.01)
        yield running


@isolated
def test_a_line_a_case() -> None:
    done = turnwire("check", "--only", "B9-stop", "--verbose")
    (line,) = [line.split() for line in done.stdout.splitlines() if "B9-stop" in line]
    assert line[:-2] == ["B9-stop", "SIGSTOP", "to", "its", "own", "group", "timeout", "ok"]


@isolated
def test_what_a_tier_does_not_promise_is_not_held_against_it() -> None:
    done = turnwire(
        "check",
        "--tier",
        "restricted",
        "--only",
        "A10-*-fill,B9-stop",
        "--json",
        "process.interpreter=/usr/bin/python3",
    )
    found = json.loads(done.stdout)
    assert (done.exit_code, found["tier"], [one["id"] for one in found["cases"]]) == (0, "restricted", ["B9-stop"])
    assert found["not_promised"] == ["A10-workspace-fill", "A10-shm-fill"]


@isolated
@pytest.mark.parametrize("as_json", [True, False])
def test_a_promise_that_does_not_hold_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    broken = case("E1-unshare", "what would be an escape", py("1 + 1", shows="3"))
    monkeypatch.setattr(hostile, "chosen", lambda patterns: [broken])
    monkeypatch.setitem(sandbox_report._CASES, broken.id, broken)
    done = turnwire("check", "--json") if as_json else turnwire("check")
    assert done.exit_code == 1
    if as_json:
        found = json.loads(done.stdout)
        assert not found["ok"]
        assert "'3' is missing" in found["cases"][0]["runs"][0]["problems"][0]
    else:
        assert "E1-unshare, one by one: what would be an escape: '3' is missing" in done.stdout
        assert "process, tier isolated: 1 of 1 cases do not hold" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("check", "--backend", "podman"), "'podman' is not one of 'process', 'docker'"),
        (("check", "--tier", "none"), "'none' is not one of"),
        (("check", "--only", "Z1"), "'Z1' chooses no case; rows are A1 to H22"),
        (("check", "--parallel", "0"), "0 is not in the range"),
        (("check", "limit.processes=48"), "sandbox.limit: unknown key"),
        (("check", "--config", "nowhere.yaml"), "there is no such file"),
        (("check", "process.interpreter=/nowhere/python3"), "/nowhere/python3"),
        (("check", "--backend", "docker", "docker.host=unix:///nowhere/docker.sock"), "cannot be reached"),
        (("check", "--backend", "docker", "docker.host=ftp://here"), "sandbox.docker.host is 'ftp://here'"),
        (("sweep", "--backend", "docker", "docker.host=unix:///nowhere/docker.sock"), "cannot be reached"),
    ],
)
def test_what_cannot_be_done_is_exit_status_2_with_the_reason(arguments: tuple[str, ...], says: str) -> None:
    done = turnwire(*arguments)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert says in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "sandbox: {backend: docker, docker: {host: 'unix:///nowhere/mine.sock'}}",
        "services: {tool: {sandbox: {backend: docker, docker: {host: 'unix:///nowhere/mine.sock'}}}}",
    ],
)
def test_the_config_of_a_service_or_of_a_run_is_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    done = turnwire("check", "--config", str(tmp_path / "config.yaml"))
    assert "/nowhere/mine.sock" in done.stderr


def abandoned_folder(parent: Path) -> Path:
    """Of a service that is dead: nobody holds its lock."""
    made = parent / "turnwire-sandboxes-dead"
    (made / "a1b2" / "work" / "deep").mkdir(parents=True)
    return made


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sandboxes' folders are looked for."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def sweep(*arguments: str) -> Any:
    return json.loads(turnwire("sweep", "--json", *arguments).stdout)


def test_a_sweep_lists_and_removes_what_dead_services_left(place: Path) -> None:
    dead = abandoned_folder(place)
    leftover = {"kind": "folder", "name": f"{dead}/a1b2", "detail": ""}
    assert sweep("--dry-run") == {"leftovers": [leftover], "removed": 0, "errors": [], "dry_run": True}
    assert dead.exists()
    assert sweep() == {"leftovers": [leftover], "removed": 1, "errors": [], "dry_run": False}
    assert not dead.exists()
    assert "nothing is left behind" in turnwire("sweep").stdout


def test_a_sweep_leaves_what_a_living_service_has(place: Path) -> None:
    held = abandoned_folder(place)
    lock = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep()["leftovers"] == []
        assert held.exists()
    finally:
        os.close(lock)


def test_folders_are_swept_where_the_engine_cannot_be_reached(place: Path) -> None:
    dead = abandoned_folder(place)
    found = sweep("--backend", "docker", "docker.host=unix:///nowhere/docker.sock")
    assert (found["removed"], len(found["errors"])) == (1, 1)
    assert not dead.exists()


def test_databases_are_looked_for_where_the_config_names_a_server(place: Path) -> None:
    config, password = place / "config.yaml", place / "password"
    server = {"host": "127.0.0.1", "port": 1, "tls": "off", "password_file": str(password)}
    config.write_text(json.dumps({"tools": {"sql": {"postgres": server}}}))
    without = turnwire("sweep", "--config", str(config))
    assert without.exit_code == 2
    assert f"tools.sql.postgres.password_file: {password} cannot be read" in without.stderr
    password.write_text("secret")
    (error,) = sweep("--config", str(config))["errors"]
    assert error.startswith("PostgreSQL at 127.0.0.1:1: ")


def remove(container: Any) -> None:
    with contextlib.suppress(docker.errors.NotFound):
        container.remove(force=True)


@pytest.mark.needs("docker")
def test_containers_are_swept_of_dead_services_of_this_owner_alone(place: Path) -> None:
    owner = f"test-{secrets.token_hex(6)}"
    living = Instance(owner)
    living.announce()
    engine = docker.from_env()
    with contextlib.ExitStack() as stack:
        made = []
        for whose, instance in ((owner, "dead"), (owner, living.id), (f"{owner}-other", "dead")):
            labels = {OWNER: whose, INSTANCE: instance, SANDBOX: "a1"}
            made.append(
                engine.containers.run(DEFAULT_IMAGE, ["sleep", "60"], labels=labels, detach=True, network_mode="none")
            )
            stack.callback(remove, made[-1])
        arguments = ("--backend", "docker", f"owner={owner}")
        listed = sweep("--dry-run", *arguments)
        assert [(one["kind"], one["name"]) for one in listed["leftovers"]] == [("container", made[0].id[:12])]
        assert sweep(*arguments)["removed"] == 1
        assert sweep(*arguments)["leftovers"] == []
        assert {kept.id for kept in made[1:]} <= {one.id for one in engine.containers.list()}
    living.close()
