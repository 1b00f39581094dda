"""The attention ops: the reference against sums written out key by key, and every backend against the reference."""

import random

import pytest
import torch
from tiny import seed_of_run

from blendkv.errors import InputError
from blendkv.kernels import AttentionParams, Paged, attention_mass, selected_attention
from blendkv.kernels.testing import attention_case, check_attention, check_deviation, forced

BACKENDS = ("reference", "torch")


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


def naive(q, k, v, positions, params):
    """Weights ``[heads, queries, keys]`` and output, in float64, one query at a time."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    weights = torch.zeros(q.shape[1], q.shape[0], k.shape[0], dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        for head in range(q.shape[1]):
            scores = k[:, head // group] @ q[row, head] * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            key = torch.arange(k.shape[0])
            seen = key <= position
            if params.window is not None:
                seen &= key > position - params.window
            top = scores[seen]
            extra = torch.tensor([float(params.sinks[head])] if params.sinks is not None else [], dtype=torch.float64)
            p = torch.cat((top, extra)).softmax(0)[: len(top)]
            weights[head, row, seen] = p
            out[row, head] = p @ v[seen, head // group]
    return out, weights


SHAPES = [(1, 1), (1, 40), (31, 31), (63, 200), (130, 400)]
EXTRAS = [
    {},
    {"window": 7},
    {"window": 1},
    {"softcap": 5.0},
    {"sinks": True},
    {"window": 50, "softcap": 3.0, "sinks": True},
    {"v_dim": 24, "head_dim": 20, "kv_heads": 1, "group": 4},
    {"head_dim": 80, "kv_heads": 3, "group": 1},
    {"magnitude": 1e-3},
    {"magnitude": 30.0},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_the_reference_is_the_equation(rng, queries, keys, extra):
    case = attention_case(rng, queries, keys, dtype=torch.float64, **extra)
    expected, weights = naive(case.q, case.k, case.v, case.positions, case.params)
    with forced("reference"):
        got = selected_attention(case.q, case.k, case.v, case.positions, case.params, want_lse=True)
        most = attention_mass(case.q, case.k, case.positions, case.params, got.lse, "max")
        mean = attention_mass(case.q, case.k, case.positions, case.params, got.lse, "mean")
    assert (got.out - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert (most - weights.amax((0, 1))).abs().max() < 1e-12
    assert (mean - weights.mean((0, 1))).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_backends(rng, extra, backend, dtype):
    for queries, keys in ((0, 5), *SHAPES):
        case = attention_case(rng, queries, keys, dtype=dtype, **extra)
        for paged in (False, True):
            for name, error in check_attention(backend, case, paged=paged).items():
                assert not error.red, f"{name} of {queries} x {keys}, paged {paged}: {error}"
        for name, error in check_deviation(backend, case).items():
            assert not error.red, f"deviation of {name}: {error}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_after_a_query_are_never_read(rng, backend):
    """NaN behind the last position must not reach the output: the mask is by position, not bottom-right."""
    case = attention_case(rng, 10, 60)
    positions = torch.arange(5, 15)
    k, v = case.k.clone(), case.v.clone()
    expected, _ = naive(case.q, k, v, positions, case.params)
    k[15:], v[15:] = 1e30, 1e30
    with forced(backend):
        assert (selected_attention(case.q, k, v, positions, case.params).out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_may_see_no_key(rng, backend):
    """Beyond the last key, with a window that does not reach it: zeros, and a log-sum-exp of minus infinity."""
    case = attention_case(rng, 3, 10)
    params = AttentionParams(case.params.scale, window=4)
    positions = torch.tensor([2, 12, 40])
    with forced(backend):
        got = selected_attention(case.q, case.k, case.v, positions, params, want_lse=True)
        mass = attention_mass(case.q, case.k, positions, params, got.lse, "max")
    assert got.out[2].abs().max() == 0
    assert got.lse[2].eq(float("-inf")).all()
    assert got.out[1].abs().max() > 0
    assert mass.isfinite().all()
    assert mass[3:9].abs().max() == 0


WRONG = [
    ("heads", "q is of 5 heads; allowed: a multiple of the 2 KV heads"),
    ("dtype", "k is torch.bfloat16; allowed: torch.float32"),
    ("positions", "positions is torch.int32; allowed: torch.int64"),
    ("v", "v is of shape [9, 2, 64]; allowed: [10, 2, *]"),
    ("window", "params.window is 0; allowed: 1 or more"),
    ("softcap", "params.softcap is -1.0; allowed: a positive number"),
    ("sinks", "params.sinks is of shape [3]; allowed: [6]"),
    ("stored", "stored[0] is of shape [9, 2, 64]; allowed: [10, 2, 64]"),
    ("paged", "v is given beside paged keys; allowed: None"),
    ("tokens", "paged.tokens is 99; allowed: 0 to 1 blocks of 16 tokens"),
]


@pytest.mark.parametrize(("what", "message"), WRONG)
def test_wrong_arguments_are_named(rng, what, message):
    case = attention_case(rng, 3, 10)
    q, k, v, positions, params, stored = case.q, case.k, case.v, case.positions, case.params, case.stored
    if what == "heads":
        q = q[:, :5]
    elif what == "dtype":
        k = k.bfloat16()
    elif what == "positions":
        positions = positions.int()
    elif what == "v":
        v = v[:9]
    elif what == "window":
        params = AttentionParams(1.0, window=0)
    elif what == "softcap":
        params = AttentionParams(1.0, softcap=-1.0)
    elif what == "sinks":
        params = AttentionParams(1.0, sinks=torch.zeros(3))
    elif what == "stored":
        stored = (stored[0][:9], stored[1])
    elif what == "paged":
        k, stored = case.paged, None
    elif what == "tokens":
        k, v, stored = Paged(case.paged.k, case.paged.v, case.paged.table, 99), None, None
    with pytest.raises(InputError) as caught:
        selected_attention(q, k, v, positions, params, stored=stored)
    assert str(caught.value) == message
