"""Why no connection comes about, by a handshake of our own. gRPC tells of one of several addresses, the last that it
tried, and of a service that refuses our certificate only that it closed the connection."""

from __future__ import annotations

import asyncio
import ssl

from turnwire.security.config import SYSTEM_CA, ConnectionSecurity

SECONDS = 5.0
"""After which nobody is there."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEADER, _FRAME_TYPE, _SETTINGS = 9, 3, 4
"""Of HTTP/2: both sides begin with a frame of their settings."""


async def why_refused(target: str, security: ConnectionSecurity) -> str:
    """What is wrong between the service at `host:port` and a client with this security, and what to look at.

    Empty where nothing is, and where nobody answers.
    """
    try:
        context = None if security.ca is None else _context(security)
    except OSError:  # files in the middle of a change
        return ""
    try:
        # A service that ends in this moment hangs up, too, but not twice.
        for _ in range(2):
            async with asyncio.timeout(SECONDS):
                if await _shakes(target, security.server_name, context):
                    return ""
    except (OSError, UnicodeError) as error:  # the latter: a name that cannot be one
        return _told(error)
    if context is None:
        return "it hangs up: does it ask for TLS (`ca`)?"
    return "it hangs up: does it ask for a certificate of yours (`certificate`, `key`), or for one of another CA?"


def _told(error: Exception) -> str:
    """For people, where it is TLS that failed; empty where nobody answers, or the other side ended in the middle."""
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            "its certificate is not vouched for by your `ca`, or is for another name than this (`server_name`): "
            f"{error.verify_message}"
        )
    return "it speaks plaintext: give no `ca`" if error.reason == "WRONG_VERSION_NUMBER" else f"TLS fails: {error}"


async def _shakes(target: str, server_name: str | None, context: ssl.SSLContext | None) -> bool:
    """Whether the other side speaks with us. One that refuses our certificate hangs up after the handshake."""
    host, _, port = target.rpartition("/")[2].rpartition(":")
    host = host.strip("[]")
    name = None if context is None else server_name or host
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    try:
        writer.write(_PREFACE)
        header = await reader.readexactly(_FRAME_HEADER)
    except (asyncio.IncompleteReadError, OSError):
        return False
    finally:
        writer.transport.abort()
    return header[_FRAME_TYPE] == _SETTINGS


def _context(security: ConnectionSecurity) -> ssl.SSLContext:
    """As gRPC has it. Raises OSError."""
    context = ssl.create_default_context(cafile=None if security.ca == SYSTEM_CA else security.ca)
    context.set_alpn_protocols(["h2"])
    if security.certificate is not None:
        context.load_cert_chain(security.certificate, security.key)
    return context
