"""The mean shift by hand, its shrinkage, and what it does to a blend."""

import random

import pytest
import torch
from tiny import build, seed_of_run
from worlds import World

from blendkv.blend import BlendSettings
from blendkv.blend.layout import lay_out
from blendkv.blend.rotation import RopeTables
from blendkv.blend.shift import ShiftEstimator
from blendkv.engines.torch.runner import TorchRunner
from blendkv.kernels import Trend, rotate


@pytest.fixture(scope="module")
def runner():
    return TorchRunner(build("llama"))


@pytest.fixture
def world(runner):
    seed = seed_of_run()
    print(f"seed {seed}")
    rng = random.Random(seed)
    while True:
        made = World.make(runner, rng, chunks=3)
        if min(len(c.token_ids) for c in made.chunks) >= 12:
            return made


def per_token(shift):
    return shift.per_token() if isinstance(shift, Trend) else shift


def estimate(world, kind, noise, shift_k, shift_v):
    """Feed the estimator fresh rows that are the stored ones plus a known shift and noise."""
    layout = lay_out(world.prompt, world.source().readers)
    tables = RopeTables(world.runner, torch.arange(layout.total))
    span = layout.candidates[0]
    local = torch.arange(4, 12)
    rows = span.start + local
    layer = 2
    stored = {s.index: world.source().layer(layer)[s.index] for s in layout.stored}
    old_k, old_v = stored[span.index]
    table = tables.layer(layer).rows(rows)
    fresh_k = rotate(old_k[local] + shift_k + noise, table)
    estimator = ShiftEstimator(layout, tables, rows, rows, kind, len(world.runner.layers))
    return span.index, estimator, lambda at: estimator.shifts(at, fresh_k, old_v[local] + shift_v, stored)


@pytest.mark.parametrize("kind", ["mean", "js", "eb"])
def test_a_constant_shift_is_found(world, kind):
    shift_k, shift_v = torch.randn(2, 16), torch.randn(2, 16)
    index, _, shifts = estimate(world, kind, torch.zeros(8, 2, 16), shift_k, shift_v)
    found = shifts(2)[index]
    d_k, d_v = found.k, found.v
    assert torch.allclose(d_k, shift_k, atol=1e-4)
    assert torch.allclose(d_v, shift_v, atol=1e-4)
    assert shifts(0) == {}


def test_shrinkage_by_hand(world):
    """n = 8 rows, head 0: differences +-1 in one dim around a mean of 1; s^2 = 1, |d|^2 = 1: keep 1 - 1/7."""
    shift = torch.zeros(2, 16)
    shift[0, 0] = 1.0
    noise = torch.zeros(8, 2, 16)
    noise[:4, 0, 0], noise[4:, 0, 0] = 1.0, -1.0
    index, _, shifts = estimate(world, "js", noise, shift, torch.zeros(2, 16))
    d_k = shifts(2)[index].k
    assert d_k[0, 0] == pytest.approx(1 - 1 / 7, abs=1e-4)
    assert d_k[1].abs().max() < 1e-5


def test_noise_alone_is_shrunk_away(world):
    noise = torch.randn(8, 2, 16)
    noise -= noise.mean(0)
    index, _, shifts = estimate(world, "js", noise, torch.full((2, 16), 1e-3), torch.zeros(2, 16))
    assert shifts(2)[index].k.abs().max() == 0.0


class Several:
    """An estimator over several chunks, fed with known differences of V; K stays as it is."""

    def __init__(self, world, rows_each, kind="eb"):
        self.layout = lay_out(world.prompt, world.source().readers)
        tables = RopeTables(world.runner, torch.arange(self.layout.total))
        self.spans = self.layout.candidates
        rows = torch.cat([torch.arange(s.start + 4, s.start + 4 + rows_each) for s in self.spans])
        self.stored = {s.index: world.source().layer(2)[s.index] for s in self.layout.stored}
        local = torch.arange(4, 4 + rows_each)
        self.old_k = torch.cat([self.stored[s.index][0][local] for s in self.spans])
        self.old_v = torch.cat([self.stored[s.index][1][local] for s in self.spans])
        self.rotated = rotate(self.old_k, tables.layer(2).rows(rows))
        self.estimator = ShiftEstimator(self.layout, tables, rows, rows, kind, len(world.runner.layers))

    def shifts(self, difference):
        found = self.estimator.shifts(2, self.rotated, self.old_v + difference, self.stored)
        return [found[s.index].v for s in self.spans]


def test_chunks_that_agree_share_their_mean(world):
    """Apart by no more than their noise: every chunk gets the mean of all."""
    several = Several(world, 8)
    noise = torch.randn(len(several.spans), 8, 2, 16)
    noise -= noise.mean(1, keepdim=True)
    shift = torch.randn(2, 16)
    found = torch.stack(several.shifts((noise + shift).flatten(0, 1)))
    assert torch.allclose(found, shift.expand_as(found), atol=1e-4)


