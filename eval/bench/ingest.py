"""The rate of computing and storing chunk KV beside plain batched prefill of the same tokens."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from blendkv.engines.torch.engine import TorchEngine
from blendkv.library import ChunkLibrary, batches
from blendkv.store.tiered import KVStore
from blendkv.types import TokenIds

_ROUNDS = 3


@dataclass(frozen=True)
class IngestRate:
    """Chunk tokens per second; ``ratio`` is ingest over plain prefill."""

    tokens: int
    ingest_tokens_per_s: float
    prefill_tokens_per_s: float

    @property
    def ratio(self) -> float:
        """Ingest's rate over plain prefill's."""
        return self.ingest_tokens_per_s / self.prefill_tokens_per_s


def ingest_rate(engine: TorchEngine, chunks: Sequence[TokenIds], prefix: TokenIds) -> IngestRate:
    """Compute and store ``chunks`` on disk, and prefill them as padded batches; best of three rounds each, in turn."""
    tokens = sum(len(c) for c in chunks)
    ours, plain = [], []
    for _ in range(_ROUNDS):
        with tempfile.TemporaryDirectory() as folder, KVStore.open(Path(folder) / "s", memory_bytes=0) as store:
            library = ChunkLibrary(engine, store, "system", prefix)
            began = time.perf_counter()
            library.precompute(chunks, None)
            ours.append(time.perf_counter() - began)
        plain.append(_plain(engine, chunks))
    return IngestRate(tokens, tokens / min(ours), tokens / min(plain))


def _plain(engine: TorchEngine, chunks: Sequence[TokenIds]) -> float:
    """Seconds of prefilling the chunks in right-padded batches by the model's own attention, KV cache kept."""
    pad = engine.tokenizer.pad_token_id or 0
    began = time.perf_counter()
    with engine.lock, torch.inference_mode():
        for group in batches(chunks, 2048):
            longest = max(len(c) for c in group)
            ids = torch.full((len(group), longest), pad, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, chunk in enumerate(group):
                ids[row, : len(chunk)] = torch.from_numpy(chunk.astype("int64"))
                mask[row, : len(chunk)] = 1
            ragged = {} if bool(mask.all()) else {"attention_mask": mask.to(engine.model.device)}
            engine.model.base_model(input_ids=ids.to(engine.model.device), use_cache=True, **ragged)
    return time.perf_counter() - began
