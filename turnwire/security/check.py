"""What is wrong with the security of a config beyond its types: files that are not there, or are something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from turnwire.errors import ConfigError, Problem
from turnwire.security.config import ConnectionSecurity, TlsConfig, shown_to_all
from turnwire.security.tls import channel_credentials, server_credentials
from turnwire.security.tokens import TokenTable, read_token


def check_server(tls: TlsConfig | None, tokens: str | None) -> list[Problem]:
    """Of a service's `server`."""
    problems: list[Problem] = []
    if tls is not None:
        try:
            server_credentials(tls)
        except ConfigError as error:
            problems += error.problems
    if tokens is not None:
        try:
            TokenTable(tokens)
        except ConfigError as error:
            problems += [Problem("server.tokens", f"{tokens}: {problem}") for problem in error.problems]
    return problems


def check_client(client: ConnectionSecurity, targets: Sequence[str]) -> list[Problem]:
    """Of a service's `client`, for the services that it calls."""
    return [Problem(f"client.{key}" if key else "client", message) for key, message in _client(client, targets)]


def _client(client: ConnectionSecurity, targets: Sequence[str]) -> Iterator[tuple[str, str]]:
    if client.ca is not None:
        try:
            channel_credentials(client)
        except ConfigError as error:
            yield from ((problem.key, problem.message) for problem in error.problems)
    if client.token_file is not None:
        try:
            read_token(client.token_file)
        except ConfigError as error:
            yield from ((problem.key, problem.message) for problem in error.problems)
    for target in targets:
        if message := shown_to_all(target, client):
            yield "", message
