"""Turnwire: gRPC services that train tool-using language-model agents with reinforcement learning.

This package is what services and clients share. `connect` is the way in for client code; it is loaded on first use,
so that importing `turnwire` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwire.client import ConnectionSecurity as ConnectionSecurity
    from turnwire.client import connect as connect
    from turnwire.client import connect_async as connect_async

__version__ = "0.1.0"
__all__ = ["ConnectionSecurity", "__version__", "connect", "connect_async"]


def __getattr__(name: str) -> Any:
    if name in ("ConnectionSecurity", "connect", "connect_async"):
        from turnwire import client  # noqa: PLC0415 - loaded on first use

        return getattr(client, name)
    raise AttributeError(f"module 'turnwire' has no attribute {name!r}")
