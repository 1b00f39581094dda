from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.retrievers import BaseRetriever

from blendkv.errors import DocumentError, InputError
from blendkv.retrieval import CallableRetriever, Retriever


class Letters(BaseRetriever):
    """Finds the passages that hold the question's words."""

    passages: list[str]

    def _get_relevant_documents(self, query, *, run_manager):
        found = [text for text in self.passages if set(query.split()) & set(text.split())]
        return [LangChainDocument(page_content=text, metadata={"source": "one file"}) for text in found]


def test_a_langchain_retriever_in_two_lines(tokenizer):
    langchain_retriever = Letters(passages=["red fox", "blue whale", "red whale"])

    retriever: Retriever = CallableRetriever(lambda query, k: langchain_retriever.invoke(query), tokenizer)
    found = retriever.retrieve("red thing", 5)

    assert [item.chunk.text for item in found] == ["red fox\n\n", "red whale\n\n"]
    assert [item.ranks for item in found] == [{"external": 1}, {"external": 2}]
    assert found[0].score > found[1].score
    assert found[0].chunk.metadata == {"source": "one file"}
    assert len({item.chunk.id for item in found}) == 2
    for item in found:
        assert tokenizer.decode(item.chunk.token_ids) == item.chunk.text
        assert item.chunk.token_ids.dtype == np.int32
        assert (item.chunk.start, item.chunk.end) == (0, len(item.chunk.text))
    assert len(retriever.retrieve("red thing", 1)) == 1


def test_kinds_of_passages(tokenizer):
    passages = ["text", ("pair", {"n": 1}), SimpleNamespace(page_content="object", metadata=None), "text "]
    seen = []

    def find(query, k):
        seen.append((query, k))
        return iter(passages)

    found = CallableRetriever(find, tokenizer).retrieve("q", 10)
    assert seen == [("q", 10)]
    assert [(item.chunk.text, item.chunk.metadata) for item in found] == [
        ("text\n\n", {}),
        ("pair\n\n", {"n": 1}),
        ("object\n\n", {}),
    ]


def test_equal_texts_have_equal_ids(tokenizer):
    retriever = CallableRetriever(lambda query, k: [query], tokenizer)
    assert retriever.retrieve("same", 1)[0].chunk.id == retriever.retrieve("same ", 1)[0].chunk.id
    assert retriever.retrieve("same", 1)[0].chunk.id != retriever.retrieve("other", 1)[0].chunk.id


@pytest.mark.asyncio
async def test_without_blocking(tokenizer):
    retriever = CallableRetriever(lambda query, k: [query], tokenizer)
    assert [item.chunk.text for item in await retriever.aretrieve("q", 1)] == ["q\n\n"]


@pytest.mark.parametrize(
    ("passage", "error", "message"),
    [
        (3, InputError, "the external retriever returned int; a str, a"),
        (("text", "no mapping"), InputError, "returned tuple"),
        ({"page_content": "x"}, InputError, "returned dict"),
        (" ", InputError, "a blank passage"),
        ("\ud800", DocumentError, "lone surrogate"),
    ],
)
def test_wrong_passages(tokenizer, passage, error, message):
    with pytest.raises(error, match=message):
        CallableRetriever(lambda query, k: [passage], tokenizer).retrieve("q", 1)


def test_wrong_calls(tokenizer):
    retriever = CallableRetriever(lambda query, k: [], tokenizer)
    with pytest.raises(InputError, match="with an external retriever; filter inside"):
        retriever.retrieve("q", 1, {"title": "x"})
    with pytest.raises(InputError, match="the query is empty"):
        retriever.retrieve("", 1)
    with pytest.raises(InputError, match="k is -1"):
        retriever.retrieve("q", -1)
    with pytest.raises(InputError, match="gives no character offsets"):
        CallableRetriever(lambda query, k: [], SimpleNamespace(is_fast=False))
