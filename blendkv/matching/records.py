"""What the finder keeps of each stored chunk: two hashes, its length, the tokens at its edges; never all token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from blendkv.matching.hashing import Hashes, RunHashes, ragged
from blendkv.types import TokenIds

MIN_TOKENS = 32
"""Tokens of the shortest chunk that is looked for."""
EDGE = 4
"""Tokens at either end of a chunk that may differ, because text is tokenised otherwise at a cut than in its middle."""
WINDOW = 16
"""Tokens of an anchor: the run by which a chunk is found. It lies in the interior, the chunk without its edges."""
NO_TOKEN = -1

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Records:
    """Columns over ``n`` chunks.

    ``recipe`` numbers the recipes of the finder; ``tokens`` is the chunk's length. ``anchor`` is the least hash among
    the windows of the interior, and ``offset`` where the first such window starts in the interior: a choice by content
    alone, so chunks that share a beginning rarely share an anchor. ``inner`` is the hash of the interior; ``head``
    and ``tail`` ``[n, EDGE]`` are the token ids at the edges.
    """

    keys: tuple[str, ...]
    recipe: Int32s
    tokens: Int32s
    anchor: Hashes
    offset: Int32s
    inner: Hashes
    head: Int32s
    tail: Int32s

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; the keys are not counted."""
        return sum(getattr(self, f.name).nbytes for f in fields(self) if f.name != "keys")

    def take(self, rows: npt.NDArray[np.int64]) -> Records:
        """The chunks ``rows``."""
        keys = tuple(self.keys[row] for row in rows.tolist())
        return Records(keys, *(getattr(self, f.name)[rows] for f in fields(self) if f.name != "keys"))


def concatenate(parts: Sequence[Records]) -> Records:
    """All chunks of ``parts``, in order."""
    keys = tuple(key for part in parts for key in part.keys)
    names = [f.name for f in fields(Records) if f.name != "keys"]
    return Records(keys, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def records_of(keys: Sequence[str], recipes: Sequence[int], chunks: Sequence[TokenIds]) -> Records:
    """Hash chunks of ``MIN_TOKENS`` tokens or more; at least one."""
    ids = np.concatenate(chunks)
    tokens = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
    starts = np.cumsum(tokens) - tokens
    hashes = RunHashes(ids)
    inner_starts, inner_tokens = starts + EDGE, tokens - 2 * EDGE
    windows = inner_tokens - WINDOW + 1
    all_windows = hashes.windows(WINDOW)[ragged(inner_starts, windows)]
    firsts = np.cumsum(windows) - windows
    anchor = np.minimum.reduceat(all_windows, firsts)
    least = np.flatnonzero(all_windows == np.repeat(anchor, windows))
    offset = least[np.searchsorted(least, firsts)] - firsts
    edge = np.arange(EDGE)
    return Records(
        keys=tuple(keys),
        recipe=np.array(recipes, dtype=np.int32),
        tokens=tokens.astype(np.int32),
        anchor=anchor,
        offset=offset.astype(np.int32),
        inner=hashes.of(inner_starts, inner_tokens),
        head=ids[starts[:, None] + edge],
        tail=ids[(starts + tokens - EDGE)[:, None] + edge],
    )
