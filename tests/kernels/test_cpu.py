"""The C++ kernels: every instruction set that this machine has, against the reference in float64."""

import math
import random
from dataclasses import replace

import pytest
import torch
from tiny import seed_of_run

from blendkv.kernels import (
    AttentionParams,
    Encoded,
    Move,
    attention_mass,
    build,
    kv_deviation,
    rope_shift_scatter,
    rope_table,
)
from blendkv.kernels import selected_attention as attend
from blendkv.kernels.attention import cpu as attention_cpu
from blendkv.kernels.attention import reference
from blendkv.kernels.scatter import cpu as scatter_cpu
from blendkv.kernels.testing import (
    attention_case,
    check_attention,
    check_deviation,
    check_scatter,
    error,
    forced,
    scatter_case,
)  # fmt: skip

# Without a compiler there is nothing to test; sources that a compiler refuses are a failure.
pytestmark = pytest.mark.skipif((build.why_not("cpu") or "").startswith("no compiler"), reason="no C++ compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 5), (1, 1), (1, 300), (31, 31), (63, 200), (130, 400)]
FEATURES = [
    {},
    {"window": 7},
    {"window": 1},
    {"softcap": 5.0},
    {"sinks": True},
    {"window": 50, "softcap": 3.0, "sinks": True},
    {"magnitude": 1e-3},
    {"magnitude": 30.0},
    {"block": 5},
]
HEADS = [(64, None), (128, None), (80, 96), (96, 80), (256, None), (20, 12), (8, None), (7, 9)]


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(params=list(build.INSTRUCTION_SETS), autouse=True)
def isa(request):
    library, best = build.library("cpu"), build.isa()
    if library.blendkv_cpu_select(request.param.encode()):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    library.blendkv_cpu_select(best.encode())


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def green(found, *context):
    for name, each in found.items():
        assert not each.red, (name, each, *context)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_mass(rng, dtype):
    for features in FEATURES:
        for queries, keys in rng.sample(SHAPES, 3):
            group, heads = rng.choice((1, 2, 3, 4, 5, 8)), rng.choice((1, 2))
            case = attention_case(rng, queries, keys, dtype=dtype, group=group, kv_heads=heads, **features)
            for paged in (False, True):
                green(check_attention("cpu", case, paged=paged), queries, keys, features, group, paged)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "v_dim"), HEADS)
def test_head_dims(rng, dtype, head_dim, v_dim):
    queries, keys = rng.randint(1, 90), rng.randint(90, 260)
    case = attention_case(rng, queries, keys, dtype=dtype, head_dim=head_dim, v_dim=v_dim, group=rng.choice((1, 3, 4)))
    for paged in (False, True):
        green(check_attention("cpu", case, paged=paged), queries, keys, paged)
    green(check_deviation("cpu", case))


def test_many_keys(rng):
    case = attention_case(rng, 100, 1000, dtype=torch.bfloat16)
    green(check_attention("cpu", case))


