"""The options of commands that speak to a running service: how it is known, and what is shown to it."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from typing import Any

import click

from turnwire.security.config import PLAINTEXT, SYSTEM_CA, ConnectionSecurity
from turnwire.serving import ServerConfig

_OPTIONS = {
    "ca": ("FILE", f"CA (PEM) that vouches for the service, or `{SYSTEM_CA}`; with it the connection is TLS."),
    "certificate": ("FILE", "Your own certificate (PEM), where the service asks for one."),
    "key": ("FILE", "The private key (PEM) of --certificate."),
    "server_name": ("NAME", "Name in the service's certificate, where the address is not in it."),
    "token_file": ("FILE", "File with your bearer token."),
}


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options to a command, which gets them as one argument `security`. Each is also an environment variable:
    TURNWIRE_CA, TURNWIRE_CERTIFICATE, TURNWIRE_KEY, TURNWIRE_SERVER_NAME, TURNWIRE_TOKEN_FILE."""

    @functools.wraps(command)
    def with_security(**arguments: Any) -> None:
        given = {name: arguments.pop(name) or None for name in _OPTIONS}
        try:
            security = ConnectionSecurity(**given)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        command(**arguments, security=security)

    for name, (metavar, text) in reversed(_OPTIONS.items()):
        option = click.option(
            f"--{name.replace('_', '-')}",
            metavar=metavar,
            envvar=f"TURNWIRE_{name.upper()}",
            show_envvar=True,
            help=text,
        )
        with_security = option(with_security)
    return with_security


def options_of(security: ConnectionSecurity) -> str:
    """As one types them, each with a space before it."""
    given = {name: getattr(security, name) for name in _OPTIONS}
    return "".join(f" --{name.replace('_', '-')} {shlex.quote(value)}" for name, value in given.items() if value)


def started_here(server: ServerConfig, security: ConnectionSecurity) -> ConnectionSecurity:
    """For a service that this command started: what is set for another one, as in the environment, is for that one."""
    return PLAINTEXT if server.tls is None and server.tokens is None else security
