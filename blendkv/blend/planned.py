"""One blend under the loading planner: its readers looked over, the plan carried out, the outcome learned from."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from blendkv.blend.blend import BlendReport
from blendkv.blend.layout import Layout, lay_out
from blendkv.blend.loading import (
    LoadingPlanner,
    LoadingRequest,
    LoadPlan,
    StoredChunk,
    assembled,
    handed,
    selection_kind,
)
from blendkv.blend.rates import Observation, Work
from blendkv.blend.rotation import same_rotation
from blendkv.blend.settings import BlendSettings
from blendkv.engines.base import ModelRunner
from blendkv.store.base import ChunkReader, Layer, LoadingReader
from blendkv.types import Prompt, Recipe, TokenIds

_log = logging.getLogger(__name__)


class TimedReader:
    """A loading reader, and what its reads took: ``calls`` layers, ``loaded`` bytes of K and V, ``seconds``.

    Layers that it has kept from an earlier read are not counted.
    """

    def __init__(self, inner: LoadingReader) -> None:
        self._inner = inner
        self.calls, self.loaded, self.seconds = 0, 0, 0.0

    @property
    def tier(self) -> str:
        """Where the layers come from."""
        return self._inner.tier

    @property
    def key(self) -> str:
        """The chunk key."""
        return self._inner.key

    @property
    def token_ids(self) -> TokenIds:
        """Token ids, int32 ``[tokens]``."""
        return self._inner.token_ids

    @property
    def recipe(self) -> Recipe:
        """How the chunk KV was computed."""
        return self._inner.recipe

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that computed it."""
        return self._inner.fingerprint

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self._inner.layers

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V."""
        return self._inner.nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._inner.bytes_read

    def readahead(self, index: int) -> None:
        """Start fetching layer ``index``; asking takes time as well."""
        began = time.perf_counter()
        self._inner.readahead(index)
        self.seconds += time.perf_counter() - began

    def layer(self, index: int) -> Layer:
        """K and V of layer ``index``, each ``[tokens, kv_heads, head_dim]``; errors are the other reader's."""
        before, began = self._inner.bytes_read, time.perf_counter()
        pair = self._inner.layer(index)
        if self._inner.bytes_read > before:
            self.seconds += time.perf_counter() - began
            self.calls += 1
            self.loaded += sum(t.numel() * t.element_size() for t in pair)
        return pair


class PlannedBlend:
    """Ask `readers` for what to blend from, blend with `settings`, and tell `learn` the report.

    Parameters
    ----------
    planner
        Decides and learns.
    runner, prompt
        Of the blend.
    settings
        As asked for.
    offset
        Tokens that stand before the prompt in the sink.
    """

    def __init__(
        self, planner: LoadingPlanner, runner: ModelRunner, prompt: Prompt, settings: BlendSettings, offset: int = 0
    ) -> None:
        self._planner, self._runner, self._prompt, self._offset = planner, runner, prompt, offset
        self._timed: list[TimedReader] = []
        self._readers: Sequence[ChunkReader | None] = ()
        self._held: set[str] = set()
        self.settings = settings
        """What to blend with."""
        self.plan = LoadPlan((), settings.asked, settings.asked, None)
        """What was decided."""

    def readers(self, found: Sequence[ChunkReader | None]) -> list[ChunkReader | None]:
        """Decide, given the readers of the prompt's segments; None in place of those that are not to be read."""
        layout = self._layout(found)
        request = LoadingRequest(layout, chunks_of(layout, found), len(self._runner.layers), self.settings)
        self.plan = self._planner.plan(request)
        self._held = {c.tier for c in request.chunks}
        if self.plan.budget != self.plan.budget_asked:
            self.settings = replace(self.settings, budget=self.plan.budget)
        timed: dict[int, TimedReader] = {}
        chosen: list[ChunkReader | None] = []
        for index, reader in enumerate(found):
            if reader is None or index in self.plan.recompute:
                chosen.append(None)
            elif isinstance(reader, LoadingReader):
                chosen.append(timed.setdefault(id(reader), TimedReader(reader)))
            else:
                chosen.append(reader)
        self._timed, self._readers = list(timed.values()), chosen
        return chosen

    def learn(self, report: BlendReport) -> None:
        """Note what the blend took."""
        seen = self._observed(report)
        self._planner.book.observe(seen)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "planned %s; predicted %s, took %s", self.plan, self.plan.predicted,
                {**seen.stages, "total": sum(seen.stages.values())},
            )  # fmt: skip

    def _layout(self, readers: Sequence[ChunkReader | None]) -> Layout:
        return lay_out(self._prompt, readers, self._offset, partial(same_rotation, self._runner))

    def _observed(self, report: BlendReport) -> Observation:
        layout, layers = self._layout(self._readers), len(self._runner.layers)
        fresh, every = layout.positions(fresh=True), layout.positions(fresh=True, candidates=True)
        kind = selection_kind(self.settings)
        selection = None
        if kind == "attention" and report.scored_rows > 0:
            selection = kind, _work(fresh)
        elif kind == "deviation" and report.recomputed_tokens < layout.candidate_tokens:
            selection = kind, _work(every)
        passes = 2 if report.scored_rows > 0 else 1
        reads: dict[str, tuple[float, float, float]] = {}
        for reader in self._timed:
            if reader.calls:
                calls, size, seconds = reads.get(reader.tier, (0.0, 0.0, 0.0))
                reads[reader.tier] = calls + reader.calls, size + reader.loaded, seconds + reader.seconds
        chunks = chunks_of(layout, self._readers)
        return Observation(
            stages=report.stages,
            recompute=_work(torch.cat((fresh, report.selected.to(fresh.device)))),
            selection=selection,
            passes=passes,
            layers=layers,
            assembled=assembled(layers, passes, sum(c.tokens for c in chunks)),
            handed=handed(chunks, layers, passes),
            reads=reads,
            avoided=sorted(self._held - {c.tier for c in chunks} - {"memory"}),
        )


def chunks_of(layout: Layout, readers: Sequence[ChunkReader | None]) -> tuple[StoredChunk, ...]:
    """The stored chunks of a layout, by reader."""
    places: dict[int, list[int]] = {}
    for index, reader in enumerate(readers):
        if reader is not None:
            places.setdefault(id(reader), []).append(index)
    found = []
    for indices in places.values():
        reader = readers[indices[0]]
        assert reader is not None
        tier = reader.tier if isinstance(reader, LoadingReader) else "memory"
        found.append(StoredChunk(tuple(layout.spans[i] for i in indices), tier, reader.nbytes))
    return tuple(found)


def _work(positions: torch.Tensor) -> Work:
    return Work(len(positions), int(positions.sum()) + len(positions))
