"""Whose KV lies in vLLM's own prefix cache, what would leave it next, and what that is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from blendkv.market.base import Item, Use
from blendkv.market.classes import Classes
from blendkv.market.ledger import Ledger

_GHOSTS, _REFIT, _FADE = 1 << 12, 500, 0.9
_LIKE = Item(1, 1.0)
"""The ledger is asked how often a block of a holding will be used; blocks of one engine are alike otherwise."""


class _Owned:
    """A block of a holding: which, and the hash that it had; another hash is another request's KV."""

    __slots__ = ("hash", "holding")

    def __init__(self, holding: str, hash: Any) -> None:
        self.holding, self.hash = holding, hash


class Holdings:
    """Blocks of vLLM's pool by who left them there.

    A holding is what the requests of one session have left. Requests without a session that build on most of what
    another one left go on with its holding. Each holding is one entry of a `Ledger`, so that reuse is learned by class
    and turn as in the market's policy; a holding whose last block has left is watched on as a ghost. Memory is bounded
    by the number of blocks.

    Parameters
    ----------
    pool
        vLLM's ``BlockPool``, which is only read.
    block_sizes
        Tokens of a block, by KV cache group.
    """

    def __init__(self, pool: Any, block_sizes: Sequence[int]) -> None:
        self._pool, self._sizes = pool, tuple(block_sizes)
        self._ledger = Ledger(Classes(), _GHOSTS, _REFIT, _FADE)
        self._owned: dict[int, _Owned] = {}
        self._blocks: Counter[str] = Counter()
        self._running: Counter[str] = Counter()  # requests that run, by holding

    def hits(self, request: Any) -> list[Any]:
        """Hashes of the request's blocks that are in the prefix cache, of the first KV cache group."""
        found: list[Any] = []
        every = max(1, self._sizes[0] // self._pool.hash_block_size)  # a block's hash is that of its last part
        for place in range(every - 1, len(request.block_hashes), every):
            blocks = self._pool.get_cached_block(request.block_hashes[place], [0])
            if blocks is None:
                break
            found.append(blocks[0].block_hash)
        return found

    def needed(self, tokens: int, computed: int) -> int:
        """Blocks that a request of ``tokens`` takes behind ``computed`` ones; windows would take fewer."""
        return sum(-(-tokens // size) - computed // size for size in self._sizes)

    def begins(self, request_id: str, use: Use, block_ids: Iterable[int], now: float) -> str:
        """A request runs in these blocks; return its holding, which it uses."""
        holding = self._holding(request_id, use, block_ids)
        self._ledger.advance(now)
        self._ledger.used(holding, _LIKE, use, held=True)
        self._running[holding] += 1
        return holding

    def ends(self, holding: str, block_ids: Iterable[int], now: float) -> None:
        """A request has ended: what is hashed of its blocks belongs to its holding from now on."""
        self._ledger.advance(now)
        self._running[holding] -= 1
        for block_id in block_ids:
            block = self._pool.blocks[block_id]
            if block.block_hash is None or block.is_null:
                continue
            before = self._owned.get(block_id)
            self._owned[block_id] = _Owned(holding, block.block_hash)
            self._blocks[holding] += 1
            if before is not None:
                self._blocks[before.holding] -= 1
                self._drop_empty(before.holding)
        self._drop_empty(holding)

    def leaving(self, count: int, sparing: Container[Any]) -> Iterator[tuple[Any, str | None]]:
        """The hash and holding of the ``count`` blocks that vLLM would hand out next, the first one first.

        None for both where a block holds nothing that can be hit; blocks whose hash is in ``sparing`` stay.
        """
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            if count <= 0:
                return
            if block.block_hash is not None and block.block_hash in sparing:
                continue
            count -= 1
            owned = self._owned.get(block.block_id)
            known = owned is not None and owned.hash == block.block_hash
            yield block.block_hash, owned.holding if known and owned is not None else None

    def worth(self, holding: str, now: float) -> float:
        """What a block of a holding is worth: its expected uses per second of keeping it, the market's price."""
        self._ledger.advance(now)
        entry = self._ledger.entries.get(holding)
        return 0.0 if entry is None or entry.lane is None else entry.lane.group.rates[entry.bin]

    def worth_of_newcomer(self, request_id: str, use: Use, now: float) -> float:
        """The same of what a request will leave that has not begun."""
        self._ledger.advance(now)
        return self._ledger.newcomer(_name(request_id, use), use).rates[0]

    def _holding(self, request_id: str, use: Use, block_ids: Iterable[int]) -> str:
        if use.session:
            return _name(request_id, use)
        found: Counter[str] = Counter()
        for block_id in block_ids:
            owned = self._owned.get(block_id)
            if owned is not None and owned.hash == self._pool.blocks[block_id].block_hash:
                found[owned.holding] += 1
        # A prompt's begin that many share is little of what each of them holds, and makes nobody their successor.
        holding, blocks = next(iter(found.most_common(1)), ("", 0))
        return holding if holding and 2 * blocks >= self._blocks[holding] else _name(request_id, use)

    def _drop_empty(self, holding: str) -> None:
        if self._blocks[holding] > 0 or self._running[holding] > 0:
            return
        del self._blocks[holding], self._running[holding]
        entry = self._ledger.entries.get(holding)
        if entry is not None:
            self._ledger.drop(entry)


def _name(request_id: str, use: Use) -> str:
    return f"session {use.session}" if use.session else f"request {request_id}"