@pytest.mark.parametrize("queries", [1, 40, 170])
def test_threads_and_keys_in_parts(rng, threads, queries):
    """One query makes the kernel split the keys; many make it split the queries."""
    for features in ({"sinks": True, "softcap": 5.0}, {"window": 900}):
        case = attention_case(rng, queries, 2000, head_dim=128, kv_heads=3, group=2, **features)
        green(check_attention("cpu", case, paged=False), features)
        green(check_attention("cpu", case, paged=True), features)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_beyond_the_keys(dtype):
    """They see all keys within their window, and those whose window holds no key see nothing."""
    q, k, v = torch.randn(5, 4, 16).to(dtype), torch.randn(70, 2, 16).to(dtype), torch.randn(70, 2, 16).to(dtype)
    positions = torch.tensor([3, 69, 75, 80, 500])
    for window, sinks in ((None, None), (10, None), (10, torch.randn(4))):
        params = AttentionParams(0.25, window, None, sinks)
        with forced("cpu"):
            ours = attend(q, k, v, positions, params, want_lse=True)
            mass = attention_mass(q, k, positions, params, ours.lse, "max")
        wide = None if sinks is None else sinks.double()
        exact = reference.run(
            q.double(), k.double(), v.double(), positions, AttentionParams(0.25, window, None, wide),
            want_lse=True, stored=None,
        )  # fmt: skip
        assert not error(ours.out, exact.out.to(dtype), exact.out, dtype).red
        assert not error(ours.lse, None, exact.lse, dtype, least=1.0).red
        assert mass.isfinite().all()
        if window:
            assert (mass[[*range(4, 60)]] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_after_the_last_query_are_never_read(rng, dtype):
    case = attention_case(rng, 10, 40, dtype=dtype)
    nan = torch.full((33, 2, 64), float("nan"), dtype=dtype)
    k, v = torch.cat((case.k, nan)), torch.cat((case.v, nan))
    with forced("cpu"):
        wanted = attend(case.q, case.k, case.v, case.positions, case.params, want_lse=True)
        got = attend(case.q, k, v, case.positions, case.params, want_lse=True)
        mass = attention_mass(case.q, k, case.positions, case.params, got.lse, "max")
    assert torch.equal(got.out, wanted.out)
    assert torch.equal(got.lse, wanted.lse)
    assert mass[:40].isfinite().all()
    assert (mass[40:] == 0).all()


def test_inputs_of_any_strides(rng):
    case = attention_case(rng, 20, 90)
    spread = [torch.stack((t, t + 9), -1)[..., 0] for t in (case.q, case.k, case.v)]
    positions = torch.stack((case.positions, case.positions), 1)[:, 0]
    stored = tuple(torch.stack((t, t), -1)[..., 0] for t in case.stored)
    tokens_first = [t.contiguous() for t in (case.k, case.v)]
    with forced("cpu"):
        wanted = attend(case.q, case.k, case.v, case.positions, case.params, want_lse=True, stored=case.stored)
        for q, k, v, own, kept in (
            (*spread, positions, stored),
            (case.q.transpose(0, 1).contiguous().transpose(0, 1), *tokens_first, case.positions, case.stored),
        ):
            got = attend(q, k, v, own, case.params, want_lse=True, stored=kept)
            assert torch.equal(got.out, wanted.out)
            assert torch.equal(got.lse, wanted.lse)
            assert torch.equal(got.deviation, wanted.deviation)
        a, b = spread[1], stored[0]
        assert torch.equal(kv_deviation(a, b, a, b), kv_deviation(a.contiguous(), b.contiguous(), a, b))


def test_deviation_covers_the_keys_that_no_query_sees(rng, threads):
    case = attention_case(rng, 3, 700, window=5, dtype=torch.bfloat16)
    with forced("cpu"):
        fused = attend(case.q, case.k, case.v, case.positions, case.params, stored=case.stored).deviation
        alone = kv_deviation(case.k, case.stored[0], case.v, case.stored[1])
    assert torch.allclose(fused, alone)


def test_what_it_refuses():
    params, positions = AttentionParams(1.0), torch.arange(2)
    wide, double = torch.randn(2, 1, 257), torch.randn(2, 1, 8, dtype=torch.float64)
    common = {"want_lse": False, "stored": None}
    assert "head dims up to 256, this is 257" in attention_cpu.refuses(wide, wide, wide, positions, params, **common)
    assert "float64" in attention_cpu.refuses(double, double, double, positions, params, **common)
    single = double.float()
    negative = attention_cpu.refuses(single, single, single, positions, AttentionParams(-1.0), **common)
    assert "a positive params.scale, this is -1.0" in negative
    strided = torch.zeros(2, 1, 8, 2)[..., 0]
    assert "k_out do not" in scatter_cpu.refuses([Move(single, single, None, 0)], strided, single)


# ---- rope_shift_scatter ----


@pytest.mark.parametrize("codec", ["raw", "fp8", "int8", "turbo4", "turbo3", "turbo2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter(rng, dtype, codec):
    for dim in rng.sample((64, 128, 96, 80, 24, 8, 256), 3):
        for pairing, rotated, offset in (
            ("half", None, 0), ("interleaved", None, 0), (None, None, 0),
            ("half", dim // 2, 0), ("interleaved", dim // 4 * 2, dim // 4), ("half", 6, 1),
        ):  # fmt: skip
            tokens, bias = rng.choice((0, 1, 17, 70)), rng.choice(("none", "span", "trend"))
            how = {"paged": rng.random() < 0.5, "run": rng.random() < 0.5, "v_dim": rng.choice((None, 64, 40))}
            case = scatter_case(
                rng, tokens, head_dim=dim, dtype=dtype, codec=codec, pairing=pairing, rotated=rotated, offset=offset,
                bias=bias, **how,
            )  # fmt: skip
            green(check_scatter("cpu", case), dim, pairing, rotated, offset, tokens, bias, how)


def test_scatter_in_threads(rng, threads):
    for codec in ("raw", "turbo4"):
        case = scatter_case(rng, 3000, head_dim=128, heads=2, codec=codec, dtype=torch.bfloat16, paged=True)
        with forced("torch"):
            wanted = [torch.empty_like(t).copy_(t) for t in (case.k_out, case.v_out)]
            rope_shift_scatter(case.k, case.v, case.table, *wanted, case.slots)
        with forced("cpu"):
            rope_shift_scatter(case.k, case.v, case.table, case.k_out, case.v_out, case.slots)
        for ours, theirs in zip((case.k_out, case.v_out), wanted, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert (ours.nan_to_num().float() - theirs.nan_to_num().float()).abs().max() < 0.04


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_past_the_caches(rng, dtype, by_head):
    """Outputs of 4 MB and more, written in whole lines: chunks that begin and end within one, rows that share one."""
    forms = ((64, 128, "raw"), (80, 96, "int8"), (20, 9, "raw"), (96, 33, "raw"), (64, 64, "turbo4"))
    for dim, v_dim, codec in rng.sample(forms, 3):
        heads, tokens, bias = 3, rng.choice((1, 7, 70)), rng.choice(("none", "span", "trend"))
        case = scatter_case(
            rng, tokens, head_dim=dim, v_dim=v_dim, heads=heads, dtype=dtype, codec=codec, bias=bias, run=True
        )
        places, slot = (4 << 20) // (heads * min(dim, v_dim) * dtype.itemsize), rng.randrange(1, 1000)
        forms = [(heads, places, width) if by_head else (places, heads, width) for width in (dim, v_dim)]
        outs = [torch.full(form, math.nan, dtype=dtype) for form in forms]
        k_out, v_out = (out.transpose(0, 1) for out in outs) if by_head else outs
        case = replace(case, k_out=k_out, v_out=v_out, slots=slot)
        green(check_scatter("cpu", case), dim, v_dim, codec, tokens, bias, slot)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("out", DTYPES)
def test_scatter_between_dtypes(source, out):
    """K is rotated, V is rounded exactly as torch rounds it."""
    k, v = torch.randn(9, 2, 20).to(source), (torch.randn(9, 2, 33) * 100).to(source)
    angle = torch.rand(9, 10)
    table = rope_table(angle.cos(), angle.sin(), "half")
    outs = {}
    for name in ("cpu", "torch"):
        outs[name] = [torch.zeros(9, 2, t.shape[-1], dtype=out) for t in (k, v)]
        with forced(name):
            rope_shift_scatter(k, v, table, *outs[name], 0)
    assert torch.allclose(outs["cpu"][0].float(), outs["torch"][0].float(), atol=0.02)
    assert torch.equal(outs["cpu"][1], outs["torch"][1])


def test_every_code_and_every_rounding(isa):
    """All values of 16 and 8 bits, and float32 around every rounding boundary, against torch's conversions."""

    def move(source, out):
        with forced("cpu"):
            rope_shift_scatter(source, source, None, out, out.clone(), 0)
        return out

    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = bits.view(dtype).view(1, 256, 256)
        got = move(values, torch.zeros(1, 256, 256))
        assert torch.equal(got.nan_to_num(7.0), values.float().nan_to_num(7.0))
        steps = values.float().view(torch.int32)
        for nudge in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x18000):
            near = (steps + nudge).view(torch.float32)
            ours, theirs = move(near, torch.zeros(1, 256, 256, dtype=dtype)), near.to(dtype)
            if isa == "avx512bf16" and dtype == torch.bfloat16:  # the instruction takes subnormal numbers for zero
                theirs = torch.where(near.abs() < 2.0**-126, torch.zeros_like(theirs), theirs)
                ours = torch.where(near.abs() < 2.0**-126, torch.zeros_like(ours), ours)
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)), (dtype, nudge)
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).view(1, 1, 256)
    scale = torch.full((1, 1, 1), 1.5)
    got = move(Encoded("fp8", codes, scale, 256), torch.zeros(1, 1, 256))
    assert torch.equal(got.nan_to_num(7.0), (codes.float() * 1.5).nan_to_num(7.0))


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_row_may_be_rotated_in_its_place(pairing):
    k = torch.randn(5, 3, 44)
    angle = torch.rand(5, 21)
    table = rope_table(angle.cos(), angle.sin(), pairing, 1)
    wanted = torch.zeros_like(k)
    with forced("torch"):
        rope_shift_scatter(k, k, table, wanted, torch.zeros_like(k), 0)
    with forced("cpu"):
        rope_shift_scatter(k, k.clone(), table, k, torch.zeros_like(k), 0)
    assert torch.allclose(k, wanted, atol=1e-5)
