"""A model with a prompt, its chunk KVs, and the truth about it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tiny import lengths, random_ids

from blendkv.blend import BlendReport, BlendSettings, blend, collect
from blendkv.engines.torch.cache import ContiguousCache
from blendkv.engines.torch.runner import TorchRunner
from blendkv.types import ChunkKV, Prompt, Recipe, Segment, as_token_ids, to_tensor


class ListSource:
    """The trivial `KVSource`: chunk KVs in memory."""

    def __init__(self, readers: Sequence[ChunkKV | None]) -> None:
        self.readers = readers

    def layer(self, index: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        return [None if r is None else r.layer(index) for r in self.readers]


@dataclass
class World:
    """A prompt of system, chunks and question over a tiny model."""

    runner: TorchRunner
    prompt: Prompt
    system: ChunkKV
    chunks: list[ChunkKV]

    @classmethod
    def make(
        cls,
        runner: TorchRunner,
        rng: random.Random,
        chunks: int = 3,
        recipe: str = "system",
        sizes: Sequence[int] | None = None,
    ) -> World:
        inner = lengths(rng, chunks) if sizes is None else sizes
        chunks = len(inner)
        ids = [as_token_ids(random_ids(rng, n)) for n in (rng.randint(1, 9), *inner, rng.randint(1, 9))]
        system = collect(runner, "tiny", Recipe("system", (), "float32"), [ids[0]], None)[0]
        prefix = (
            system
            if recipe == "system"
            else collect(runner, "tiny", Recipe("system", (), "float32"), [ids[0][:1]], None)[0]
        )
        how = Recipe(recipe, tuple(int(t) for t in prefix.token_ids), "float32")  # type: ignore[arg-type]
        kvs = collect(runner, "tiny", how, ids[1:-1], prefix)
        kinds = ["system", *["chunk"] * chunks, "query"]
        prompt = Prompt(tuple(Segment(kind, i) for kind, i in zip(kinds, ids, strict=True)))  # type: ignore[arg-type]
        return cls(runner, prompt, system, kvs)

    def stored_tokens(self) -> int:
        return len(self.system.token_ids) + sum(len(c.token_ids) for c in self.chunks)

    def source(self, hole: int | None = None) -> ListSource:
        chunks: list[ChunkKV | None] = [None if i == hole else c for i, c in enumerate(self.chunks)]
        return ListSource([self.system, *chunks, None])

    def sink(self, dtype: torch.dtype = torch.float32) -> ContiguousCache:
        return ContiguousCache(self.runner.layers, 4, dtype, torch.device("cpu"))

    def full(self) -> torch.Tensor:
        """Logits ``[tokens, vocab]`` of plain full prefill by the model's own attention."""
        with torch.inference_mode():
            ids = to_tensor(self.prompt.token_ids)
            return self.runner.model(input_ids=ids[None], use_cache=False).logits[0]

    def blend(
        self, settings: BlendSettings, source: ListSource | None = None, sink: ContiguousCache | None = None
    ) -> tuple[BlendReport, float]:
        """The report, and max |difference of logits| to full prefill over the question's rows."""
        question = len(self.prompt.segments[-1].token_ids)
        report = blend(self.runner, self.prompt, source or self.source(), sink or self.sink(), settings, question)
        assert report.logits is not None
        return report, float((report.logits - self.full()[-question:]).abs().max())


def garbage(kv: ChunkKV) -> ChunkKV:
    """The same chunk with random K and V of the same size: a control that must fail every oracle."""
    noise = torch.Generator().manual_seed(1)
    k = tuple(torch.randn(t.shape, generator=noise) * t.std() for t in kv.k)
    v = tuple(torch.randn(t.shape, generator=noise) * t.std() for t in kv.v)
    return replace(kv, k=k, v=v)
