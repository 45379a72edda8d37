"""What a sandbox's limits look like from the inside: proof, beside what was asked for."""

import json
import math
from typing import Any

from tool_service.sandbox.base import MIB, Sandbox, SandboxUnavailable, Turn, TurnStatus

_PROBE_SECONDS = 10.0
_PROBE = """
import json, os, resource, socket, sys

def has_route():
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent
    except OSError:
        return False
    return True

def first(*paths):
    for path in paths:
        try:
            return open(path).read().split()
        except OSError:
            pass
    return []

group = "/sys/fs/cgroup"
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
quota = first(f"{group}/cpu.max")[:2]
if not quota:
    quota = [*first(f"{group}/cpu/cpu.cfs_quota_us"), *first(f"{group}/cpu/cpu.cfs_period_us")]
folders = ("/workspace", "/tmp", "/dev/shm") if os.path.ismount("/workspace") else ()
space = {path: os.statvfs(path) for path in folders}
print(json.dumps({
    "uid": os.getuid(),
    "capabilities": status["CapEff"].strip(),
    "no_new_privs": status["NoNewPrivs"].strip(),
    "seccomp": status["Seccomp"].strip(),
    "route": has_route(),
    "interfaces": first("/proc/self/net/dev"),
    "read_only_root": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
    "python": sys.version.split()[0],
    "memory": first(f"{group}/memory.max", f"{group}/memory/memory.limit_in_bytes"),
    "pids": first(f"{group}/pids.max", f"{group}/pids/pids.max"),
    "cpu": quota,
    "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
    "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "space": {path: [info.f_blocks * info.f_frsize, info.f_files] for path, info in space.items()},
}))
"""
_SECCOMP_MODES = {"0": "off", "1": "strict", "2": "filter"}


async def seen_from_inside(sandbox: Sandbox) -> dict[str, str]:
    """By name, for people. Raises `SandboxUnavailable` when the sandbox cannot even run that."""
    result = await sandbox.run(Turn("python", {"code": _PROBE}, _PROBE_SECONDS))
    if result.status is not TurnStatus.OK:
        text = (result.stderr + result.detail.encode()).decode("utf-8", "replace")
        raise SandboxUnavailable(f"a first sandbox could not say what it sees: {result.status} {text}")
    seen: dict[str, Any] = json.loads(result.stdout)
    return {
        "uid": str(seen["uid"]),
        "capabilities": "none" if int(seen["capabilities"], 16) == 0 else seen["capabilities"],
        "no new privileges": "yes" if seen["no_new_privs"] == "1" else "no",
        "seccomp": _SECCOMP_MODES.get(seen["seccomp"], seen["seccomp"]),
        "network": "has a route out" if seen["route"] else "none",
        "network interfaces": _interfaces(seen["interfaces"]),
        "root": "read-only" if seen["read_only_root"] else "writable",
        "python": seen["python"],
        "cgroup memory": _mebibytes(seen["memory"]),
        "cgroup pids": " ".join(seen["pids"]) or "none",
        "cgroup cpus": _processors(seen["cpu"]),
        "processes": str(seen["processes"]),
        "open files": str(seen["open_files"]),
        **{path: f"{size // MIB} MiB, {inodes} inodes" for path, (size, inodes) in seen["space"].items()},
    }


def _interfaces(words: list[str]) -> str:
    """Out of /proc/net/dev, where the name of each is a word that ends in a colon."""
    return ", ".join(word[:-1] for word in words if word.endswith(":")) or ("none" if words else "not shown")


def _mebibytes(words: list[str]) -> str:
    return f"{int(words[0]) // MIB} MiB" if words and words[0].isdigit() else "none"


def _processors(words: list[str]) -> str:
    """Out of quota and period; quota is -1 (v1) or "max" (v2) where there is none."""
    try:
        count = int(words[0]) / int(words[1])
    except (IndexError, ValueError, ZeroDivisionError):
        count = math.inf
    return f"{count:g}" if 0 < count < math.inf else "none"
