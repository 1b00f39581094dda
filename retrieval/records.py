"""Chunks and metadata as columns of the database, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blendkv.errors import InputError
from blendkv.types import Chunk, Document, as_token_ids

CHUNK_COLUMNS = "d.id, c.position, c.text, c.token_ids, c.start, c.end, c.metadata, d.metadata"
"""What ``chunk_of`` takes, of ``chunks AS c`` and ``documents AS d``."""


def chunk_of(columns: Sequence[Any]) -> Chunk:
    """Make a chunk of its columns; its metadata are its document's with its own laid over them."""
    document_id, position, text, ids, start, end, own, shared = columns
    token_ids = as_token_ids(np.frombuffer(ids, dtype="<i4"))
    return Chunk(document_id, position, text, token_ids, start, end, json.loads(shared) | json.loads(own))


def columns_of(chunk: Chunk, document: Document) -> tuple[Any, ...]:
    """Return position, text, token ids, start, end and own metadata; what it shares with its document is left out."""
    missing = object()
    own = {key: value for key, value in chunk.metadata.items() if document.metadata.get(key, missing) != value}
    ids = np.ascontiguousarray(chunk.token_ids, dtype="<i4").tobytes()
    return chunk.index, chunk.text, ids, chunk.start, chunk.end, to_json(own, f"metadata of chunk {chunk.id!r}")


def to_json(value: Any, name: str) -> str:
    """Return ``value`` as JSON with sorted keys.

    Raises
    ------
    InputError
        If it cannot be written as JSON; ``name`` says what it is.
    """
    try:
        return json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name} is not JSON ({error}); strings, finite numbers, bools, lists and dicts are allowed"
        ) from None
