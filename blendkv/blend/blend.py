"""`blend`: stored chunk KVs + a prompt -> final KV in a sink, with what it did and cost."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from functools import partial

import torch

from blendkv.blend.context import Context
from blendkv.blend.layout import Layout, lay_out
from blendkv.blend.recompute import RecomputeSession
from blendkv.blend.rotation import same_rotation
from blendkv.blend.score import CHECK_LAYER, DeviationSession, ScoreSession
from blendkv.blend.select import Selection, SelectionContext, choose
from blendkv.blend.settings import BlendSettings
from blendkv.blend.shift import ShiftEstimator
from blendkv.engines.base import KVSink, KVSource, ModelRunner
from blendkv.errors import InputError, PromptTooLongError
from blendkv.types import Prompt, to_tensor


@dataclass(frozen=True)
class BlendSummary:
    """What a blend did and cost, in plain values.

    ``budget_spent`` is fresh-QKV tokens summed over layers / (layers x reusable tokens), every selection layer charged;
    the scoring pass is reported beside it as ``scored_rows`` (rows run over all layers) and in ``stages``.
    ``recomputed_tokens`` counts stored tokens that were computed again through all layers. ``stages`` holds seconds of
    ``score``, ``load``, ``rotate`` and ``recompute``; they do not overlap. ``bytes_loaded`` counts the stored KV taken
    in, from whatever tier, once.
    """

    selector: str
    shift: str
    budget_asked: float
    budget_spent: float
    total_tokens: int
    reusable_tokens: int
    exact_tokens: int
    fresh_tokens: int
    recomputed_tokens: int
    scored_rows: int
    bytes_loaded: int
    stages: dict[str, float]


@dataclass(frozen=True)
class BlendReport(BlendSummary):
    """What `blend` returns: the summary, the positions that were ``selected`` (int64, ascending), and the logits.

    ``logits`` is ``[logits_to_keep, vocab]`` when asked for.
    """

    selected: torch.Tensor
    logits: torch.Tensor | None = field(default=None, repr=False)


def _count(layout: Layout, settings: BlendSettings, layers: int) -> int:
    """Tokens to recompute so that the honest budget is spent and not exceeded.

    A deviation rule pays for every candidate in the layers up to the check layer: (c n + (L - c) r) / (L N).
    """
    candidates, asked = layout.candidate_tokens, settings.asked
    if asked >= 1.0:
        return candidates
    allowed = asked * layers * layout.reusable_tokens + 1e-6
    if not settings.rule.needs.startswith("deviation"):
        return min(candidates, int(allowed / layers))
    first = min(CHECK_LAYER + 1, layers)
    left = allowed - first * candidates
    if left < 0:
        floor = first * candidates / (layers * layout.reusable_tokens)
        raise InputError(
            f"budget {asked:g} is below what {settings.selector} spends on selecting alone ({first} of {layers} layers "
            f"in full); allowed here: {floor:.3g} to 1"
        )
    return min(candidates, int(left / max(1, layers - first)))


def _check(layout: Layout, prompt: Prompt, runner: ModelRunner, sink: KVSink) -> None:
    if layout.total > runner.context:
        raise PromptTooLongError(
            f"prompt has {layout.total} tokens; the model's context holds {runner.context}: use fewer or smaller chunks"
        )
    if prompt.segments[-1].kind != "query":
        raise InputError(f"prompt ends with a {prompt.segments[-1].kind!r} segment; the last one must be the 'query'")


class _Blend:
    """One blend in flight: choose, then recompute."""

    def __init__(
        self, runner: ModelRunner, prompt: Prompt, source: KVSource, sink: KVSink, settings: BlendSettings
    ) -> None:
        self.layout = lay_out(prompt, source.readers, sink.length, partial(same_rotation, runner))
        _check(self.layout, prompt, runner, sink)
        self.runner, self.settings = runner, settings
        self.context = Context(runner, self.layout, source, sink)
        self.ids = to_tensor(prompt.token_ids, runner.device)
        self.fresh_rows = self.layout.positions(fresh=True)
        self.seed = zlib.crc32(prompt.token_ids.tobytes())
        self.count = _count(self.layout, settings, len(runner.layers))
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.scored_rows = 0
        self.deviating_layers = 0

    def _forward(self, rows: torch.Tensor, session: object, keep: int = 0) -> torch.Tensor | None:
        ids = self.ids[rows - self.layout.offset]
        return self.runner.forward(ids, rows, session, keep)  # type: ignore[arg-type]

    def choose(self) -> Selection:
        """Run the selector's pass, if it needs one, and let it choose."""
        layout, rule, device = self.layout, self.settings.rule, self.runner.device
        everything = layout.positions(candidates=True)
        if self.count == len(everything):
            return Selection(everything, everything[:0])
        if self.count == 0 and not rule.needs.startswith("deviation"):
            return Selection(everything[:0], everything[:0])
        scores = torch.zeros(layout.total)
        if rule.needs in ("max", "mean"):
            rows = self.fresh_rows.to(device)
            session = ScoreSession(self.context, rows, layout.positions("query").to(device), rule.needs)
            self._forward(rows, session)
            scores, self.scored_rows = session.scores(), len(rows)
        elif rule.needs != "nothing":
            rows = layout.positions(fresh=True, candidates=True).to(device)
            check = min(CHECK_LAYER, len(self.runner.layers) - 1)
            deviation = DeviationSession(self.context, rows, rule.needs.removeprefix("deviation_"), check)  # type: ignore[arg-type]
            self._forward(rows, deviation)
            scores, self.kept, self.deviating_layers = deviation.scores(), deviation.fresh, check + 1
        context = SelectionContext(layout.candidates, self.count, scores.cpu(), self.seed)
        return choose(rule, context, self.settings.probes)

    def recompute(self, selection: Selection, keep: int) -> torch.Tensor | None:
        """Run the selected and the fresh rows, and leave the final KV in the sink."""
        rows = torch.cat((self.fresh_rows, selection.positions)).sort().values.to(self.runner.device)
        shift = None
        if self.settings.shift_kind != "off" and len(selection.probes):
            probes = selection.probes.to(rows.device)
            kind, layers = self.settings.shift_kind, len(self.runner.layers)
            shift = ShiftEstimator(self.layout, self.context.tables, rows, probes, kind, layers)
        logits = self._forward(rows, RecomputeSession(self.context, rows, shift, self.kept), keep)
        self.context.sink.finish(self.layout.total)
        return logits

    def spent(self, selected: int) -> float:
        """The honest budget."""
        layers, reusable = len(self.runner.layers), self.layout.reusable_tokens
        if reusable == 0:
            return 0.0
        early = self.deviating_layers * self.layout.candidate_tokens
        return (early + (layers - self.deviating_layers) * selected) / (layers * reusable)


