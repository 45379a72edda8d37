"""Certificates: credentials of servers and of clients' channels, made of files that may change at any time."""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from turnwire.errors import ConfigError, Problem
from turnwire.security.config import SYSTEM_CA, ConnectionSecurity, TlsConfig
from turnwire.security.files import Watched


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials:
    """For one secure port. Each handshake takes the certificate that is in the files now. Raises ConfigError."""

    def read() -> _ServerFiles:
        problems: list[Problem] = []
        pair = _pair(config.certificate, config.key, "server.tls", problems)
        client_ca = (
            None if config.client_ca is None else _authorities(config.client_ca, "server.tls.client_ca", problems)
        )
        if problems or pair is None:
            raise ConfigError(problems)
        return _ServerFiles(*pair, client_ca)

    files = Watched([config.certificate, config.key, config.client_ca], read)
    in_use, lock = files.get(), threading.Lock()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """None keeps what is in use. gRPC frees what it is given: each answer is one of its own."""
        nonlocal in_use
        found = files.get()
        with lock:
            if found is in_use:
                return None
            in_use = found
            return found.for_grpc()

    return grpc.dynamic_ssl_server_credentials(
        in_use.for_grpc(),
        changed,  # type: ignore[arg-type]  # the stubs forget None
        require_client_authentication=config.client_ca is not None,
    )


@dataclass(frozen=True)
class _ServerFiles:
    """What the files of a server hold."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], root_certificates=self.client_ca
        )


def channel_credentials(config: ConnectionSecurity) -> grpc.ChannelCredentials:
    """For a channel, of what is in the files now. Raises ConfigError."""
    problems: list[Problem] = []
    authorities = None if config.ca in (None, SYSTEM_CA) else _authorities(str(config.ca), "ca", problems)
    pair = None
    if config.certificate is not None and config.key is not None:
        pair = _pair(config.certificate, config.key, "", problems)
    if problems:
        raise ConfigError(problems, "connection")
    certificate, key = pair or (None, None)
    return grpc.ssl_channel_credentials(authorities, key, certificate)


def _pair(certificate: str, key: str, place: str, problems: list[Problem]) -> tuple[bytes, bytes] | None:
    """Bytes of both. One that does not fit the other (it may be half of a change) is a problem here, and not a
    handshake that fails for a reason nobody is told."""
    prefix = f"{place}." if place else ""
    chain, private = _read(certificate, f"{prefix}certificate", problems), _read(key, f"{prefix}key", problems)
    if chain is None or private is None:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        problems.append(Problem(f"{prefix}certificate", f"{certificate} with the key {key} cannot be used: {reason}"))
        return None
    return chain, private


def _authorities(path: str, key: str, problems: list[Problem]) -> bytes | None:
    content = _read(path, key, problems)
    if content is None:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        problems.append(Problem(key, f"{path} holds no certificates in PEM: {reason}"))
        return None
    return content


def _read(path: str, key: str, problems: list[Problem]) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        problems.append(Problem(key, f"{path} cannot be read: {error.strerror}"))
        return None
