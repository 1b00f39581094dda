"""The file of one chunk KV: a safetensors file whose every byte that matters is covered by a checksum.

Tensors: ``token_ids`` (int32 ``[tokens]``) and, per codec part and layer, ``<part>.<layer>`` (codec ``raw``:
``k.0``, ``v.0``, ``k.1``, ...), in this order: what stands before layer 0 is the file's *head*, the bytes of a layer
lie together, so that a tier can keep and move them apart. Layer 0 begins at a multiple of 64 bytes. Metadata, all
strings: ``format``, ``fingerprint``, ``recipe`` (JSON), ``token_ids_digest``, ``layers``, ``nbytes``, ``checksums``
(JSON, tensor name -> XXH3-64 over dtype, shape and data), and ``header`` (XXH3-64 over the rest of the metadata; this
rule is the same in every format). Files whose tensors stand in another order, as the first releases wrote them, are
read as well.

No tensor is made here, and torch is not imported: a daemon handles files only. ``blendkv.store.tensors`` turns them
into K and V. Reading goes by the byte ranges of the header with ``preadv`` into memory of our own: one copy, and what
was verified is what is used. Mapped memory (``safe_open``'s way) would save that copy, but its pages can be dropped and
read again after the check, and a truncated file or a failing device would kill the process with SIGBUS instead of
raising.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from blendkv.errors import DamagedChunkError, InputError, StoreMismatchError
from blendkv.store.codecs import CODECS
from blendkv.types import Recipe, TokenIds, as_token_ids, chunk_key

FORMAT = 1
HEADER_LIMIT = 64 << 20
"""Bytes of a header that are read at most."""
_LENGTH_BYTES = 8  # the header's own length leads a safetensors file
_ALIGNMENT = 64
_DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("torch.float64", 8),
    "F32": ("torch.float32", 4),
    "F16": ("torch.float16", 2),
    "BF16": ("torch.bfloat16", 2),
    "F8_E4M3": ("torch.float8_e4m3fn", 1),
    "F8_E5M2": ("torch.float8_e5m2", 1),
    "I64": ("torch.int64", 8),
    "I32": ("torch.int32", 4),
    "I16": ("torch.int16", 2),
    "I8": ("torch.int8", 1),
    "U8": ("torch.uint8", 1),
}
DTYPE_NAMES = {torch_name: name for name, (torch_name, _) in _DTYPES.items()}
"""safetensors' name of a dtype by torch's (``torch.bfloat16`` -> ``BF16``)."""


@dataclass(frozen=True)
class TensorSpan:
    """Where a tensor lies: ``start`` is its offset in the file in bytes, ``size`` its length in bytes.

    ``dtype`` is torch's name of it, ``torch.bfloat16`` for instance.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    checksum: str


@dataclass(frozen=True)
class Part:
    """A tensor on its way into a file: torch's name of its dtype, its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class Header:
    """What a chunk file says of itself. ``nbytes`` counts the decoded K and V, ``file_bytes`` the whole file."""

    fingerprint: str
    recipe: Recipe
    token_ids_digest: str
    layers: int
    nbytes: int
    file_bytes: int
    tensors: Mapping[str, TensorSpan]

    def layer(self, index: int) -> dict[str, TensorSpan]:
        """The tensors of layer ``index`` by codec part.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        if not 0 <= index < self.layers:
            raise IndexError(f"layer {index} of a chunk KV with {self.layers} layers")
        return {part: self.tensors[f"{part}.{index}"] for part in CODECS.get(self.recipe.codec).parts}

    def layer_range(self, index: int) -> tuple[int, int]:
        """First byte of layer ``index`` in the file, and the first behind it; the layer's own if `in_order`."""
        spans = self.layer(index).values()
        return min(span.start for span in spans), max(span.start + span.size for span in spans)

    @cached_property
    def uniform(self) -> bool:
        """Whether the layers lie one behind the other and each is laid out as the first one is."""
        start, stop = self.layer_range(0)
        layout = {part: (span.dtype, span.shape, span.start) for part, span in self.layer(0).items()}
        for index in range(1, self.layers):
            moved = index * (stop - start)
            if layout != {p: (s.dtype, s.shape, s.start - moved) for p, s in self.layer(index).items()}:
                return False
        return True

    @property
    def in_order(self) -> bool:
        """Whether the layers' bytes lie one behind the other: so in all files but those of the first releases."""
        end = self.tensors["token_ids"].start + self.tensors["token_ids"].size
        for index in range(self.layers):
            start, stop = self.layer_range(index)
            if start != end:
                return False
            end = stop
        return end == self.file_bytes


