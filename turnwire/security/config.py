"""What can be set about the security of servers and of clients. Light: no grpc."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

SYSTEM_CA = "system"
"""In the place of a CA's file: the well-known authorities that gRPC brings along."""


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate of a server. The files are read again when they change; connections that stand stay.

    certificate: PEM file with the certificate and those between it and the CA.
    key: PEM file with its private key.
    client_ca: PEM file of the authorities whose certificates clients must show (mutual TLS); unset: clients show none.
    """

    certificate: str
    key: str
    client_ca: str | None = None


class QuotasConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a server one client may take. A client is a token's name; without tokens, the subject of a
    certificate; without these, a host. What is beyond is answered RESOURCE_EXHAUSTED with the time to wait.

    streams: calls in flight at once, streams and others; unset: all of the server's but a sixteenth.
    requests_per_second: calls that begin, in the long run; unset: any number. Messages within a stream do not count:
        they wait for each other.
    burst: calls that may begin at once after a pause.
    """

    streams: Annotated[int, msgspec.Meta(ge=1)] | None = None
    requests_per_second: Annotated[float, msgspec.Meta(gt=0)] | None = None
    burst: Annotated[int, msgspec.Meta(ge=1)] = 100

    def streams_of(self, total: int) -> int:
        """Calls in flight that one client may have, of `total` that the server may have."""
        return self.streams or max(1, total - total // 16)


class ConnectionSecurity(msgspec.Struct, frozen=True, kw_only=True):
    """How a client knows a service, and is known to it. With none of these it speaks plaintext and shows nothing.

    ca: PEM file of the authorities that may vouch for the service, or `system`; given, the connection is TLS.
    certificate, key: PEM files of the client's own certificate, where the service asks for one (mutual TLS).
    server_name: the name in the service's certificate, where the address is not in it.
    token_file: file that holds a bearer token. It is sent with each call, over TLS or to loopback only.

    Files are read again when they change: tokens with the next call, certificates with the next call, over a connection
    of its own.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    server_name: str | None = None
    token_file: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together: give both, or neither")
        if self.ca is None and (self.certificate is not None or self.server_name is not None):
            raise ValueError(f"name the ca that vouches for the service (a PEM file, or {SYSTEM_CA!r})")


PLAINTEXT = ConnectionSecurity()
"""Nothing is shown, and nothing is checked."""


def shown_to_all(target: str, security: ConnectionSecurity) -> str:
    """What is wrong where a token would travel to `host:port` for all on the way to read; empty if it would not."""
    if security.token_file is None or security.ca is not None or is_loopback(target.rpartition(":")[0]):
        return ""
    return f"a token is not sent to {target} in plaintext; name the ca that vouches for the service there"


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
