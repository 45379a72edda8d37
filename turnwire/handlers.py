"""Handlers of a gRPC server with another function inside: what interceptors make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

Function = Callable[..., Any]
Deserializer = Callable[[bytes], Any] | None


def wrapped_handler(
    handler: grpc.RpcMethodHandler[Any, Any], wrap: Callable[[Function], Function], deserializer: Deserializer = None
) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler with its function wrapped, whichever of the four kinds it is; with another deserializer, where
    one is given."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    inner: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return make(wrap(inner), deserializer or handler.request_deserializer, handler.response_serializer)
