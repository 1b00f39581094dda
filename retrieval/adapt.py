"""Retrievers from elsewhere: any function that finds passages for a question."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from blendkv.errors import InputError
from blendkv.retrieval.retriever import RetrievedChunk, check_query
from blendkv.retrieval.split import check_tokenizer, normalise, tokenise
from blendkv.types import Chunk


class CallableRetriever:
    """Makes a Retriever of a function; for instance of a LangChain retriever::

        langchain_retriever = vector_store.as_retriever()
        retriever = CallableRetriever(lambda query, k: langchain_retriever.invoke(query), tokenizer)

    Each passage becomes one chunk with token ids, whatever its length. Equal texts are one chunk: their document id
    is a digest of the text, so that chunk KVs are found again.

    Parameters
    ----------
    fn
        ``fn(query, k)`` returns passages, best first: texts, ``(text, metadata)`` pairs, or objects with
        ``page_content`` and ``metadata``. What exceeds ``k`` is dropped.
    tokenizer
        The model's tokenizer, a fast one.

    Raises
    ------
    InputError
        If the tokenizer gives no offsets.
    """

    def __init__(self, fn: Callable[[str, int], Iterable[Any]], tokenizer: Any) -> None:
        check_tokenizer(tokenizer)
        self.fn = fn
        self.tokenizer = tokenizer

    def retrieve(self, query: str, k: int, where: Mapping[str, Any] | None = None) -> list[RetrievedChunk]:
        """Return at most ``k`` chunks, best first; the score is one over the rank, under the leg ``external``.

        Raises
        ------
        InputError
            If the question is empty, ``k`` below 1, ``where`` given, or a passage is none of the allowed kinds.
        DocumentError
            If a passage is blank or holds a lone surrogate.
        """
        check_query(query, k)
        if where:
            raise InputError(f"filter {dict(where)!r} with an external retriever; filter inside of it instead")
        chunks: dict[str, Chunk] = {}
        for passage in self.fn(query, k):
            chunk = self._chunk(*_parts(passage))
            chunks.setdefault(chunk.document_id, chunk)
        return [
            RetrievedChunk(chunk, 1 / rank, {"external": rank})
            for rank, chunk in enumerate(list(chunks.values())[:k], start=1)
        ]

    async def aretrieve(self, query: str, k: int, where: Mapping[str, Any] | None = None) -> list[RetrievedChunk]:
        """As ``retrieve``, in a thread."""
        return await asyncio.to_thread(self.retrieve, query, k, where)

    def _chunk(self, given: str, metadata: Mapping[str, Any]) -> Chunk:
        text = normalise(given)
        if not given.strip():
            raise InputError("the external retriever returned a blank passage; return passages with text")
        ids, _ = tokenise(self.tokenizer, text, "a passage of the external retriever")
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return Chunk(f"external:{digest}", 0, text, ids, 0, len(text), dict(metadata))


def _parts(passage: Any) -> tuple[str, Mapping[str, Any]]:
    """Return text and metadata of what an external retriever gave."""
    if isinstance(passage, str):
        return passage, {}
    if isinstance(passage, tuple) and len(passage) == 2:
        text, metadata = passage
    else:
        text, metadata = getattr(passage, "page_content", None), getattr(passage, "metadata", None) or {}
    if isinstance(text, str) and isinstance(metadata, Mapping):
        return text, metadata
    raise InputError(
        f"the external retriever returned {type(passage).__name__}; a str, a (str, dict) pair, or an object with "
        "page_content and metadata is allowed"
    )
