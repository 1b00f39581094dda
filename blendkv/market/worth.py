"""What a hit of a stored chunk saves: seconds of prefill, less those of reading it.

Policies compare chunks with each other, so that of these figures only the proportions matter.
"""

from __future__ import annotations

from blendkv.market.base import Item

PREFILL_RATE = 5000.0
"""Tokens per second that an engine prefills: a small model on a CPU, a large one under load on a GPU."""
READ_RATE = 10e9
"""Bytes per second that are read from memory."""


def chunk_item(tokens: int, nbytes: int) -> Item:
    """The item of a chunk KV of ``tokens`` tokens that holds ``nbytes`` bytes."""
    return Item(nbytes, max(0.0, tokens / PREFILL_RATE - nbytes / READ_RATE))


def file_item(nbytes: int) -> Item:
    """The item of a chunk file of which only its size is known: all are worth the same per byte."""
    return Item(nbytes, nbytes / READ_RATE)
