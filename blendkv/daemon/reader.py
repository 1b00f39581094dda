"""A chunk that the daemon has lent: its layers, as tensors in the shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from blendkv.daemon.loans import Loan
from blendkv.store.base import Layer
from blendkv.store.chunkfile import Filed, Header
from blendkv.store.codecs import CODECS
from blendkv.types import TokenIds

if TYPE_CHECKING:
    import torch

    from blendkv.kernels.types import Stored


class LentReader(Filed):
    """A `ChunkReader` over the file of a chunk in shared memory, ``file``."""

    def __init__(self, key: str, header: Header, token_ids: TokenIds, file: memoryview, loan: Loan) -> None:
        self.key = key
        self.header = header
        self.token_ids = token_ids
        self._file = file
        self._loan = loan
        self._codec = CODECS.get(header.recipe.codec)
        self._cuts: list[dict[str, torch.Tensor]] | None = None
        self._looked = False

    def layer(self, index: int) -> Layer:
        """K and V of layer ``index``, each ``[tokens, kv_heads, head_dim]``; waits for it where it is being loaded.

        Raises
        ------
        UnavailableChunkError
            If it does not come: the daemon is gone, or the file behind it is damaged.
        IndexError
            If there is no such layer.
        """
        return self._codec.decode(self._parts(index), self.header.recipe.dtype)

    def encoded(self, index: int) -> tuple[Stored, Stored]:
        """K and V of layer ``index`` as they lie in the shared memory; otherwise as `layer`."""
        return self._codec.encoded(self._parts(index))

    def _parts(self, index: int) -> Mapping[str, torch.Tensor]:
        """The layer's tensors, once they are there."""
        from blendkv.store.tensors import cut_layers, tensor_of

        if not 0 <= index < self.header.layers:
            raise IndexError(f"layer {index} of a chunk KV with {self.header.layers} layers")
        if index >= self._loan.ready:
            self._loan.wait_for(self.key, index)
        if not self._looked:
            self._cuts, self._looked = cut_layers(self._file, self.header), True
        if self._cuts is not None:
            return self._cuts[index]
        spans = self.header.layer(index)
        return {p: tensor_of(span, self._file[span.start : span.start + span.size]) for p, span in spans.items()}


class LoadingLentReader(LentReader):
    """A `LentReader` of which only ``first`` layers were there when it was lent: a `LoadingReader`."""

    def __init__(
        self, key: str, header: Header, token_ids: TokenIds, file: memoryview, loan: Loan, tier: str, first: int
    ) -> None:
        super().__init__(key, header, token_ids, file, loan)
        self.tier = tier
        self._first = first

    @property
    def bytes_read(self) -> int:
        """Bytes that have come since it was lent."""
        layers = (self.header.layer(index) for index in range(self._first, self._loan.ready))
        return sum(span.size for layer in layers for span in layer.values())

    def readahead(self, index: int) -> None:
        """Nothing to do: the daemon reads ahead as fast as it can."""
