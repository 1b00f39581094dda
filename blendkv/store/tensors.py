"""Between the bytes of a chunk file and K and V as tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from blendkv.store.base import Layer
from blendkv.store.chunkfile import Header, Part, TensorSpan, write_file
from blendkv.store.codecs import CODECS
from blendkv.types import ChunkKV, Recipe


def encode_chunk(kv: ChunkKV, allocate: Callable[[int], memoryview] | None = None) -> memoryview:
    """Return the whole file of ``kv``, whose tensors are contiguous and on the CPU.

    Parameters
    ----------
    kv
        The chunk.
    allocate
        Returns writable memory of so many bytes for the file; memory of this process by default.

    Raises
    ------
    InputError
        If the recipe names an unknown codec.
    """
    codec = CODECS.get(kv.recipe.codec)
    layers = [
        {name: _part(tensor) for name, tensor in codec.encode(*kv.layer(index)).items()} for index in range(kv.layers)
    ]
    return write_file(kv.fingerprint, kv.recipe, kv.token_ids, layers, kv.nbytes, allocate or _memory)


def decode_layer(recipe: Recipe, parts: Mapping[str, tuple[TensorSpan, memoryview]]) -> Layer:
    """K and V, each ``[tokens, kv_heads, head_dim]``, from the bytes of a layer's parts; they may share the memory."""
    codec = CODECS.get(recipe.codec)
    return codec.decode({part: tensor_of(span, data) for part, (span, data) in parts.items()}, recipe.dtype)


def tensor_of(span: TensorSpan, data: memoryview) -> torch.Tensor:
    """The tensor whose bytes are ``data``, in that memory; a copy only where its address does not suit the dtype."""
    raw = torch.from_numpy(np.frombuffer(data, dtype=np.uint8))
    if raw.data_ptr() % _itemsize(span):
        raw = raw.clone()
    return raw.view(_dtype(span)).view(span.shape)


def cut_layers(file: memoryview, header: Header) -> list[dict[str, torch.Tensor]] | None:
    """The codec's parts of every layer, as tensors in the memory of the whole ``file``; its bytes may come later.

    None if the layers differ in layout, or an address does not suit a dtype: use `decode_layer` then. Cut together, all
    take a few calls of torch, in a fifth of the time of a few calls each.
    """
    whole = torch.from_numpy(np.frombuffer(file, dtype=np.uint8))
    start, stop = header.layer_range(0)
    first = header.layer(0)
    places = (whole.data_ptr() + start, stop - start, *(span.start - start for span in first.values()))
    if not header.uniform or any(place % _itemsize(span) for span in first.values() for place in places):
        return None
    table = whole[start : start + header.layers * (stop - start)].view(header.layers, stop - start)
    parts = [
        table[:, span.start - start :][:, : span.size].view(_dtype(span)).view(-1, *span.shape).unbind()
        for span in first.values()
    ]
    return [dict(zip(first, tensors, strict=True)) for tensors in zip(*parts, strict=True)]


def _dtype(span: TensorSpan) -> torch.dtype:
    found: torch.dtype = getattr(torch, span.dtype.removeprefix("torch."))
    return found


def _itemsize(span: TensorSpan) -> int:
    return _dtype(span).itemsize


def _part(tensor: torch.Tensor) -> Part:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return Part(str(tensor.dtype), tuple(tensor.shape), data.data)


def _memory(size: int) -> memoryview:
    return np.empty(size, dtype=np.uint8).data
