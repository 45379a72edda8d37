"""The client SDK: an asynchronous and a blocking client for each service.

    import turnwire

    with turnwire.connect(tools="127.0.0.1:50051") as there:
        print(there.tools.execute("python", arguments={"code": "6 * 7"}))

    async with turnwire.connect_async(rollout="127.0.0.1:50052") as there:
        async for event in there.rollout.run(tasks):
            ...

Every error is a class of `turnwire.errors`.
"""

from turnwire.client.blocking import (
    BlockingRolloutClient,
    BlockingToolClient,
    BlockingToolSession,
    BlockingTrainerClient,
    Connection,
    connect,
)
from turnwire.client.channel import open_channel, translate
from turnwire.client.connection import AsyncConnection, connect_async
from turnwire.client.rollout import Event, Generation, RolloutClient, RolloutStream, rollout_limits, rollout_task
from turnwire.client.tools import ToolClient, ToolSession, text_of, tool_call
from turnwire.client.trainer import TrainerClient
from turnwire.security.config import ConnectionSecurity

__all__ = [
    "AsyncConnection",
    "BlockingRolloutClient",
    "BlockingToolClient",
    "BlockingToolSession",
    "BlockingTrainerClient",
    "Connection",
    "ConnectionSecurity",
    "Event",
    "Generation",
    "RolloutClient",
    "RolloutStream",
    "ToolClient",
    "ToolSession",
    "TrainerClient",
    "connect",
    "connect_async",
    "open_channel",
    "rollout_limits",
    "rollout_task",
    "text_of",
    "tool_call",
    "translate",
]
