"""Whether the engine's runtime is known to let a container out."""

import os.path
import re
from typing import Any

from tool_service.sandbox.base import SandboxUnavailable
from tool_service.sandbox.docker_config import DockerConfig

_FIXED = {(1, 2): (1, 2, 8, 0), (1, 3): (1, 3, 3, 0), (1, 4): (1, 4, 0, -997)}
"""The first release of each line without the known escapes (the last were CVE-2025-31133, 2025-52565 and 2025-52881).
A release candidate n counts as n - 1000, before its release."""
UNKNOWN = "unknown"


def runc_version(version: dict[str, Any]) -> str:
    """Out of the engine's answer to `GET /version`. Distributions put what they changed into the commit's field."""
    for component in version.get("Components") or ():
        if component.get("Name") == "runc":
            commit = (component.get("Details") or {}).get("GitCommit", "")
            release = str(component.get("Version", ""))
            return commit if release and commit.startswith(release) else release or UNKNOWN
    return UNKNOWN


def is_vulnerable(version: str) -> bool:
    """Whether a runc of that version has a known escape, as far as its number says. An unknown one counts as such."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)(?:[-~]?rc\.?(\d+))?", version)
    if found is None:
        return True
    major, minor, patch = (int(part) for part in found.groups()[:3])
    number = (major, minor, patch, int(found[4]) - 1000 if found[4] else 0)
    fixed = _FIXED.get((major, minor))
    return number < fixed if fixed else number < min(_FIXED.values())


def check_runtime(
    config: DockerConfig, version: dict[str, Any], default_runtime: str, runtimes: dict[str, Any] | None = None
) -> str:
    """The runtime and its version, for people. `runtimes`: the engine's, with the program of each, which decides: runc
    has several names. Raises `SandboxUnavailable` for one with known escapes."""
    name = config.runtime or default_runtime
    program = (runtimes or {}).get(name, {}).get("path") or name
    if os.path.basename(program) != "runc":
        return name
    found = runc_version(version)
    if is_vulnerable(found) and config.accept_runtime_version != found:
        raise SandboxUnavailable(
            f"the engine's runtime is runc {found}, from which programs are known to escape (fixed in 1.2.8, 1.3.3 and "
            f"1.4.0-rc.3). Update it, or use another runtime (sandbox.docker.runtime: runsc). Where your distribution "
            f'has repaired this version, say so: sandbox.docker.accept_runtime_version: "{found}".'
        )
    return f"{name} {found}"
