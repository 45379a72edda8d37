"""Runs in a container whose resolver asks 127.0.0.1: `python headless_name.py TARGET`, a target of a config.

Stands in for the cluster's DNS, which answers a headless service's name with the address of each ready pod, and for the
pods. Prints how many of a client's calls each pod got.
"""

from __future__ import annotations

import asyncio
import collections
import json
import socket
import struct
import sys
import threading
from typing import Any

from turnwire.client.tools import ToolClient
from turnwire.serving import Server, ServerConfig
from turnwire.v1 import tool_pb2, tool_pb2_grpc

PODS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
CALLS = 30
CLUSTER_DOMAIN = "cluster.local"
_HEADER, _ADDRESS, _FOUND, _UNKNOWN, _POINTER_TO_NAME = 12, 1, 0x8400, 0x8403, b"\xc0\x0c"


def answer(query: bytes, name: str) -> bytes:
    """To one question of the domain name system."""
    labels, at = [], _HEADER
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += query[at] + 1
    (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
    known = ".".join(labels).lower() == name
    addresses = PODS if known and kind == _ADDRESS else ()
    header = struct.pack("!HHHHH", _FOUND if known else _UNKNOWN, 1, len(addresses), 0, 0)
    records = [_POINTER_TO_NAME + struct.pack("!HHIH", _ADDRESS, 1, 5, 4) + socket.inet_aton(pod) for pod in addresses]
    return query[:2] + header + query[_HEADER : at + 5] + b"".join(records)


def serve_names(name: str, port: socket.socket) -> None:
    while True:
        query, peer = port.recvfrom(512)
        port.sendto(answer(query, name), peer)


class Pod(tool_pb2_grpc.ToolServiceServicer):
    def __init__(self, address: str, counts: collections.Counter[str]) -> None:
        self.address, self.counts = address, counts

    async def ListTools(self, request: Any, context: Any) -> tool_pb2.ListToolsResponse:  # noqa: N802 - gRPC's name
        self.counts[self.address] += 1
        return tool_pb2.ListToolsResponse()


async def main(target: str) -> None:
    host, _, port = target.rpartition(":")
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind(("127.0.0.1", 53))
    threading.Thread(target=serve_names, args=(f"{host}.{CLUSTER_DOMAIN}", names), daemon=True).start()
    counts: collections.Counter[str] = collections.Counter()
    servers = [Server(ServerConfig(host=address, port=int(port)), ["turnwire.v1.ToolService"]) for address in PODS]
    for address, server in zip(PODS, servers, strict=True):
        tool_pb2_grpc.add_ToolServiceServicer_to_server(Pod(address, counts), server.grpc)
        await server.start()
    async with ToolClient(target) as client:
        await client.wait_until_ready()
        for _ in range(CALLS):
            await client.list_tools()
    for server in servers:
        await server.stop(0)
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
