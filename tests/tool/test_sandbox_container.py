"""The process backend where CI systems and dev containers live: a default, unprivileged container of the base image."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from tool_service.sandbox.seccomp_profile import docker_profile

pytestmark = [pytest.mark.needs("docker"), pytest.mark.timeout(1200)]

IMAGE = "python:3.11-slim-bookworm"
ROOT = Path(__file__).resolve().parents[2]
USERS = ("root", "1000")

START = """
import asyncio, sys
from tool_service.sandbox import ProcessBackend, ProcessConfig, SandboxLimits, SandboxUnavailable, Turn
async def main():
    backend = ProcessBackend(ProcessConfig(minimum_tier=sys.argv[1]))
    try:
        await backend.start()
    except SandboxUnavailable as error:
        return print(error)
    sandbox = await backend.create(SandboxLimits())
    print(backend.tier.name, (await sandbox.run(Turn("python", {"code": "6 * 7"}))).stdout.decode())
    await backend.close()
asyncio.run(main())
"""


def run(command: list[str], user: str, *flags: str) -> str:
    """What a container prints that has nothing but this repository and the environment's packages to read."""
    packages = Path(msgspec.__file__).parents[1]
    mounts = (f"--volume={ROOT}:/repository:ro", f"--volume={packages}:/packages:ro")
    environment = ("--env=PYTHONPATH=/repository:/packages", "--env=PYTHONDONTWRITEBYTECODE=1")
    arguments = ["docker", "run", "--rm", *mounts, *environment, f"--user={user}", *flags, IMAGE, *command]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("user", USERS)
def test_every_case_of_the_restricted_tier_holds_in_a_default_container(user: str, passes: tuple[int, ...]) -> None:
    if user != "root":  # its sandboxes share one limit of processes: fork bombs would be each other's neighbours
        passes = (1,)
    seen = json.loads(run(["python3", "/repository/tests/tool/sandbox_in_container.py", *map(str, passes)], user))
    report = seen["report"]
    assert report["tier"] == "restricted"
    assert {one["case"]: one["problems"] for one in report["outcomes"] if one["problems"]} == {}
    assert report["problems"] == []
    assert len(report["outcomes"]) > 150
    assert "--cap-add SYS_ADMIN" in seen["refusal"]
    assert "sandbox.minimum_tier: restricted" in seen["refusal"]


@pytest.mark.parametrize("user", USERS)
def test_the_refusal_says_what_makes_the_container_isolate(user: str) -> None:
    refusal = run(["python3", "-c", START, "isolated"], user)
    for_root, _, for_others = refusal.partition("one of another user")
    flags = re.findall(r"--(?:cap-add|security-opt) [\w=]+", for_root if user == "root" else for_others)
    assert flags
    seen = run(["python3", "-c", START, "isolated"], user, *" ".join(flags).split())
    assert seen.split() == ["ISOLATED", "42"]


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (("--cap-drop=ALL",), "as an ordinary user"),
        (("--read-only",), "a temporary folder that it can write to (TMPDIR)"),
    ],
)
def test_a_container_that_gives_too_little_is_refused_with_the_fix(flags: tuple[str, ...], fix: str) -> None:
    assert fix in run(["python3", "-c", START, "restricted"], "root", *flags)


def test_a_hardened_container_of_an_ordinary_user_is_enough() -> None:
    flags = ("--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only", "--tmpfs=/tmp")
    assert run(["python3", "-c", START, "restricted"], "1000", *flags).split() == ["RESTRICTED", "42"]


def test_what_lies_in_a_small_temporary_folder_is_not_held_against_a_sandbox() -> None:
    fill = "open('/tmp/of-others', 'wb').write(bytes(600 << 20)); "
    turn = "import time; time.sleep(0.5); 6 * 7"
    command = ["python3", "-c", fill + START.replace("6 * 7", turn), "restricted"]
    assert run(command, "1000", "--tmpfs=/tmp:size=1g").split() == ["RESTRICTED", "42"]


def test_the_profile_for_containers_is_the_table_of_the_sandboxes(tmp_path: Path) -> None:
    program = r"""
import ctypes, errno, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    return 0 if libc.syscall(*arguments) >= 0 else errno.errorcode[ctypes.get_errno()]
numbers = {"x86_64": (56, 435, 41, 157, 16, 162), "aarch64": (220, 435, 198, 167, 29, 81)}
clone, clone3, socket, prctl, ioctl, sync = numbers[__import__("os").uname().machine]
threading.Thread(target=print, args=("thread",)).start()
print(call(clone, 0x10000011, 0, 0, 0, 0), call(clone3, 0, 0), call(999), call(sync))
print([call(socket, *a) for a in ((1, 1, 0), (2, 1, 6), (2, 2, 17))])
print(all(call(socket, *a) for a in ((2, 3, 1), (16, 3, 0), (17, 3, 0), (40, 1, 0), (38, 5, 0), (2, 1, 132))))
print(call(prctl, 15, b"x"), call(prctl, 35, 1) != 0, call(ioctl, 0, 0x5412, b"x") != 0)
print(call(ioctl, 0, 0x5412 | 1 << 32, b"x") != 0)
"""
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(docker_profile()))
    flags = ("--security-opt=no-new-privileges", f"--security-opt=seccomp={profile}", "--cap-drop=ALL")
    seen = run(["python3", "-c", program], "1000", *flags)
    assert seen.splitlines() == ["thread", "EPERM ENOSYS ENOSYS 0", "[0, 0, 0]", "True", "0 True True", "True"]


def test_no_rule_of_the_profile_contradicts_another() -> None:
    rules = docker_profile()["syscalls"]
    whole = [name for rule in rules if not rule["args"] for name in rule["names"]]
    checked = {name for rule in rules if rule["args"] for name in rule["names"]}
    assert len(whole) == len(set(whole))
    assert not checked & set(whole), "a rule without arguments would swallow those with"
    assert {"clone", "socket", "ioctl", "prctl"} <= checked
    assert all(re.fullmatch("[a-z0-9_]+", name) for name in (*whole, *checked))
