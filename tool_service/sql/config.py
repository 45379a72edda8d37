"""What an operator says about the PostgreSQL server, under `tools.sql.postgres`."""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from turnwire.errors import Problem

Count = Annotated[int, msgspec.Meta(ge=1)]
MIB = 2**20


class PostgresConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A server of its own for the tool: trajectories' roles and databases come and go on it.

    host, port: where it listens. Not a pooler: a session must keep its connection.
    user: a superuser, with which databases and roles are made and removed. Trajectories never act as it.
    database: where that user connects to. The same for all services that share the server.
    password_file, password_env: a file, or an environment variable, that holds the user's password.
    tls: `verify`: encrypted, with the server's certificate and name checked; `off`: in the clear.
    ca_file: PEM of the authorities that may have signed the certificate; empty: the system's.
    templates: databases that a trajectory's context may name, to start from a copy of one.
    owner: leftovers of dead services are removed by services that name the same owner.
    max_databases: trajectories with a database at once; others wait.
    ready: copies of each template (where none is named: empty databases) that wait for trajectories, made in the
        background; a first call without one takes half a second longer. At most max_databases together. A template that
        changes under a running service is not copied anew for those that wait.
    wait_seconds: how long one waits before its turn is answered RESOURCE_EXHAUSTED. It may be sent again.
    max_database_bytes: a trajectory whose database grows past it loses it, and starts afresh. Each of its files (a
        table has one to three, an index one) counts 16 KiB at least.
    temp_bytes: of one statement's temporary files.
    """

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 5432
    user: str = "postgres"
    database: str = "postgres"
    password_file: str = ""
    password_env: str = ""
    tls: Literal["verify", "off"] = "verify"
    ca_file: str = ""
    templates: tuple[str, ...] = ()
    owner: str = "turnwire"
    max_databases: Count = 64
    ready: Annotated[int, msgspec.Meta(ge=0)] = 2
    wait_seconds: Annotated[float, msgspec.Meta(gt=0)] = 20.0
    max_database_bytes: Annotated[int, msgspec.Meta(ge=16 * MIB)] = 1024 * MIB
    temp_bytes: Annotated[int, msgspec.Meta(ge=MIB)] = 256 * MIB

    def check(self) -> list[Problem]:
        """What is wrong beyond types, as far as it shows without a connection."""
        problems = []
        if "/" in self.host:  # not shown: a URL may hold a password
            problems.append(Problem("postgres.host", "is no name or address; of a URL, set host, port, user, database"))
        if bool(self.password_file) == bool(self.password_env):
            problems.append(Problem("postgres", "set either password_file or password_env"))
        elif self.password_env and not os.environ.get(self.password_env):
            problems.append(Problem("postgres.password_env", f"the environment has no {self.password_env}"))
        elif self.password_file and not os.access(self.password_file, os.R_OK):
            problems.append(Problem("postgres.password_file", f"{self.password_file} cannot be read"))
        if self.ca_file and not os.access(self.ca_file, os.R_OK):
            problems.append(Problem("postgres.ca_file", f"{self.ca_file} cannot be read"))
        if self.ca_file and self.tls == "off":
            problems.append(Problem("postgres.ca_file", "has no effect with tls: off"))
        for name in self.templates:
            if not re.fullmatch(r"[^\0]{1,63}", name) or name in ("template0", "template1"):
                problems.append(Problem("postgres.templates", f"{name!r} is not the name of a database to copy"))
        return problems

    def warm(self) -> dict[str, int]:
        """How many copies of which templates wait. The empty name: an empty database."""
        templates = self.templates or ("",)
        return dict.fromkeys(templates, min(self.ready, self.max_databases // len(templates)))

    def password(self) -> str:
        """The user's password. Read anew each time, so that it may be changed under a running service."""
        if self.password_env:
            return os.environ[self.password_env]
        return Path(self.password_file).read_text().rstrip("\n")

    def tls_context(self) -> ssl.SSLContext | None:
        """How the connection is encrypted; None: it is not."""
        return ssl.create_default_context(cafile=self.ca_file or None) if self.tls == "verify" else None
