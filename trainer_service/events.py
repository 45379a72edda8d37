"""A run's events: numbered from 1 without gaps, kept on the disk, so that a watcher can go on after any interruption.

All methods are called from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from trainer_service.files import AppendFile
from turnwire.errors import TurnwireError
from turnwire.v1 import trainer_pb2 as pb


class EventLog:
    """`events.jsonl`: one WatchRunResponse as JSON a line."""

    def __init__(self, path: Path) -> None:
        """Open, with the events of earlier processes. What a crash left behind the last whole line is dropped."""
        self._events: list[pb.WatchRunResponse] = []
        self._latest: dict[str, pb.WatchRunResponse] = {}
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                try:
                    event = json_format.ParseDict(json.loads(line), pb.WatchRunResponse())
                except (ValueError, json_format.ParseError):  # a power cut may leave anything
                    break
                self._keep(event)
                whole += len(line)
        self._file = AppendFile(path, whole)
        self._new = asyncio.Condition()
        self._waking: set[asyncio.Task[None]] = set()
        self.live = False
        """Whether more may come."""
        self._cut: TurnwireError | None = None

    def emit(self, **event: Any) -> None:
        """Append one event: `emit(notice=pb.Notice(text="…"))`."""
        message = pb.WatchRunResponse(sequence=len(self._events) + 1, **event)
        message.time.GetCurrentTime()
        self._file.write(json_format.MessageToDict(message))
        self._keep(message)
        self._wake()

    def _keep(self, event: pb.WatchRunResponse) -> None:
        self._events.append(event)
        self._latest[event.WhichOneof("event") or ""] = event

    def notify(self, text: str) -> None:
        """Something a person should know."""
        self.emit(notice=pb.Notice(text=text))

    def last_step(self) -> int:
        """The step that was finished last, 0 for none."""
        event = self.latest("step")
        return 0 if event is None else event.step.step

    def latest(self, kind: str) -> pb.WatchRunResponse | None:
        """The last event of a kind, as `step` or `evaluation`."""
        return self._latest.get(kind)

    def set_live(self, live: bool) -> None:
        """The run starts, or has ended."""
        self.live = live
        self._wake()

    def cut(self, error: TurnwireError) -> None:
        """More will come, but not from this process: those who watch get `error` after the last event."""
        self._cut = error
        self._wake()

    async def watch(self, first: int) -> AsyncIterator[pb.WatchRunResponse]:
        """Events from number `first` on, then new ones until the run has ended. Raises what `cut` was given."""
        position = max(0, first - 1)
        while True:
            while position < len(self._events):
                yield self._events[position]
                position += 1
            if self._cut is not None:
                raise self._cut
            if not self.live:
                return
            async with self._new:
                while position >= len(self._events) and self.live and self._cut is None:
                    await self._new.wait()

    def _wake(self) -> None:
        async def tell() -> None:
            async with self._new:
                self._new.notify_all()

        task = asyncio.ensure_future(tell())
        self._waking.add(task)
        task.add_done_callback(self._waking.discard)
