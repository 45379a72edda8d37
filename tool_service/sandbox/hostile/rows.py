"""Which rows there are, and where each is tried: in a case here, or for a reason elsewhere."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from tool_service.sandbox.hostile import (
    descriptors,
    files,
    grading,
    interpreter,
    kernel,
    memory,
    network_and_secrets,
    ordinary,
    processes,
    protocol,
    resources,
    shell,
    sqlite,
    sqlite_files,
    sqlite_sessions,
)
from tool_service.sandbox.hostile.case import Case

CASES: tuple[Case, ...] = (
    *ordinary.CASES,
    *resources.CASES,
    *memory.CASES,
    *processes.CASES,
    *descriptors.CASES,
    *protocol.CASES,
    *interpreter.CASES,
    *shell.CASES,
    *files.CASES,
    *kernel.CASES,
    *network_and_secrets.CASES,
    *grading.CASES,
    *sqlite.CASES,
    *sqlite_files.CASES,
    *sqlite_sessions.CASES,
)

GROUPS = {
    "": "ordinary use",
    "A": "resources",
    "B": "processes and signals",
    "C": "protocol and output",
    "D": "files",
    "E": "privilege and kernel",
    "F": "network",
    "G": "secrets and cheating",
    "H": "SQLite",
}
"""What a letter stands for."""


def _numbered(letter: str, numbers: str) -> tuple[str, ...]:
    return tuple(f"{letter}{number}" for number in numbers.split())


ROWS: tuple[str, ...] = (
    *_numbered("A", "1 2 3 4 6 7 8 9 10 12 13 14 15 16 18 19 20 21 22 24 25 26 27 28 30 31 32 33 34 36 37"),
    *_numbered("B", "1 2 3 4 6 7 8 9 10 12 13 14 15 16 18 19 20 21 22 24 25 26 27"),
    *_numbered("C", "1 2 3 4 6 7 8 9 10 12 13 14 15 16 18 19 20 21 22 24"),
    *_numbered("D", "1 2 3 4 6 7 8 9 10 12 13 14 15 16 18 19 20 21"),
    *_numbered("E", "1 2 3 4 6 7 8 9 10 12 13 14 15 16 18 19 20"),
    *_numbered("F", "1 2 3 4 6 7 8 9"),
    *_numbered("G", "1 2 3 4 6 7 8 9 10"),
    *_numbered("H", "1 2 3 4 6 7 8 9 10 12 13 14 15 16 18 19 20 21 22"),
)
"""Kinds of attack on a sandbox. Numbers that are missing were merged with others."""

ELSEWHERE = {
    "C14": "the size of messages is the service's: tests/tool/test_limits.py, test_bad_clients.py",
    "C16": "turns are numbered by the client: tests/tool/test_reconnection.py",
    "C18": "streams are the service's: tests/tool/test_bad_clients.py",
    "C19": "streams are the service's: tests/tool/test_bad_clients.py, test_python_and_sql.py",
    "F9": "there is no list of allowed addresses: no sandbox reaches any",
    "G8": "tests run in a sandbox made like every other: tests/tool/test_unit_tests_tool.py",
    "G9": "side channels of timing and caches are not kept out: docs/security.md says so",
    "G10": "needs two trajectories: tests/tool/test_sandbox_process.py, test_sandbox_docker.py, test_sandbox_pool.py",
}
"""Rows without a case: why, or where they are tested."""


def chosen(patterns: Sequence[str]) -> list[Case]:
    """The cases of rows, ids or patterns of them, as `A1`, `B*` or `A6-one-big`; all where there are none. Raises
    ValueError for a pattern that chooses nothing."""
    for pattern in patterns:
        if not any(_is_meant(case, pattern) for case in CASES):
            raise ValueError(f"{pattern!r} chooses no case; rows are {ROWS[0]} to {ROWS[-1]}")
    return [case for case in CASES if not patterns or any(_is_meant(case, pattern) for pattern in patterns)]


def _is_meant(case: Case, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (case.id, *case.rows))
