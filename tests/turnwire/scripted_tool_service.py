"""A tool service whose behaviour a test scripts: what the real one cannot be made to do on demand, as losing a stream
between a turn and its answer. It keeps sessions by the rules of tool.proto, answers each action with its own text, and
counts executions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from turnwire.errors import AlreadyExistsError, ConfigError, ExhaustedError, NotFoundError, Problem, UnavailableError
from turnwire.v1 import common_pb2, tool_pb2, tool_pb2_grpc


class ScriptedToolService(tool_pb2_grpc.ToolServiceServicer):
    def __init__(self) -> None:
        self.sessions: dict[str, tuple[str, list[str]]] = {}
        self.executed: list[tuple[str, int]] = []
        self.opens = 0
        self.refuse_opens = 0
        """How many Opens are answered RESOURCE_EXHAUSTED before one is taken."""
        self.drop_before_answer: set[int] = set()
        """Turns whose stream is lost after the turn was executed and before it is answered, once each."""
        self.end_before_answer: set[int] = set()
        """The same, ending as a clean end of stream."""
        self.full_at: set[int] = set()
        """Turns that are refused as RESOURCE_EXHAUSTED, without being executed, once each."""
        self.lease = 2.0
        self.may_answer = asyncio.Event()
        """While it is cleared, turns are executed and not answered."""
        self.may_answer.set()

    async def ListTools(self, request: Any, context: Any) -> tool_pb2.ListToolsResponse:  # noqa: N802
        raise ConfigError([Problem("tools.python", "is broken"), Problem("sandbox.tier", "too weak")], "tool.yaml")

    async def GetStatus(self, request: Any, context: Any) -> tool_pb2.GetStatusResponse:  # noqa: N802
        raise ZeroDivisionError("secret detail")

    async def Interact(self, request_iterator: Any, context: Any) -> AsyncIterator[tool_pb2.InteractResponse]:  # noqa: N802
        requests = aiter(request_iterator)
        opening = (await anext(requests)).open
        self.opens += 1
        if self.refuse_opens:
            self.refuse_opens -= 1
            raise ExhaustedError("full", retry_after=0.1)
        known = self.sessions.get(opening.trajectory_id)
        if known is None:
            if opening.turns_done:
                raise NotFoundError(f"no session {opening.trajectory_id}")
            known = self.sessions[opening.trajectory_id] = (opening.session_key, [])
        if known[0] != opening.session_key:
            raise AlreadyExistsError(f"{opening.trajectory_id} is taken")
        answers = known[1]
        opened = tool_pb2.Opened(turns_done=len(answers))
        opened.lease.FromMilliseconds(int(self.lease * 1000))
        yield tool_pb2.InteractResponse(opened=opened)
        async for request in requests:
            if request.HasField("close"):
                del self.sessions[opening.trajectory_id]
                yield tool_pb2.InteractResponse(closed=tool_pb2.Closed(turns_done=len(answers)))
                return
            turn = request.action.turn
            if turn in self.full_at:
                self.full_at.remove(turn)
                raise ExhaustedError("no sandbox is free", retry_after=0.05)
            if turn == len(answers):
                self.executed.append((opening.trajectory_id, turn))
                answers.append(request.action.text)
                await self.may_answer.wait()
            if turn in self.drop_before_answer:
                self.drop_before_answer.remove(turn)
                raise UnavailableError("connection lost")
            if turn in self.end_before_answer:
                self.end_before_answer.remove(turn)
                return
            observation = tool_pb2.Observation(content=[common_pb2.ContentPart(text=answers[turn])])
            yield tool_pb2.InteractResponse(observation=tool_pb2.ObservationTurn(turn=turn, observations=[observation]))
