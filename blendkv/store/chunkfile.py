"""The file of one chunk KV: a safetensors file whose every byte that matters is covered by a checksum.

Tensors: ``token_ids`` (int32 ``[tokens]``) and, per codec part and layer, ``<part>.<layer>`` (codec ``raw``:
``k.0``, ``v.0``, ``k.1``, ...). Metadata, all strings: ``format``, ``fingerprint``, ``recipe`` (JSON),
``token_ids_digest``, ``layers``, ``nbytes``, ``checksums`` (JSON, tensor name -> XXH3-64 over dtype, shape and data),
and ``header`` (XXH3-64 over the rest of the metadata; this rule is the same in every format).

safetensors writes the file. Reading goes by the byte ranges of its header with ``preadv`` into memory of our own:
one copy, and what was verified is what is used. Mapped memory (``safe_open``'s way) would save that copy, but its pages
can be dropped and read again after the check, and a truncated file or a failing device would kill the process
with SIGBUS instead of raising.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save

from blendkv.errors import DamagedChunkError, InputError, StoreMismatchError
from blendkv.store.codecs import CODECS
from blendkv.types import ChunkKV, Recipe, TokenIds

FORMAT = 1
_LENGTH_BYTES = 8  # the header's own length leads a safetensors file
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class TensorSpan:
    """Where a tensor lies: ``start`` is its offset in the file in bytes, ``size`` its length in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int
    checksum: str


@dataclass(frozen=True)
class Header:
    """What a chunk file says of itself. ``nbytes`` counts the decoded K and V."""

    fingerprint: str
    recipe: Recipe
    token_ids_digest: str
    layers: int
    nbytes: int
    tensors: Mapping[str, TensorSpan]


def recipe_to_json(recipe: Recipe) -> str:
    """Return the recipe as a JSON object."""
    return json.dumps(asdict(recipe))


def recipe_from_json(text: str) -> Recipe:
    """Inverse of :func:`recipe_to_json`."""
    fields = json.loads(text)
    return Recipe(**{**fields, "prefix": tuple(fields["prefix"])})


def token_ids_digest(token_ids: TokenIds) -> str:
    """BLAKE2b-128 of the ids, in hex."""
    return hashlib.blake2b(np.ascontiguousarray(token_ids, dtype="<i4").tobytes(), digest_size=16).hexdigest()


def encode_chunk(kv: ChunkKV) -> bytes:
    """Return the whole file of ``kv``, whose tensors are contiguous and on the CPU.

    Raises
    ------
    InputError
        If the recipe names an unknown codec.
    """
    codec = CODECS.get(kv.recipe.codec)
    tensors = {"token_ids": torch.from_numpy(np.array(kv.token_ids, dtype=np.int32))}
    for index in range(kv.layers):
        for part, tensor in codec.encode(*kv.layer(index)).items():
            tensors[f"{part}.{index}"] = tensor
    metadata = {
        "format": str(FORMAT),
        "fingerprint": kv.fingerprint,
        "recipe": recipe_to_json(kv.recipe),
        "token_ids_digest": token_ids_digest(kv.token_ids),
        "layers": str(kv.layers),
        "nbytes": str(kv.nbytes),
        "checksums": json.dumps({name: _checksum(tensor) for name, tensor in tensors.items()}),
    }
    return save(tensors, {**metadata, "header": _header_checksum(metadata)})


def read_header(fd: int, key: str) -> Header:
    """Read and check the header of an open chunk file; reads no tensor.

    Raises
    ------
    DamagedChunkError
        If the file is truncated or its header altered.
    StoreMismatchError
        If a newer version of BlendKV wrote it.
    InputError
        If its codec is unknown here.
    """
    try:
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise DamagedChunkError(key, f"truncated: {size} bytes")
        text = os.pread(fd, length, _LENGTH_BYTES)
    except OSError as error:
        raise DamagedChunkError(key, f"unreadable: {error.strerror}") from error
    try:
        entries = json.loads(text)
        metadata = dict(entries.pop("__metadata__"))
        if metadata.pop("header") != _header_checksum(metadata):
            raise DamagedChunkError(key, "header: its checksum differs")
        if int(metadata["format"]) > FORMAT:
            raise StoreMismatchError(
                f"chunk KV {key[:12]} has format {metadata['format']}; up to {FORMAT} can be read: upgrade blendkv"
            )
        header = _parse(metadata, entries, _LENGTH_BYTES + length)
    except InputError:  # a newer format or an unknown codec, vouched for by the checksum: not damage
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedChunkError(key, f"header: {type(error).__name__}") from error
    end = max(span.start + span.size for span in header.tensors.values())
    if end != size:
        raise DamagedChunkError(
            key, f"truncated: {size} of {end} bytes" if size < end else "header: data behind its end"
        )
    return header


def read_tensor(fd: int, key: str, name: str, span: TensorSpan) -> torch.Tensor:
    """Read one tensor of an open chunk file and verify its checksum.

    Raises
    ------
    DamagedChunkError
        If the bytes are missing, altered or unreadable.
    """
    data = torch.empty(span.size, dtype=torch.uint8)
    view = data.numpy().data
    done = 0
    while done < span.size:
        try:
            count = os.preadv(fd, [view[done:]], span.start + done)
        except OSError as error:
            raise DamagedChunkError(key, f"unreadable: {error.strerror}") from error
        if count == 0:
            raise DamagedChunkError(key, f"truncated: {name} ends after {done} of {span.size} bytes")
        done += count
    # Checked before the bytes take their shape: the checksum covers dtype and shape as well.
    if _digest(span.dtype, span.shape, view) != span.checksum:
        raise DamagedChunkError(key, f"checksum: {name} was altered")
    return data.view(span.dtype).view(span.shape)


def _parse(metadata: Mapping[str, str], entries: Mapping[str, Any], data_start: int) -> Header:
    recipe = recipe_from_json(metadata["recipe"])
    layers = int(metadata["layers"])
    checksums = json.loads(metadata["checksums"])
    expected = {"token_ids"} | {f"{part}.{index}" for part in CODECS.get(recipe.codec).parts for index in range(layers)}
    if not entries.keys() == checksums.keys() == expected:
        raise ValueError("tensors")
    spans = {name: _span(entry, data_start, checksums[name]) for name, entry in entries.items()}
    return Header(metadata["fingerprint"], recipe, metadata["token_ids_digest"], layers, int(metadata["nbytes"]), spans)


def _span(entry: Mapping[str, Any], data_start: int, checksum: str) -> TensorSpan:
    dtype = _DTYPES[entry["dtype"]]
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("offsets")
    return TensorSpan(dtype, shape, data_start + begin, end - begin, checksum)


def _checksum(tensor: torch.Tensor) -> str:
    data = tensor.view(-1).view(torch.uint8).numpy().data
    return _digest(tensor.dtype, tuple(tensor.shape), data)


def _digest(dtype: torch.dtype, shape: tuple[int, ...], data: memoryview) -> str:
    digest = xxhash.xxh3_64(f"{dtype}{shape}".encode())
    digest.update(data)
    return digest.hexdigest()


def _header_checksum(metadata: Mapping[str, str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(metadata, sort_keys=True).encode())
