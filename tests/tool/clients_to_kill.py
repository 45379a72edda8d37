"""Clients of the tool service that are there to be killed: `python clients_to_kill.py ADDRESS CODE`.

Reads lines `NAME STREAMS` and for each forks a client that opens so many trajectories, named after NAME, in all of
which CODE runs for as long as the client lives; answers with the client's process id.
"""

import asyncio
import contextlib
import os
import signal
import sys

import grpc.aio

from turnwire.v1 import common_pb2, tool_pb2, tool_pb2_grpc


async def client(address: str, code: str, name: str, streams: int) -> None:
    channel = grpc.aio.insecure_channel(address)
    calls = [tool_pb2_grpc.ToolServiceStub(channel).Interact() for _ in range(streams)]
    for number, call in enumerate(calls):
        tools = [common_pb2.ToolBinding(name="python")]
        opening = tool_pb2.Open(trajectory_id=f"{name}-{number}", session_key="k", tools=tools)
        await call.write(tool_pb2.InteractRequest(open=opening))
        action = tool_pb2.ActionTurn(turn=0, text=f"<python>{code}</python>")
        action.timeout.FromSeconds(300)
        await call.write(tool_pb2.InteractRequest(action=action))
    await asyncio.gather(*(answers(call) for call in calls))


async def answers(call: grpc.aio.StreamStreamCall) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):  # the service can die first
        async for _ in call:
            pass


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the killed need no burial
    address, code = sys.argv[1:]
    for line in sys.stdin:
        name, streams = line.split()
        pid = os.fork()  # before grpc has started anything here
        if pid == 0:
            asyncio.run(client(address, code, name, int(streams)))
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