def blend(
    runner: ModelRunner,
    prompt: Prompt,
    source: KVSource,
    sink: KVSink,
    settings: BlendSettings | None = None,
    logits_to_keep: int = 0,
) -> BlendReport:
    """Blend the stored KV of a prompt's segments into ``sink``.

    Every segment without stored KV, the question first of all, is computed fresh and whole; of the stored chunks that
    are not exact, ``settings`` says which tokens are computed again, and each sees every token before it.

    Parameters
    ----------
    runner
        The model.
    prompt
        Its last segment must be the ``query``. When the sink holds tokens already, the prompt continues them.
    source
        Stored KV, one entry per segment.
    sink
        Receives K (rotated) and V of every position of the prompt.
    settings
        Selector, budget and shift; `BlendSettings` defaults to ``head_query`` at 5 %.
    logits_to_keep
        How many of the last rows' logits to return.

    Raises
    ------
    PromptTooLongError, InputError
        For prompts and settings that cannot be blended.
    DamagedChunkError
        From the source, when stored KV turns out to be damaged; the sink is then unfinished and can be used again.
    """
    settings = settings or BlendSettings()
    with torch.inference_mode():
        began = time.perf_counter()
        job = _Blend(runner, prompt, source, sink, settings)
        selection = job.choose()
        chosen = time.perf_counter()
        moved = sum(job.context.seconds.values())
        logits = job.recompute(selection, logits_to_keep)
        ended = time.perf_counter()
    seconds = job.context.seconds
    stages = {
        "score": chosen - began - moved,
        "load": seconds["load"],
        "rotate": seconds["rotate"],
        "recompute": ended - chosen - (sum(seconds.values()) - moved),
    }
    layout = job.layout
    return BlendReport(
        selector=settings.selector,
        shift=settings.shift_kind,
        budget_asked=settings.asked,
        budget_spent=job.spent(len(selection.positions)),
        total_tokens=layout.total,
        reusable_tokens=layout.reusable_tokens,
        exact_tokens=sum(len(s) for s in layout.stored if s.exact),
        fresh_tokens=len(job.fresh_rows),
        recomputed_tokens=len(selection.positions),
        scored_rows=job.scored_rows,
        bytes_loaded=sum(r.nbytes for r in source.readers if r is not None),
        selected=selection.positions,
        stages=stages,
        logits=logits,
    )