def recipe_to_json(recipe: Recipe) -> str:
    """Return the recipe as a JSON object; without a tenant, as it was before there were any."""
    fields = asdict(recipe)
    if not recipe.tenant:
        del fields["tenant"]
    return json.dumps(fields)


def recipe_from_json(text: str) -> Recipe:
    """Inverse of :func:`recipe_to_json`."""
    fields = json.loads(text)
    return Recipe(**{**fields, "prefix": tuple(fields["prefix"])})


def token_ids_digest(token_ids: TokenIds) -> str:
    """BLAKE2b-128 of the ids, in hex."""
    return hashlib.blake2b(np.ascontiguousarray(token_ids, dtype="<i4").tobytes(), digest_size=16).hexdigest()


def ids_of(header: Header, file: memoryview) -> TokenIds:
    """The token ids in a chunk file, of which at least the head is in ``file``."""
    span = header.tensors["token_ids"]
    return as_token_ids(np.frombuffer(file[span.start : span.start + span.size], dtype="<i4"))


def check_key(key: str, header: Header, token_ids: TokenIds) -> None:
    """Verify that a file's header and token ids are those of the chunk ``key``.

    Raises
    ------
    DamagedChunkError
        If they are another chunk's.
    """
    same_ids = token_ids_digest(token_ids) == header.token_ids_digest
    if not same_ids or chunk_key(header.fingerprint, header.recipe, token_ids) != key:
        raise DamagedChunkError(key, "mismatch: the key does not belong to this content")


class Filed:
    """What is known of a chunk by the header of its file: the part of `blendkv.store.base.Chunk` that all share."""

    header: Header

    @property
    def recipe(self) -> Recipe:
        """How the chunk KV was computed."""
        return self.header.recipe

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that computed it."""
        return self.header.fingerprint

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.header.layers

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V, decoded."""
        return self.header.nbytes


def write_file(
    fingerprint: str,
    recipe: Recipe,
    token_ids: TokenIds,
    layers: Sequence[Mapping[str, Part]],
    nbytes: int,
    allocate: Callable[[int], memoryview],
) -> memoryview:
    """Write the whole file of a chunk KV into memory.

    Parameters
    ----------
    fingerprint, recipe, token_ids
        What the chunk is.
    layers
        Per layer, its codec's parts by name.
    nbytes
        Bytes of the decoded K and V.
    allocate
        Returns writable memory of so many bytes.
    """
    ids = np.ascontiguousarray(token_ids, dtype="<i4")
    parts = {"token_ids": Part("torch.int32", ids.shape, ids.data.cast("B"))}
    parts |= {f"{part}.{index}": value for index, layer in enumerate(layers) for part, value in layer.items()}
    metadata = {
        "format": str(FORMAT),
        "fingerprint": fingerprint,
        "recipe": recipe_to_json(recipe),
        "token_ids_digest": token_ids_digest(token_ids),
        "layers": str(len(layers)),
        "nbytes": str(nbytes),
        "checksums": json.dumps({name: _digest(p.dtype, p.shape, p.data) for name, p in parts.items()}),
    }
    entries: dict[str, Any] = {"__metadata__": {**metadata, "header": _header_checksum(metadata)}}
    end = 0
    for name, part in parts.items():
        entries[name] = {
            "dtype": DTYPE_NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [end, end + part.data.nbytes],
        }
        end += part.data.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text) + ids.nbytes) % _ALIGNMENT)  # safetensors lets a header end in spaces
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    file = allocate(len(head) + end)
    file[: len(head)] = head
    place = len(head)
    for part in parts.values():
        copy_bytes(file[place : place + part.data.nbytes], part.data)
        place += part.data.nbytes
    return file


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copy as many bytes, without the interpreter's lock: other threads go on meanwhile."""
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def header_bytes(leading: bytes | memoryview, file_bytes: int, key: str) -> int:
    """Bytes of length and header of a file that begins with ``leading`` (8 bytes or more).

    Raises
    ------
    DamagedChunkError
        If that cannot be, with a file of ``file_bytes`` bytes.
    """
    length = int.from_bytes(leading[:_LENGTH_BYTES], "little")
    if file_bytes < _LENGTH_BYTES or length > min(HEADER_LIMIT, file_bytes - _LENGTH_BYTES):
        raise DamagedChunkError(key, f"truncated: {file_bytes} bytes")
    return _LENGTH_BYTES + length


