"""What the engine is told of a sandbox's container: every wall that an engine can build."""

import binascii
import functools
import json
import marshal
import sys
from pathlib import Path
from typing import Any

from tool_service.sandbox.base import MIB, SandboxLimits
from tool_service.sandbox.docker_config import DockerConfig
from tool_service.sandbox.inside import jail, network
from tool_service.sandbox.seccomp_profile import docker_profile
from tool_service.sandbox.supervised import limits_as_dict

OWNER, INSTANCE, SANDBOX = "turnwire.owner", "turnwire.instance", "turnwire.sandbox"
"""Labels."""

_INSIDE = Path(__file__).parent / "inside"
_BOOT = (_INSIDE / "boot.py").read_text(encoding="utf-8")
_NOT_THERE = ("boot", "zygote")
_SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in _INSIDE.glob("*.py") if path.stem not in _NOT_THERE}
_SECCOMP = json.dumps(docker_profile())
_SUPERVISOR_BYTES = 64 * MIB
"""Of the supervisor itself, beside copies of the one file that it may be carrying."""
_FILE_COPIES = 3
_SUPERVISOR_TASKS = 16
_SUPERVISOR_FILES = 256
_SHARES = {jail.WORKSPACE: 5, jail.TEMPORARY: 2, jail.SHARED_MEMORY: 1}
"""The workspace's bytes and inodes in eighths: three mounts cannot share one cap, and together must not exceed it."""
_FEWEST_INODES = 16
_HIDDEN = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/block", "/sys/bus"),
    *("/sys/class", "/sys/dev", "/sys/devices", "/sys/firmware", "/sys/hypervisor", "/sys/kernel"),
    *("/sys/module", "/sys/power"),
)
"""The engine's own list, and the machine's devices."""


@functools.cache
def first_message(limits: SandboxLimits, again: bool = False) -> bytes:
    """What the boot code in the container reads from its stdin. `again`: when it is used again."""
    message = {
        "sources": _SOURCES,
        "code": {name: _compiled(name, source) for name, source in _SOURCES.items()},
        "python": sys.implementation.cache_tag,
        "start": {"limits": limits_as_dict(limits), "again": again},
    }
    data = json.dumps(message).encode("ascii")
    return len(data).to_bytes(4, "big") + data


def _compiled(name: str, source: str) -> str:
    code = compile(source, f"<inside.{name}>", "exec", dont_inherit=True)
    return binascii.b2a_base64(marshal.dumps(code), newline=False).decode("ascii")


def memory_bytes(limits: SandboxLimits) -> int:
    """The cgroup's limit. The supervisor ends a turn at `limits.memory_bytes`; this is the wall behind it, wide enough
    that full folders alone can never cost the supervisor its life."""
    return max(limits.memory_bytes, limits.workspace_bytes) + _SUPERVISOR_BYTES + _FILE_COPIES * limits.file_bytes


def specification(config: DockerConfig, limits: SandboxLimits, uid: int, labels: dict[str, str]) -> dict[str, Any]:
    """The body of the engine's `POST /containers/create`."""
    memory = memory_bytes(limits)
    return {
        "Image": config.image,
        "Entrypoint": ["python3", "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT],
        "Cmd": [],
        "User": f"{uid}:{uid}",
        "WorkingDir": "/",
        "Hostname": jail.HOSTNAME,
        "Labels": labels,
        "Tty": False,
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        # A namespace with its loopback and no more. The engine's own ways to give it names start a process of the
        # engine's for each container, which costs a third of all that can be made; images can know them (see
        # sandbox_images).
        "NetworkDisabled": True,
        "StopSignal": "SIGKILL",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": "none",
            "Sysctls": network.SETTINGS,
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges", f"seccomp={_SECCOMP}"],
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "Init": False,
            "Tmpfs": {path: _tmpfs(limits, share, uid) for path, share in _SHARES.items()},
            # Not as `Binds`: for a path that is not there an engine would make a folder on its host.
            "Mounts": [
                {"Type": "bind", "Source": path, "Target": path, "ReadOnly": True} for path in config.read_only_paths
            ],
            "MaskedPaths": list(_HIDDEN),
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(config.cpus * 1e9),
            "PidsLimit": limits.processes + _SUPERVISOR_TASKS,
            "Ulimits": [
                _ulimit("nofile", limits.open_files + _SUPERVISOR_FILES),
                _ulimit("core", 0),
                _ulimit("memlock", 64 << 10),
            ],
            "LogConfig": {"Type": "none"},
            "RestartPolicy": {"Name": "no"},
            **({"Runtime": config.runtime} if config.runtime else {}),
        },
    }


def _tmpfs(limits: SandboxLimits, share: int, uid: int) -> str:
    size = limits.workspace_bytes * share // 8
    inodes = max(limits.workspace_inodes * share // 8, _FEWEST_INODES)
    return f"rw,exec,nosuid,nodev,size={size},nr_inodes={inodes},uid={uid},gid={uid},mode=700"


def _ulimit(name: str, value: int) -> dict[str, Any]:
    return {"Name": name, "Soft": value, "Hard": value}
