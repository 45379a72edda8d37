"""The system call table of the sandboxes (inside/syscalls.py) as a Docker seccomp profile.

A profile has one default error for what no rule names and for an argument that no rule allows: ENOSYS, or EPERM with an
engine older than the field (Docker before 23). The rules of one call must not overlap, so a refused argument has an
error of its own only where that can be said without: a flag that must not be set. Architectures that are not named,
32-bit code and x32, are killed.
"""

import errno
import itertools
from typing import Any

from tool_service.sandbox.inside import syscalls

_ARCHITECTURES = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")


def docker_profile() -> dict[str, Any]:
    """What `--security-opt seccomp=FILE` takes as JSON: the isolated tier's filter."""
    by_error: dict[int | None, list[str]] = {}
    checked = []
    for name, verdict in syscalls.verdicts(isolated=True, from_the_start=True).items():
        if isinstance(verdict, int):
            by_error.setdefault(verdict, []).append(name)
        elif verdict:
            checked += _rules(name, verdict)
        else:
            by_error.setdefault(None, []).append(name)
    plain = [_rule(sorted(names), error) for error, names in by_error.items()]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "archMap": [{"architecture": name, "subArchitectures": []} for name in _ARCHITECTURES],
        "syscalls": [*plain, *checked],
    }


def _rule(names: list[str], error: int | None, *arguments: dict[str, Any]) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": names, "action": "SCMP_ACT_ALLOW", "args": list(arguments)}
    return rule if error is None else {**rule, "action": "SCMP_ACT_ERRNO", "errnoRet": error}


def _masked(check: syscalls.Check, mask: int, value: int) -> dict[str, Any]:
    return {"index": check.argument, "op": "SCMP_CMP_MASKED_EQ", "value": mask, "valueTwo": value & mask}


def _compared(check: syscalls.Check, operator: str, value: int) -> dict[str, Any]:
    return {"index": check.argument, "op": f"SCMP_CMP_{operator}", "value": value}


def _rules(name: str, checks: tuple[syscalls.Check, ...]) -> list[dict[str, Any]]:
    """Allowed: every combination of the checks' values, or of what is below and above those that are refused. Refused
    with a word: these, and each bit of a mask that must be empty."""
    choices = [
        [_compared(check, "LT", min(check.values)), _compared(check, "GT", max(check.values))]
        if check.refused
        else [_masked(check, check.mask, value) for value in check.values]
        for check in checks
    ]
    rules = [_rule([name], None, *combination) for combination in itertools.product(*choices)]
    for check in checks:
        if check.refused:
            rules += [_rule([name], check.error, _compared(check, "EQ", value)) for value in check.values]
        elif check.values == (0,):
            bits = [1 << place for place in range(32) if check.mask >> place & 1]
            rules += [_rule([name], check.error, _masked(check, bit, bit)) for bit in bits]
    return rules