def parse_header(leading: bytes | memoryview, file_bytes: int, key: str) -> Header:
    """Check and return the header of a file of ``file_bytes`` bytes that begins with ``leading``.

    Raises
    ------
    DamagedChunkError
        If the file is truncated or its header altered.
    StoreMismatchError
        If a newer version of BlendKV wrote it.
    InputError
        If its codec is unknown here.
    """
    data_start = header_bytes(leading, file_bytes, key)
    try:
        entries = json.loads(bytes(leading[_LENGTH_BYTES:data_start]))
        metadata = dict(entries.pop("__metadata__"))
        if metadata.pop("header") != _header_checksum(metadata):
            raise DamagedChunkError(key, "header: its checksum differs")
        if int(metadata["format"]) > FORMAT:
            raise StoreMismatchError(
                f"chunk KV {key[:12]} has format {metadata['format']}; up to {FORMAT} can be read: upgrade blendkv"
            )
        header = _parse(metadata, entries, data_start, file_bytes)
    except InputError:  # a newer format or an unknown codec, vouched for by the checksum: not damage
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedChunkError(key, f"header: {type(error).__name__}") from error
    end = max(span.start + span.size for span in header.tensors.values())
    if end != file_bytes:
        raise DamagedChunkError(
            key, f"truncated: {file_bytes} of {end} bytes" if file_bytes < end else "header: data behind its end"
        )
    return header


def read_header(fd: int, key: str) -> Header:
    """Read and check the header of an open chunk file; reads no tensor.

    Raises
    ------
    DamagedChunkError, StoreMismatchError, InputError
        As `parse_header`; also damage if it cannot be read.
    """
    try:
        size = os.fstat(fd).st_size
        leading = os.pread(fd, _LENGTH_BYTES, 0)
        leading += os.pread(fd, header_bytes(leading, size, key) - _LENGTH_BYTES, _LENGTH_BYTES)
    except OSError as error:
        raise DamagedChunkError(key, f"unreadable: {error.strerror}") from error
    return parse_header(leading, size, key)


def read_span(fd: int, key: str, span: TensorSpan, into: memoryview) -> None:
    """Read one tensor of an open chunk file into ``into`` (its ``size`` bytes) and verify its checksum.

    Raises
    ------
    DamagedChunkError
        If the bytes are missing, altered or unreadable.
    """
    done = 0
    while done < span.size:
        try:
            count = os.preadv(fd, [into[done:]], span.start + done)
        except OSError as error:
            raise DamagedChunkError(key, f"unreadable: {error.strerror}") from error
        if count == 0:
            raise DamagedChunkError(key, f"truncated: {span.name} ends after {done} of {span.size} bytes")
        done += count
    check_span(key, span, into)


def check_span(key: str, span: TensorSpan, data: memoryview) -> None:
    """Verify the bytes of a tensor: the checksum covers dtype and shape as well.

    Raises
    ------
    DamagedChunkError
        If it differs.
    """
    if _digest(span.dtype, span.shape, data) != span.checksum:
        raise DamagedChunkError(key, f"checksum: {span.name} was altered")


def _parse(metadata: Mapping[str, str], entries: Mapping[str, Any], data_start: int, file_bytes: int) -> Header:
    recipe = recipe_from_json(metadata["recipe"])
    layers = int(metadata["layers"])
    if not 0 < layers <= len(entries):
        raise ValueError("layers")
    checksums = json.loads(metadata["checksums"])
    expected = {"token_ids"} | {f"{part}.{index}" for part in CODECS.get(recipe.codec).parts for index in range(layers)}
    if not entries.keys() == checksums.keys() == expected:
        raise ValueError("tensors")
    spans = {name: _span(name, entry, data_start, checksums[name]) for name, entry in entries.items()}
    return Header(
        *(metadata["fingerprint"], recipe, metadata["token_ids_digest"], layers, int(metadata["nbytes"]), file_bytes),
        spans,
    )


def _span(name: str, entry: Mapping[str, Any], data_start: int, checksum: str) -> TensorSpan:
    dtype, itemsize = _DTYPES[entry["dtype"]]
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end or end - begin != math.prod(shape) * itemsize:
        raise ValueError("offsets")
    return TensorSpan(name, dtype, shape, data_start + begin, end - begin, checksum)


def _digest(dtype: str, shape: tuple[int, ...], data: memoryview) -> str:
    digest = xxhash.xxh3_64(f"{dtype}{shape}".encode())
    digest.update(data)
    return digest.hexdigest()


def _header_checksum(metadata: Mapping[str, str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(metadata, sort_keys=True).encode())
