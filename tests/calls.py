"""How calls end, for tests of every service."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from waiting import PATIENCE


async def outcome(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ends, whatever it answers before that; a hang fails."""
    async with asyncio.timeout(PATIENCE):
        try:
            if isinstance(call, grpc.aio.UnaryUnaryCall | grpc.aio.StreamUnaryCall):
                await call
            else:
                async for _ in call:
                    pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
