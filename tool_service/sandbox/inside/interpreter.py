"""The interpreter that becomes a supervisor: what is loaded before any fork, and the environment that programs see."""

import codecs
import importlib
import os

from . import runtimes, worker, worker_tests

_COMMON_MODULES = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
    *("functools", "hashlib", "heapq", "io", "itertools", "math", "operator", "random", "re", "statistics", "string"),
    *("subprocess", "textwrap", "threading", "typing", "unicodedata"),
)


def warm_up(shared: bool) -> None:
    """Do what every sandbox needs and none changes, once, before any fork: each page that a fork need not write to is a
    page that is not copied. Imports what turns commonly need. `shared`: by many sandboxes, for which also what few need
    is worth its memory."""
    for name in runtimes.NAMES:
        runtimes.find(name)
    for name in (*_COMMON_MODULES, *(worker_tests.HEAVY if shared else ())):
        importlib.import_module(name)
    for encoding in ("ascii", "latin-1", "utf-8-sig", "idna"):
        codecs.lookup(encoding)
    worker.own_streams()


def set_environment(workspace: str, temporary: str) -> None:
    """All that programs see of an environment. Before the supervisor, which hands it on."""
    os.environ.clear()
    os.environ.update(
        PATH="/usr/local/bin:/usr/bin:/bin",
        HOME=workspace,
        TMPDIR=temporary,
        LANG="C.UTF-8",
        USER="sandbox",
        TZ="UTC",
        XDG_CACHE_HOME=f"{temporary}/cache",  # both are below HOME else, where they would be the program's own files
        XDG_CONFIG_HOME=f"{temporary}/config",
        PIP_RETRIES="0",  # there is no network: what waits between its tries would wait for nothing
        npm_config_fetch_retries="0",
    )