def test_chunks_that_differ_keep_their_own(world):
    several = Several(world, 8)
    own = torch.randn(len(several.spans), 1, 2, 16)
    found = torch.stack(several.shifts(own.expand(-1, 8, -1, -1).flatten(0, 1)))
    assert torch.allclose(found, own[:, 0], atol=1e-4)


def test_shrinkage_between_chunks_by_hand(world):
    """Two chunks, n = 4, means 1 and 3, differences +-1 around them: noise 1/3, B = 2 - 1/3, keep 5/6 of it."""
    several = Several(world, 4)
    assert len(several.spans) == 2
    difference = torch.zeros(2, 4, 2, 16)
    difference[:, :2, 0, 0], difference[:, 2:, 0, 0] = 1.0, -1.0
    difference[0, :, 0, 0] += 1.0
    difference[1, :, 0, 0] += 3.0
    found = torch.stack(several.shifts(difference.flatten(0, 1)))
    assert found[:, 0, 0].tolist() == pytest.approx([2 - 5 / 6, 2 + 5 / 6], abs=1e-4)
    assert found[:, 1].abs().max() < 1e-5


def test_a_trend_is_found(world):
    """Every chunk moves by a constant of its own and by one slope over log(1 + distance from its head).

    Before the first row and behind the last it stays what it is there.
    """
    several = Several(world, 8, "trend")
    slope, own = torch.randn(2, 16), torch.randn(len(several.spans), 1, 2, 16)
    logs = torch.log1p(torch.arange(4, 12).float())[:, None, None]
    found = several.shifts((own + logs * slope).flatten(0, 1))
    for span, constant, shift in zip(several.spans, own[:, 0], found, strict=True):
        assert isinstance(shift, Trend)  # and not a number for every token
        shift = shift.per_token()
        everywhere = torch.log1p(torch.arange(len(span)).float().clamp(4, 11))[:, None, None]
        assert shift.shape == (len(span), 2, 16)
        assert torch.allclose(shift, constant + everywhere * slope, atol=1e-3)


@pytest.mark.parametrize("kind", ["trend", "eb"])
def test_late_layers_get_half_of_the_shift_of_k(world, kind):
    """What copies looks a token up by its key, which moves less than the mean: `trend` leaves half of the shift."""
    shift_k, shift_v = torch.randn(2, 16), torch.randn(2, 16)
    index, _, shifts = estimate(world, kind, torch.zeros(8, 2, 16), shift_k, shift_v)
    layers = len(world.runner.layers)
    for layer, kept in ((layers // 2 - 1, 1.0), (layers // 2, 0.5)):
        found = shifts(layer)[index]
        found_k, found_v = per_token(found.k), per_token(found.v)
        assert found_k.shape[-2:] == (2, 16)
        kept = kept if kind == "trend" else 1.0
        assert torch.allclose(found_k, (shift_k * kept).expand_as(found_k), atol=1e-3)
        assert torch.allclose(found_v, shift_v.expand_as(found_v), atol=1e-3)


def test_no_trend_where_noise_is_as_large(world):
    """A slope that noise alone would give is shrunk away: what is left is the constant."""
    several = Several(world, 8, "trend")
    noise = torch.randn(len(several.spans), 8, 2, 16)
    noise -= noise.mean(1, keepdim=True)
    x = several.estimator._regressor.view(len(several.spans), 8, 1, 1)
    noise -= x * (x * noise).sum((0, 1)) / x.square().sum()
    faint = 1e-3 * torch.randn(2, 16)
    found = several.shifts((noise + x * faint + 1.0).flatten(0, 1))
    assert all(torch.allclose(shift.per_token(), torch.ones(2, 16), atol=1e-4) for shift in found)


def test_fewer_than_three_rows_say_nothing(world):
    layout = lay_out(world.prompt, world.source().readers)
    span = layout.candidates[0]
    rows = torch.tensor([span.start + 5, span.start + 6])
    tables = RopeTables(world.runner, torch.arange(layout.total))
    estimator = ShiftEstimator(layout, tables, rows, rows, "mean", 4)
    assert estimator.shifts(2, torch.zeros(2, 2, 16), torch.zeros(2, 2, 16), {}) == {}


def test_the_shift_reaches_the_cache(world):
    """With and without it the sink differs, only in unselected tokens of chunks that are not exact."""
    with_shift, without = world.sink(), world.sink()
    report, _ = world.blend(BlendSettings("strided", 0.5, "mean"), sink=with_shift)
    world.blend(BlendSettings("strided", 0.5, "off"), sink=without)
    layout = lay_out(world.prompt, world.source().readers)
    moved = (with_shift.layers[1].keys - without.layers[1].keys)[0].abs().amax((0, 2))[: layout.total]
    touched = torch.zeros(layout.total, dtype=torch.bool)
    touched[layout.positions(candidates=True)] = True
    touched[report.selected] = False
    probed = [s for s in layout.candidates if sum(s.start + 4 <= p < s.stop for p in report.selected.tolist()) >= 3]
    for span in probed:
        inside = touched[span.start : span.stop]
        assert (moved[span.start : span.stop][inside] > 0).all()
    assert (moved[: layout.candidates[0].start] == 0).all()
