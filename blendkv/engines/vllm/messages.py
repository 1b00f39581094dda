"""What the scheduler's half of the connector and the worker's half tell each other. All of it pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from blendkv.blend import BlendSettings
from blendkv.engines.vllm.parallel import PeerFaultError
from blendkv.errors import DamagedChunkError, InputError, StoreError, UnsupportedModelError
from blendkv.market.base import NOBODY, Use
from blendkv.types import Prompt, RecipeKind, Segment, as_token_ids


class NotBlendedError(InputError):
    """Why a request is prefilled in full; ``reason`` is one of a few words, to be counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (DamagedChunkError, "chunk_damaged"),
    (StoreError, "store"),
    (PeerFaultError, "other_rank"),
    (UnsupportedModelError, "model"),
    (TimeoutError, "store_slow"),
    (MemoryError, "out_of_memory"),
    (torch.OutOfMemoryError, "out_of_memory"),
)


def reason_of(error: BaseException) -> str:
    """One of a few words for a fault, to be counted; the name of an unforeseen one."""
    if isinstance(error, NotBlendedError):
        return error.reason
    known = (reason for kind, reason in _REASONS if isinstance(error, kind))
    return next(known, f"error:{type(error).__name__}")


@dataclass(frozen=True)
class Piece:
    """A run of a prompt's tokens. A ``chunk`` or ``system`` piece with a ``key`` is KV of the store.

    It then holds the stored chunk's tokens from ``first`` on; without a key its KV is found by its token ids.
    """

    kind: str
    tokens: int
    key: str | None = None
    first: int = 0


@dataclass(frozen=True)
class Load:
    """A request to blend: its tokens but the last, cut into pieces, and the blocks that its KV goes to.

    ``block_ids`` has one tuple per KV cache group. ``written`` tokens are in the blocks already (a local hit) and are
    not written again. ``recipe`` says how chunks without a key are computed, ``tenant`` (a tag) whose they are, ``use``
    whose work this is.
    """

    request_id: str
    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    recipe: RecipeKind
    settings: BlendSettings
    block_ids: tuple[tuple[int, ...], ...]
    written: int
    tenant: str = ""
    use: Use = NOBODY

    def prompt(self) -> Prompt:
        """The tokens, cut into segments."""
        parts, start = [], 0
        for piece in self.pieces:
            ids = as_token_ids(self.token_ids[start : start + piece.tokens])
            parts.append(Segment(piece.kind, ids))  # type: ignore[arg-type]
            start += piece.tokens
        return Prompt(tuple(parts))


@dataclass(frozen=True)
class Compute:
    """Chunks whose KV the store lacks, to be computed alone behind a recipe's prefix and stored, for ``use``."""

    recipe: RecipeKind
    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    tenant: str = ""
    use: Use = NOBODY

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(c) for c in self.chunks)


@dataclass
class BlendMetadata(KVConnectorMetadata):
    """What the worker does in one step: first the chunks, then the blends."""

    computes: list[Compute] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What the worker did: a report per blended request, a reason per failed one, and why it can blend nothing."""

    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    refused: str | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the reports of the ranks of a tensor parallel group: a request failed if it failed anywhere."""
        assert isinstance(other, WorkerReport)
        failures = {**other.failures, **self.failures}
        return WorkerReport({**other.reports, **self.reports}, failures, self.refused or other.refused)

    def __bool__(self) -> bool:
        return bool(self.reports or self.failures or self.refused)
