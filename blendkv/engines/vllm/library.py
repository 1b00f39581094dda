"""The chunk KVs of a model that runs in vLLM's workers: looked up here, computed and stored there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from blendkv import library
from blendkv.library import Library, batches
from blendkv.store.door import Store
from blendkv.types import RecipeKind, TokenIds

if TYPE_CHECKING:
    from blendkv.engines.vllm.engine import VllmEngine


class WorkerLibrary(Library):
    """A `Library` over the store that vLLM's workers have open too."""

    def __init__(
        self, engine: VllmEngine, store: Store, kind: RecipeKind, system_prefix: TokenIds, tenant: str = ""
    ) -> None:
        super().__init__(engine, store, kind, system_prefix, engine.codec, tenant)
        self.engine = engine

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, as they are stored."""
        return self.engine.stored_bytes_per_token

    def fill(self, chunks: Sequence[TokenIds]) -> Iterator[int]:
        """Compute and store chunks, pass by pass, between which vLLM serves its requests."""
        for group in batches(chunks, library.PASS_TOKENS):
            done = self.engine.rpc(
                "blendkv_precompute",
                [c.tolist() for c in group], self.kind, list(self.recipe.prefix), self.recipe.tenant,
            )  # fmt: skip
            self.counts.computed += done["computed"]
            self.counts.computed_tokens += done["computed_tokens"]
            yield sum(len(c) for c in group)
