"""The `search` tool finds what a person would, in a format that is fixed."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import tool_harness as harness
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_harness import Service, Trajectory, binding, text_of, texts

from tool_service.config import check
from tool_service.tools.search_tool import Document, Index

DOCUMENTS: list[dict[str, Any]] = [
    {"id": "d1", "title": "Bamo", "text": "The capital of Bamo is Kuti."},
    {"id": "d2", "title": "Bamo", "text": "The height of Bamo is 512."},
    {"id": "d3", "title": "Zeli", "text": "The capital of Zeli\nis Modu."},
]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with harness.running(harness.config_of(tools={"search": {"top_k": 2, "max_hit_bytes": 100}})) as running:
        yield running


async def test_hits_are_ranked_a_line_each(service: Service) -> None:
    observation = await service.call("search", "capital of Zeli", {"documents": DOCUMENTS})
    assert text_of(observation) == "[1] Zeli: The capital of Zeli is Modu.\n[2] Bamo: The capital of Bamo is Kuti."
    assert [hit["id"] for hit in observation.data["hits"]] == ["d3", "d1"]


@pytest.mark.parametrize("query", ["zebra", "", "?!", "\0"])
async def test_nothing_found(service: Service, query: str) -> None:
    assert text_of(await service.call("search", query, {"documents": DOCUMENTS})) == "no results"


async def test_documents_are_the_trajectorys_own(service: Service) -> None:
    other = [{"id": "x", "title": "Zeli", "text": "The capital of Zeli is Other."}]
    first, second = Trajectory(service, "1"), Trajectory(service, "2")
    await first.open(binding("search", {"documents": DOCUMENTS}))
    await second.open(binding("search", {"documents": other}))
    assert texts(await second.act(0, "<search>capital Zeli</search>")) == ["[1] Zeli: The capital of Zeli is Other."]
    assert "Modu" in texts(await first.act(0, "<search>capital Zeli</search>"))[0]


@pytest.mark.parametrize(
    "context",
    [{}, {"documents": []}, {"documents": [{"title": "no text"}]}, {"documents": "x"}, {"documents": [{"text": 1}]}],
)
async def test_a_context_without_documents_is_refused_when_there_is_no_corpus(
    service: Service, context: dict[str, Any]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Trajectory(service).open(binding("search", context))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_too_many_documents_are_refused(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Trajectory(service).open(binding("search", {"documents": [{"text": "x"}] * 10_001}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_corpus_is_loaded_once_and_shared(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(document) for document in DOCUMENTS) + "\n\n")
    async with harness.running(harness.config_of(tools={"search": {"top_k": 1, "corpus": str(corpus)}})) as service:
        assert text_of(await service.call("search", "height")) == "[1] Bamo: The height of Bamo is 512."


async def test_a_corpus_that_is_not_there_or_not_json_is_refused(tmp_path: Path) -> None:
    config = harness.config_of(tools={"search": {"corpus": str(tmp_path / "none")}})
    assert [problem.key for problem in check(config)] == ["tools.search.corpus"]
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\nnonsense\n')
    config = harness.config_of(tools={"search": {"corpus": str(tmp_path / "corpus.jsonl")}})
    with pytest.raises(ValueError, match="line 2"):
        async with harness.running(config):
            pass


@settings(max_examples=50)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=8), st.text(max_size=20))
def test_any_documents_and_any_query(documents: list[str], query: str) -> None:
    index = Index([Document(text) for text in documents])
    hits = index.best(query, 3)
    assert len(hits) <= 3
    assert [score for _, score in hits] == sorted((score for _, score in hits), reverse=True)


def test_equal_documents_are_in_their_own_order() -> None:
    index = Index([Document("same words")] * 5 + [Document("else")])
    assert [position for position, _ in index.best("words", 3)] == [0, 1, 2]


def test_an_index_of_ten_documents_takes_about_a_millisecond() -> None:
    documents = [Document(f"The capital of Bamo{number} is Kuti{number}.", "Bamo") for number in range(10)]
    Index(documents)
    begin = time.thread_time()  # others may use the CPU, too
    for _ in range(20):
        Index(documents)
    assert (time.thread_time() - begin) / 20 < 0.01
