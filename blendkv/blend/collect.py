"""The collect session: chunks alone -> their K before RoPE and V."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from blendkv.blend.rotation import RopeTables, RowTables
from blendkv.engines.base import ModelRunner
from blendkv.errors import InputError, PromptTooLongError
from blendkv.kernels import AttentionParams, chunk_prefill, rotate, unrotate
from blendkv.types import ChunkKV, Recipe, TokenIds, to_tensor


class CollectSession:
    """Runs several chunks in one pass, each behind the same prefix and blind to the others."""

    def __init__(self, runner: ModelRunner, lengths: Sequence[int], prefix: ChunkKV | None) -> None:
        self._prefix = prefix
        self._past = 0 if prefix is None else len(prefix.token_ids)
        bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self._lengths = list(lengths)
        self._rows = [slice(a, b) for a, b in pairwise(bounds)]
        ramp = torch.arange(self._past + max(lengths), device=runner.device)
        self._tables = RopeTables(runner, ramp)
        self.positions = torch.cat([ramp[self._past : self._past + n] for n in lengths])
        self._row_tables = RowTables(self._tables, self.positions)
        self.k: list[list[torch.Tensor]] = [[] for _ in lengths]
        self.v: list[list[torch.Tensor]] = [[] for _ in lengths]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend within each chunk and its prefix; keep K (rotation undone) and V."""
        raw = unrotate(k, self._row_tables.layer(layer)).to(k.dtype)
        for chunk, rows in enumerate(self._rows):
            self.k[chunk].append(raw[rows].clone())
            self.v[chunk].append(v[rows].clone(memory_format=torch.contiguous_format))
        return chunk_prefill(q, k, v, self._lengths, params, self._before(layer, k))

    def _before(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The prefix's K at its positions, and V, on the device of the pass."""
        if self._prefix is None:
            return None
        k, v = (t.to(like.device) for t in self._prefix.layer(layer))
        table = self._tables.layer(layer)
        return rotate(k, None if table is None else table.rows(slice(0, self._past))), v


def collect(
    runner: ModelRunner, fingerprint: str, recipe: Recipe, chunks: Sequence[TokenIds], prefix: ChunkKV | None
) -> list[ChunkKV]:
    """Compute the KV of chunks, each alone behind the recipe's prefix.

    Parameters
    ----------
    runner
        The model.
    fingerprint, recipe
        What the chunk KVs are filed under; ``recipe.prefix`` holds the prefix's token ids.
    chunks
        Token ids of each chunk, ``[tokens]``; run together in one pass, so their sum bounds the memory.
    prefix
        KV of ``recipe.prefix`` computed from position 0 on; None when that is empty.

    Returns
    -------
    list of ChunkKV
        In the order of ``chunks``, on the CPU, in the runner's dtype.

    Raises
    ------
    PromptTooLongError
        If a chunk behind its prefix exceeds the model's context.
    """
    past = 0 if prefix is None else len(prefix.token_ids)
    if past != len(recipe.prefix):
        raise InputError(
            f"recipe names a prefix of {len(recipe.prefix)} tokens, given KV of {past}: pass the prefix's KV"
        )
    if not chunks:
        return []
    longest = max(len(c) for c in chunks)
    if past + longest > runner.context:
        raise PromptTooLongError(
            f"chunk of {longest} tokens behind a prefix of {past} exceeds the model's context of {runner.context}: "
            "split the document into smaller chunks"
        )
    with torch.inference_mode():
        session = CollectSession(runner, [len(c) for c in chunks], prefix)
        ids = torch.cat([to_tensor(c, runner.device) for c in chunks])
        runner.forward(ids, session.positions, session)
    return [
        ChunkKV(fingerprint, recipe, c, tuple(t.cpu() for t in k), tuple(t.cpu() for t in v))
        for c, k, v in zip(chunks, session.k, session.v, strict=True)
    ]
