"""The words of the house as data: documents, chunks, recipes, chunk keys and chunk KVs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from blendkv.errors import InputError

if TYPE_CHECKING:  # the store's own process lives without torch
    import torch

TokenIds = npt.NDArray[np.int32]
"""Token ids: a read-only int32 array of shape ``[tokens]``. Made once by the splitter, then only carried."""

_TENANT = re.compile(r"([0-9a-f]{32})?")

RecipeKind = Literal["system", "bos"]
SegmentKind = Literal["system", "chunk", "history", "query"]


def as_token_ids(ids: Iterable[int] | npt.NDArray[Any]) -> TokenIds:
    """Return ``ids`` as a read-only int32 array of shape ``[tokens]``.

    Raises
    ------
    InputError
        If the array is not one-dimensional.
    """
    array = np.array(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int32)
    if array.ndim != 1:
        raise InputError(f"token ids have shape {array.shape}; one dimension is allowed: pass one sequence at a time")
    array.flags.writeable = False
    return array


def to_tensor(ids: TokenIds, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return token ids as an int64 tensor ``[tokens]`` of their own memory."""
    import torch

    return torch.from_numpy(ids.astype(np.int64)).to(device)


def check_tenant(tag: object) -> str:
    """Return ``tag`` if it is a tenant's tag (`blendkv.tenants`), or empty: no tenant.

    Raises
    ------
    InputError
        If it is neither; the message does not repeat it.
    """
    if not isinstance(tag, str) or not _TENANT.fullmatch(tag):
        raise InputError("the tenant is no tag of 32 hex digits; make it of a name with tenants.tenant_tag")
    return tag


@dataclass(frozen=True)
class Document:
    """A text of the corpus.

    ``id`` is stable between runs (a path, a URL, a row id): a document with a known id and another text
    replaces the old one. ``metadata`` holds JSON values and is what filters look at.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of the text, in hex: equal digests need no new work."""
        return hashlib.blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Chunk:
    """A span of a document, tokenised once. ``text`` is ``document.text[start:end]``."""

    document_id: str
    index: int
    text: str
    token_ids: TokenIds = field(compare=False)
    start: int
    end: int
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Unique in a collection: ``<document id>#<index>``."""
        return f"{self.document_id}#{self.index}"


@dataclass(frozen=True)
class Recipe:
    """How a chunk KV was computed.

    ``prefix`` holds the token ids that stood before the chunk: the exact system prefix (kind ``system``) or
    BOS (kind ``bos``; empty for models without one). A chunk KV is exact wherever those very tokens stand
    before it again from position 0 on. The KV of the system prefix itself has kind ``system`` and an empty prefix.

    ``tenant`` is the tag of whose chunk this is (`blendkv.tenants.tenant_tag`); equal tokens of two tenants are two
    chunks, under two keys.

    Raises
    ------
    InputError
        If ``tenant`` is neither empty nor 32 hex digits.
    """

    kind: RecipeKind
    prefix: tuple[int, ...]
    dtype: str
    codec: str = "raw"
    tenant: str = ""

    def __post_init__(self) -> None:
        check_tenant(self.tenant)

    @cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of the whole recipe, in hex."""
        # The tag takes the place of BLAKE2b's salt, all zeros by default: without a tenant, keys are as they ever were.
        salt = bytes.fromhex(self.tenant)
        h = hashlib.blake2b(f"{self.kind}|{self.dtype}|{self.codec}|".encode(), digest_size=16, salt=salt)
        h.update(np.asarray(self.prefix, dtype="<i4").tobytes())
        return h.hexdigest()


def chunk_key(fingerprint: str, recipe: Recipe, token_ids: TokenIds) -> str:
    """BLAKE2b-256 over (model fingerprint, recipe, token ids), in hex: the name of a chunk KV.

    Stores compare the token ids too before they call two keys a match.
    """
    h = hashlib.blake2b(f"{fingerprint}|{recipe.digest}|".encode(), digest_size=32)
    h.update(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
    return h.hexdigest()


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """K before RoPE and V of one chunk computed alone.

    ``k[l]`` and ``v[l]`` have shape ``[tokens, kv_heads, head_dim]`` for layer ``l`` (the head dims of K and V, and
    of different layers, may differ), in the recipe's dtype.
    """

    fingerprint: str
    recipe: Recipe
    token_ids: TokenIds
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]

    @cached_property
    def key(self) -> str:
        """The chunk key, from the fingerprint, the recipe and the token ids."""
        return chunk_key(self.fingerprint, self.recipe, self.token_ids)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.k)

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V."""
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each ``[tokens, kv_heads, head_dim]``."""
        return self.k[index], self.v[index]


@dataclass(frozen=True)
class Segment:
    """A run of a prompt's token ids with one role. Only ``chunk`` and ``system`` segments have stored KV."""

    kind: SegmentKind
    token_ids: TokenIds


@dataclass(frozen=True)
class Prompt:
    """An ordered tuple of segments; their token ids, concatenated, are what the model reads. No separators."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        empty = [s.kind for s in self.segments if len(s.token_ids) == 0]
        if not self.segments or empty:
            raise InputError(
                f"prompt has {empty or 'no segments'}; segments need at least one token: leave out empty ones"
            )

    @cached_property
    def token_ids(self) -> TokenIds:
        """All token ids, int32 ``[tokens]``."""
        return as_token_ids(np.concatenate([s.token_ids for s in self.segments]))

    def __len__(self) -> int:
        return sum(len(s.token_ids) for s in self.segments)
