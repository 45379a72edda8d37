"""A channel that shows a token, and takes up new certificates when their files change.

A wrapper around `grpc.aio`'s own channels, and not its interceptors or call credentials: interceptors change how writes
on a stream fail, call credentials start a thread for each call, and neither can change a channel's certificate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from turnwire.security.config import ConnectionSecurity
from turnwire.security.files import Watched
from turnwire.security.tls import channel_credentials
from turnwire.security.tokens import METADATA_KEY, SCHEME, read_token

_Make = Callable[[grpc.ChannelCredentials | None], grpc.aio.Channel]


class _Inner:
    """A channel of gRPC's, with the credentials it was made of. Once it is retired, it closes after its last call."""

    def __init__(self, make: _Make, credentials: grpc.ChannelCredentials | None) -> None:
        self.credentials = credentials
        self.channel = make(credentials)
        self._running = 0
        self._retired = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        return self._closing is not None and self._closing.done()

    def began(self, call: Any) -> None:
        self._running += 1
        call.add_done_callback(self._ended)

    def _ended(self, _: Any) -> None:
        self._running -= 1
        self._close_if_over()

    def retire(self) -> None:
        self._retired = True
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._retired and self._running == 0 and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.channel.close())


class SecuredChannel(grpc.aio.Channel):
    """Calls through the newest of its inner channels; calls that run stay on theirs until they end."""

    def __init__(self, security: ConnectionSecurity, make: _Make) -> None:
        """`make` opens a channel; None is plaintext. Raises ConfigError for files that cannot be used."""
        self._make = make
        self._token: Watched[tuple[str, str]] | None = None
        if (token_file := security.token_file) is not None:
            self._token = Watched([token_file], lambda: (METADATA_KEY, SCHEME + read_token(token_file)))
        files = (security.ca, security.certificate, security.key)
        self._credentials = Watched(files, lambda: None if security.ca is None else channel_credentials(security))
        self._inner = _Inner(make, self._credentials.get())
        self._old: list[_Inner] = []

    def newest(self) -> _Inner:
        """What the next call goes through."""
        credentials = self._credentials.get()
        if credentials is not self._inner.credentials:
            self._old = [item for item in (*self._old, self._inner) if not item.closed]
            self._inner.retire()
            self._inner = _Inner(self._make, credentials)
        return self._inner

    def metadata(self, given: Any) -> Any:
        """The call's own, with the token."""
        if self._token is None:
            return given
        return (*(given or ()), self._token.get())

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return _Method(self, "stream_stream", args, kwargs)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the newest."""
        return self.newest().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the newest."""
        await self.newest().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Of the newest."""
        await self.newest().channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Close all."""
        await asyncio.gather(*(item.channel.close(grace) for item in (*self._old, self._inner)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class _Method:
    """A method that can be called: a multi-callable of the newest channel, made once for each."""

    def __init__(self, channel: SecuredChannel, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._channel, self._kind, self._args, self._kwargs = channel, kind, args, kwargs
        self._bind(channel.newest())

    def _bind(self, inner: _Inner) -> None:
        self._inner = inner
        self._call = getattr(inner.channel, self._kind)(*self._args, **self._kwargs)

    def __call__(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        inner = self._channel.newest()
        if inner is not self._inner:
            self._bind(inner)
        call = self._call(*args, metadata=self._channel.metadata(metadata), **kwargs)
        inner.began(call)
        return call
