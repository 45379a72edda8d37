"""A bare grpc.aio server that answers each message of a stream with itself: the floor of what a turn can cost."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio


async def main() -> None:
    async def echo(requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


asyncio.run(main())
