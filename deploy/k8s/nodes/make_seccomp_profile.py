"""Writes seccomp/turnwire-tool.json, the profile of the tool service's pods in components/isolated.

    python deploy/k8s/nodes/make_seccomp_profile.py

It is an allow-list, made from the one table of the sandboxes' filter (tool_service/sandbox/inside/syscalls.py): what
programs inside may call, which is enough for the service, and what it takes to build their walls. The sandboxes' own
filter, which also checks arguments, stands within it.
"""

import errno
import json
from pathlib import Path
from typing import Any

from tool_service.sandbox.inside import syscalls

PATH = Path(__file__).parent / "seccomp" / "turnwire-tool.json"

_WALLS = ("mount", "mount_setattr", "pivot_root", "setns", "sethostname", "umount2", "unshare")
"""Namespaces and the sandboxes' root. In a user namespace of their own, where they reach nothing of the node's."""
_FAMILIES = (1, 2, 10, 16)
"""Of sockets: unix, inet, inet6, netlink (addresses of interfaces). No vsock, which no network namespace covers."""


def profile() -> dict[str, Any]:
    """As containers' engines and the kubelet read it."""
    verdicts = syscalls.verdicts(isolated=True, from_the_start=True)
    refused = {name: verdict for name, verdict in verdicts.items() if isinstance(verdict, int) and verdict}
    allowed = ({*verdicts} - {*refused} - {"socket"}) | {*_WALLS}
    sockets = [
        {
            "names": ["socket"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"}],
        }
        for family in _FAMILIES
    ]
    # By name as well, for engines that do not know defaultErrnoRet (Docker before 23) and would say EPERM: libraries
    # fall back to an older call at ENOSYS alone.
    absent = {
        "names": sorted(name for name, error in refused.items() if error == errno.ENOSYS),
        "action": "SCMP_ACT_ERRNO",
        "errnoRet": errno.ENOSYS,
    }
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "archMap": [
            {"architecture": name, "subArchitectures": []} for name in ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
        ],
        "syscalls": [{"names": sorted(allowed), "action": "SCMP_ACT_ALLOW"}, *sockets, absent],
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(profile(), indent=1) + "\n", encoding="utf-8")
