"""`rope_shift_scatter` and the codecs: every backend against sums written out token by token."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import seed_of_run

from blendkv.errors import InputError
from blendkv.kernels import Move, Trend, backends, codes, rope_shift_scatter, rope_shift_scatter_all
from blendkv.kernels.testing import check_scatter, forced, scatter_case

BACKENDS = ("torch",)
CASES = [
    {},
    {"pairing": "interleaved", "rotated": 16, "offset": 8},
    {"pairing": "half", "rotated": 32, "offset": 32},
    {"pairing": None, "bias": "span"},
    {"bias": "trend", "paged": True},
    {"bias": "span", "run": True},
    {"run": True, "paged": True, "v_dim": 32},
    {"head_dim": 80},
    {"head_dim": 128, "heads": 1},
]
FLAT = torch.zeros(2, 8)
CODECS = ("raw", "fp8", "int8", "turbo4", "turbo3", "turbo2")
ENCODED = {"fp8": 7e-4, "int8": 5e-5, "turbo4": 0.0095, "turbo3": 0.0348, "turbo2": 0.119}
"""Mean squared error over variance of normal values; TurboQuant (arXiv 2504.19874) gives 0.009, 0.0345 and 0.1175."""


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS)
def test_backends(rng, codec, backend, dtype):
    for extra in CASES:
        for tokens in (0, 1, 33):
            case = scatter_case(rng, tokens, dtype=dtype, codec=codec, **extra)
            for part, error in check_scatter(backend, case).items():
                assert not error.red, f"{part} of {tokens} tokens, {extra}: {error}"


@pytest.mark.parametrize(("codec", "allowed"), ENCODED.items())
def test_error_of_the_codecs(rng, codec, allowed):
    torch.manual_seed(rng.randrange(1 << 30))
    x = torch.randn(500, 2, 128) * torch.rand(500, 2, 1).exp()
    off = (codes.decode(codes.encode(x, codec)) - x).square().sum() / x.square().sum()
    assert off < allowed
    assert off > allowed / 2  # not better than the format can be


@given(st.sampled_from(list(ENCODED)), st.sampled_from([8, 64, 80, 96, 128]), st.integers(0, 5), st.booleans())
def test_codecs_take_any_vector(codec, dim, tokens, zero):
    x = torch.randn(tokens, 2, dim) * (0.0 if zero else 1e4)
    back = codes.decode(codes.encode(x, codec))
    assert back.shape == x.shape
    assert back.isfinite().all()
    if zero:
        assert not tokens or back.abs().max() < 1e-30


def test_packing_is_a_bit_string():
    """Three bits: index 5 and then 3 are the bits 101 110 (lowest first): 0b011101."""
    index = torch.tensor([5, 3, 0, 0, 0, 0, 0, 7])
    packed = codes._pack(index, 3)
    assert packed.tolist() == [0b011101, 0, 0b11100000]
    assert codes.unpack(packed, 3).tolist() == index.tolist()


def test_hadamard_is_orthonormal():
    h = codes.hadamard(torch.eye(32, dtype=torch.float64))
    assert torch.allclose(h @ h.T, torch.eye(32, dtype=torch.float64))
    assert torch.allclose(h[1].abs(), torch.full((32,), 32**-0.5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 100}, "slots is 100; allowed: 0 to 0, to hold 10 tokens in 10 places"),
        ({"slots": torch.arange(1, 11)}, "slots is up to 10; allowed: below the output's 10 places"),
        ({"slots": torch.arange(10).int()}, "slots is torch.int32; allowed: torch.int64"),
        ({"v": torch.zeros(9, 2, 8)}, "v is of shape [9, 2, 8]; allowed: [10, 2, 8]"),
        ({"k_bias": torch.zeros(2, 9)}, "k_bias is of shape [2, 9]; allowed: [2, 8]"),
        ({"k_bias": torch.zeros(10, 2, 8)}, "k_bias is of shape [10, 2, 8]; allowed: [2, 8]"),
        ({"v_bias": Trend(FLAT, FLAT, torch.zeros(9))}, "v_bias.along is of shape [9]; allowed: [10]"),
        (
            {"v_bias": Trend(FLAT, FLAT.double(), torch.zeros(10))},
            "v_bias.slope is torch.float64; allowed: torch.float32",
        ),
        ({"k_out": torch.zeros(10, 16)}, "k_out is of 2 dimensions; allowed: 3 (contiguous) or 4 (paged)"),
        ({"v_out": torch.zeros(10, 3, 8)}, "v_out is of shape [10, 3, 8]; allowed: [10, 2, 8]"),
        ({"k": codes.encode(torch.zeros(10, 2, 16), "int8")}, "k.dim is 16; allowed: 8, that of k_out"),
        ({"v_out": torch.zeros(9, 2, 8)}, "v_out is of [9] places; allowed: those of k_out, [10]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = {
        "k": torch.zeros(10, 2, 8), "v": torch.zeros(10, 2, 8), "table": None, "k_out": torch.zeros(10, 2, 8),
        "v_out": torch.zeros(10, 2, 8), "slots": 0, **change,
    }  # fmt: skip
    with pytest.raises(InputError) as caught:
        rope_shift_scatter(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
def test_chunks_moved_at_once_are_those_moved_one_by_one(rng, backend):
    """Sources, shifts and places of every kind side by side."""
    if reason := backends.why_not(backend):
        pytest.skip(reason)
    forms = (
        {"codec": "int8", "bias": "trend"},
        {"bias": "span"},
        {"pairing": None},
        {"codec": "turbo3"},
        {"bias": "trend"},
    )
    cases = [scatter_case(rng, rng.choice((1, 9, 33)), run=i % 2 == 0, **form) for i, form in enumerate(forms)]
    wanted, got = ([torch.full((5 * 80, 3, 64), float("nan")) for _ in "kv"] for _ in range(2))
    moves = []
    for i, case in enumerate(cases):
        slots = case.slots + 80 * i
        if isinstance(case.slots, torch.Tensor):
            slots = torch.where(case.slots < 0, -1, slots)
        moves.append(Move(case.k, case.v, case.table, slots, case.k_bias, case.v_bias))
        with forced(backend):
            rope_shift_scatter(case.k, case.v, case.table, *wanted, slots, k_bias=case.k_bias, v_bias=case.v_bias)
    with forced(backend):
        rope_shift_scatter_all(moves, *got)
    for ours, theirs in zip(got, wanted, strict=True):
        assert not theirs.isnan().all()
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_the_chunk_that_is_wrong_is_named():
    fine, out = Move(torch.zeros(3, 2, 8), torch.zeros(3, 2, 8), None, 0), torch.zeros(10, 2, 8)
    with pytest.raises(InputError) as caught:
        rope_shift_scatter_all([fine, fine._replace(slots=8)], out, out.clone())
    assert str(caught.value) == "moves[1]: slots is 8; allowed: 0 to 7, to hold 3 tokens in 10 places"


def test_codecs_refuse_what_they_cannot_take():
    with pytest.raises(InputError, match="packs 8 values at a time, the head dim is 20"):
        codes.encode(torch.zeros(1, 1, 20), "turbo4")
    with pytest.raises(InputError, match="codec 'zip' encodes nothing; allowed: fp8, int8, turbo4"):
        codes.encode(torch.zeros(1, 1, 8), "zip")
