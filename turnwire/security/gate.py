"""The door of a server. Every call comes through it once, when it begins: `identify`, before its message is looked at,
and `admitted`, while it runs.

Asked in this order: who is it (token), may they do this (role), is the service draining, is it too much (quotas). What
is refused costs others nothing but this.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import grpc.aio

from turnwire.errors import PermissionDeniedError, UnavailableError
from turnwire.security.quotas import Quotas
from turnwire.security.roles import CHECK, NEEDED, OPEN, Role
from turnwire.security.tokens import METADATA_KEY, TokenTable

DRAIN_RETRY_SECONDS = 2.0
"""When a client that a draining service refuses may try again: another one serves by then, or this one anew. Above the
second that a service's last words may take, during which nobody else can have its port."""

Context = grpc.aio.ServicerContext[Any, Any]


class Gate:
    """Admits calls, and counts those that are in flight."""

    def __init__(self, tokens: TokenTable | None, quotas: Quotas) -> None:
        self._tokens, self._quotas = tokens, quotas
        self._running = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        """Whether calls that begin something are refused. Who only looks is served until the end."""

    def identify(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
        """Who calls the method (full name), by token; empty where none is asked for. Raises what the client is to be
        told: UnauthenticatedError, PermissionDeniedError, UnavailableError."""
        if method in OPEN:
            return ""
        needed, client = NEEDED.get(method, Role.ADMIN), ""
        if self._tokens is not None:
            shown = next((value for key, value in metadata or () if key == METADATA_KEY), None)
            holder = self._tokens.holder(shown if isinstance(shown, str | None) else shown.decode("latin-1"))
            if holder.role < needed:
                raise PermissionDeniedError(
                    f"{method.rpartition('/')[2]} needs the role {needed.label}; "
                    f"the token of {holder.name} has the role {holder.role.label}"
                )
            client = holder.name
        if self.draining and needed > Role.VIEWER:
            raise UnavailableError("the service is draining: it begins nothing new", retry_after=DRAIN_RETRY_SECONDS)
        return client

    def admitted(self, method: str, context: Context, client: str) -> _Admission:
        """For a `with` around a call; `client` is what `identify` said. Raises ExhaustedError on entering."""
        return _Admission(self, method, client or _peer(context))

    async def emptied(self, seconds: float) -> None:
        """Return when no call is in flight, or after this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return

    def enter(self, method: str, client: str) -> None:
        """Count a call that begins. Probes that ask once are never too many; those that stay are counted, but nobody
        waits for their end."""
        if method != CHECK:
            self._quotas.take(client)
        if method not in OPEN:
            self._running += 1
            self._empty.clear()

    def leave(self, method: str, client: str) -> None:
        """Count a call that has ended."""
        if method != CHECK:
            self._quotas.give_back(client)
        if method not in OPEN:
            self._running -= 1
            if self._running == 0:
                self._empty.set()


class _Admission:
    __slots__ = ("_client", "_gate", "_method")

    def __init__(self, gate: Gate, method: str, client: str) -> None:
        self._gate, self._method, self._client = gate, method, client

    def __enter__(self) -> None:
        self._gate.enter(self._method, self._client)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._gate.leave(self._method, self._client)


def _peer(context: Context) -> str:
    """A name for who calls without a token: the subject of a certificate, else the host."""
    for name in context.auth_context().get("x509_common_name") or ():
        return f"certificate {name.decode('utf-8', 'replace')}"
    peer = urllib.parse.unquote(context.peer())  # ipv4:127.0.0.1:5000, ipv6:[::1]:5000
    return f"host {peer.partition(':')[2].rpartition(':')[0] or peer}"
