"""Certificates and tokens as deploy/certificates/make makes them, and a server and clients that use them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from waiting import PROGRAM

from turnwire.client import ConnectionSecurity
from turnwire.security.config import TlsConfig
from turnwire.serving import Server, ServerConfig
from turnwire.v1 import (
    rollout_pb2,
    rollout_pb2_grpc,
    tool_pb2,
    tool_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

MAKE = Path(__file__).parents[1] / "deploy" / "certificates" / "make"


def make(folder: Path, *names: str, **environment: str) -> Path:
    """Run the script; returns the folder."""
    command = [str(MAKE), str(folder), *names]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=PROGRAM, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def tls(folder: Path, name: str = "trainer", *, mutual: bool = True) -> TlsConfig:
    """A server's."""
    client_ca = str(folder / "ca.crt") if mutual else None
    return TlsConfig(certificate=str(folder / f"{name}.crt"), key=str(folder / f"{name}.key"), client_ca=client_ca)


def client(folder: Path, token: str | None = None, **changes: Any) -> ConnectionSecurity:
    """A client's: with the CA and the client's certificate, and one's token."""
    values: dict[str, Any] = {
        "ca": str(folder / "ca.crt"),
        "certificate": str(folder / "client.crt"),
        "key": str(folder / "client.key"),
        "token_file": None if token is None else str(folder / f"{token}.token"),
    }
    return ConnectionSecurity(**(values | changes))


def add_token(folder: Path, name: str, role: str) -> str:
    """One more in tokens.yaml and in NAME.token; returns the token."""
    token = f"token-of-{name}"
    digest = hashlib.sha256(token.encode()).hexdigest()
    (folder / f"{name}.token").write_text(token)
    with (folder / "tokens.yaml").open("a") as file:
        file.write(f"- {{name: {name}, role: {role}, sha256: {digest}}}\n")
    return token


class Tools(tool_pb2_grpc.ToolServiceServicer):
    """Answers at once; an Interact stays open until its client ends it. GetStatus tells from where it was called."""

    async def ListTools(self, request: Any, context: Any) -> tool_pb2.ListToolsResponse:  # noqa: N802
        return tool_pb2.ListToolsResponse()

    async def GetStatus(self, request: Any, context: Any) -> tool_pb2.GetStatusResponse:  # noqa: N802
        context.set_trailing_metadata((("peer", context.peer()),))
        return tool_pb2.GetStatusResponse()

    async def Execute(self, request: Any, context: Any) -> tool_pb2.ExecuteResponse:  # noqa: N802
        return tool_pb2.ExecuteResponse()

    async def Interact(self, requests: Any, context: Any) -> AsyncIterator[tool_pb2.InteractResponse]:  # noqa: N802
        async for _ in requests:
            yield tool_pb2.InteractResponse(opened=tool_pb2.Opened())


class Rollouts(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers at once."""

    async def Rollout(self, requests: Any, context: Any) -> AsyncIterator[rollout_pb2.RolloutResponse]:  # noqa: N802
        async for _ in requests:
            yield rollout_pb2.RolloutResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:  # noqa: N802
        yield rollout_pb2.GenerateResponse()

    async def Score(self, request: Any, context: Any) -> rollout_pb2.ScoreResponse:  # noqa: N802
        return rollout_pb2.ScoreResponse()

    async def UpdateWeights(self, requests: Any, context: Any) -> rollout_pb2.UpdateWeightsResponse:  # noqa: N802
        async for _ in requests:
            pass
        return rollout_pb2.UpdateWeightsResponse()

    async def GetWeightInfo(self, request: Any, context: Any) -> rollout_pb2.GetWeightInfoResponse:  # noqa: N802
        return rollout_pb2.GetWeightInfoResponse()

    async def Pause(self, request: Any, context: Any) -> rollout_pb2.PauseResponse:  # noqa: N802
        return rollout_pb2.PauseResponse()

    async def Resume(self, request: Any, context: Any) -> rollout_pb2.ResumeResponse:  # noqa: N802
        return rollout_pb2.ResumeResponse()

    async def GetServerInfo(self, request: Any, context: Any) -> rollout_pb2.GetServerInfoResponse:  # noqa: N802
        return rollout_pb2.GetServerInfoResponse()


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers at once."""

    async def StartRun(self, request: Any, context: Any) -> trainer_pb2.StartRunResponse:  # noqa: N802
        return trainer_pb2.StartRunResponse()

    async def GetRun(self, request: Any, context: Any) -> trainer_pb2.GetRunResponse:  # noqa: N802
        return trainer_pb2.GetRunResponse(run=trainer_pb2.Run(run_id=request.run_id))

    async def ListRuns(self, request: Any, context: Any) -> trainer_pb2.ListRunsResponse:  # noqa: N802
        return trainer_pb2.ListRunsResponse()

    async def StopRun(self, request: Any, context: Any) -> trainer_pb2.StopRunResponse:  # noqa: N802
        return trainer_pb2.StopRunResponse()

    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[trainer_pb2.WatchRunResponse]:  # noqa: N802
        yield trainer_pb2.WatchRunResponse(sequence=1)


@contextlib.asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[Server]:
    """One server with all three services of the contract, whose methods say yes."""
    server = Server(config, [f"turnwire.v1.{name}Service" for name in ("Tool", "Rollout", "Trainer")])
    tool_pb2_grpc.add_ToolServiceServicer_to_server(Tools(), server.grpc)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Rollouts(), server.grpc)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Trainer(), server.grpc)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)
