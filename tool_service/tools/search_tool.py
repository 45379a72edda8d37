"""The `search` tool: BM25 over the trajectory's own documents, or over a corpus that the service loads once."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import bm25s
import msgspec
import numpy as np

from tool_service.base import BaseTool, ToolAction, ToolConfig, ToolObservation, TurnContext
from turnwire.errors import ConfigError, InvalidRequestError, Problem

bm25s.logger.setLevel(logging.WARNING)  # at import it sets itself to DEBUG, and makes three records an index

R = TypeVar("R")
Count = Annotated[int, msgspec.Meta(ge=1)]

_WORD = re.compile(r"\w+")
_LARGE = 2_000
"""Documents from which on indexing and searching leave the event loop."""


class Document(msgspec.Struct):
    """What is searched and shown."""

    text: str
    title: str = ""
    id: str = ""


class SearchTool(BaseTool):
    """Observations are the best hits, a line each."""

    name = "search"
    description = "Finds documents by keywords. Answers with the best hits, one a line: [rank] title: text."

    class Config(ToolConfig, frozen=True):
        """
        top_k: hits of one search.
        corpus: a JSONL file of {"id", "title", "text"}, for trajectories that bring no documents.
        max_documents, max_document_bytes: that one trajectory may bring, the latter of all together.
        max_hit_bytes: of one hit's text that is shown.
        """

        top_k: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
        corpus: str = ""
        max_documents: Count = 10_000
        max_document_bytes: Count = 8 * 2**20
        max_hit_bytes: Annotated[int, msgspec.Meta(ge=16)] = 4096

    class Context(msgspec.Struct):
        documents: Annotated[
            list[Document], msgspec.Meta(description="What this trajectory searches; none: the service's corpus.")
        ] = msgspec.field(default_factory=list)

    class Arguments(msgspec.Struct):
        query: Annotated[str, msgspec.Meta(description="Keywords.")]

    config: Config
    shared: Index | None

    @classmethod
    def check_config(cls, config: Config) -> list[Problem]:
        if config.corpus and not Path(config.corpus).is_file():
            return [Problem("corpus", f"{config.corpus} is not a file")]
        return []

    @classmethod
    async def setup(cls, config: Config) -> Index | None:
        return await asyncio.to_thread(_load, Path(config.corpus)) if config.corpus else None

    @classmethod
    def check_context(cls, config: Config, context: Context) -> None:
        documents = context.documents
        if not documents and not config.corpus:
            raise InvalidRequestError(
                "context of tool 'search': no documents, and the service has no tools.search.corpus"
            )
        size = sum(len(document.text) + len(document.title) for document in documents)
        if len(documents) > config.max_documents or size > config.max_document_bytes:
            raise InvalidRequestError(
                f"context of tool 'search': {len(documents)} documents of {size} characters; at most "
                f"{config.max_documents} and {config.max_document_bytes} are taken"
            )

    async def reset(self, context: Context) -> None:
        self.check_context(self.config, context)
        documents = context.documents
        if not documents and self.shared is not None:
            self._index = self.shared
            return
        self._index = await _maybe_in_thread(len(documents), Index, documents)

    async def execute(self, action: ToolAction[Arguments], turn: TurnContext) -> ToolObservation:
        query = action.arguments.query
        hits = await _maybe_in_thread(len(self._index.documents), self._index.best, query, self.config.top_k)
        if not hits:
            return ToolObservation("no results", data={"hits": []})
        lines = [
            f"[{rank}] {self._line(self._index.documents[position])}"
            for rank, (position, _) in enumerate(hits, start=1)
        ]
        found = [{"id": self._index.documents[position].id, "score": score} for position, score in hits]
        return ToolObservation("\n".join(lines), data={"hits": found})

    def _line(self, document: Document) -> str:
        text = " ".join(document.text.split())
        if len(text) > self.config.max_hit_bytes:
            text = f"{text[: self.config.max_hit_bytes]}..."
        title = " ".join(document.title.split())
        return f"{title}: {text}" if title else text


class Index:
    """BM25 over titles and texts together. Words are runs of letters, digits and underscores, in lower case."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        words = [_words(f"{document.title} {document.text}") for document in documents]
        self._bm25 = bm25s.BM25()
        self._empty = not any(words)
        if not self._empty:
            self._bm25.index(words, show_progress=False)

    def best(self, query: str, count: int) -> list[tuple[int, float]]:
        """Positions and scores of the best documents that match at all; equal scores in the documents' order."""
        words = _words(query)
        if self._empty or not words:
            return []
        scores = self._bm25.get_scores(words)
        matching = np.flatnonzero(scores > 0)
        order = matching[np.argsort(-scores[matching], kind="stable")[:count]]
        return [(int(position), float(scores[position])) for position in order]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _load(file: Path) -> Index:
    documents = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                documents.append(msgspec.json.decode(line, type=Document))
            except msgspec.MsgspecError as error:
                raise ConfigError([Problem("tools.search.corpus", f"{file}, line {number}: {error}")]) from error
    return Index(documents)


async def _maybe_in_thread(documents: int, work: Callable[..., R], *arguments: Any) -> R:
    """Few documents take less time than a thread would; many would hold up every other trajectory."""
    return work(*arguments) if documents < _LARGE else await asyncio.to_thread(work, *arguments)
