"""The kernels against a float64 reference that is written out key by key."""

import random

import pytest
import torch
from tiny import seed_of_run

from blendkv.kernels import AttentionParams, scored_attention, selected_attention


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


def case(rng, queries, keys, window=None, softcap=None, sinks=False, v_dim=None, dtype=torch.float32):
    torch.manual_seed(rng.randrange(1 << 30))
    kv_heads, group, dim = rng.choice((1, 2, 3)), rng.choice((1, 2, 3)), rng.choice((8, 16, 20))
    q = torch.randn(queries, kv_heads * group, dim, dtype=dtype)
    k = torch.randn(kv_heads, keys, dim, dtype=dtype).transpose(0, 1)  # strided, as a cache holds it
    v = torch.randn(kv_heads, keys, v_dim or dim, dtype=dtype).transpose(0, 1)
    positions = torch.tensor(sorted(rng.sample(range(keys), queries)))
    heads = torch.randn(kv_heads * group) if sinks else None
    return q, k, v, positions, AttentionParams(dim**-0.5, window, softcap, heads)


SHAPES = [(1, 1), (1, 40), (31, 31), (63, 200), (130, 400), (257, 300)]
EXTRAS = [
    {},
    {"window": 7},
    {"window": 1},
    {"softcap": 5.0},
    {"sinks": True},
    {"window": 50, "softcap": 3.0, "sinks": True},
]


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_selected_attention(rng, queries, keys, extra):
    q, k, v, positions, params = case(rng, queries, keys, **extra)
    expected, _ = naive(q, k, v, positions, params)
    assert (selected_attention(q, k, v, positions, params) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_plain_torch(rng, dtype):
    q, k, v, positions, params = case(rng, 100, 300, dtype=dtype)
    expected, _ = naive(q, k, v, positions, params)
    mask = torch.arange(300) <= positions[:, None]
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=mask, scale=params.scale, enable_gqa=True
    )[0].transpose(0, 1)
    ours = (selected_attention(q, k, v, positions, params) - expected).abs().max()
    assert ours <= 2 * (plain - expected).abs().max()


def test_value_dim_may_differ(rng):
    q, k, v, positions, params = case(rng, 5, 30, v_dim=12)
    expected, _ = naive(q, k, v, positions, params)
    assert (selected_attention(q, k, v, positions, params) - expected).abs().max() < 1e-5


def test_keys_after_a_query_are_never_read(rng):
    """NaN behind the last position must not reach the output: the mask is by position, not bottom-right."""
    q, k, v, _, params = case(rng, 10, 60)
    positions = torch.arange(5, 15)
    k, v = k.clone(), v.clone()
    expected, _ = naive(q, k, v, positions, params)
    k[15:], v[15:] = float("nan"), float("nan")
    assert (selected_attention(q, k, v, positions, params) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("statistic", ["max", "mean"])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_scored_attention(rng, queries, keys, extra, statistic):
    q, k, v, positions, params = case(rng, queries, keys, **extra)
    counted = torch.tensor([rng.random() < 0.5 for _ in range(queries)])
    out, mass = scored_attention(q, k, v, positions, params, counted, statistic)
    expected, weights = naive(q, k, v, positions, params)
    assert (out - expected).abs().max() < 1e-5
    chosen = weights[:, counted]
    if chosen.shape[1] == 0:
        wanted = torch.zeros(keys, dtype=torch.float64)
    else:
        wanted = chosen.amax((0, 1)) if statistic == "max" else chosen.mean((0, 1))
    assert (mass - wanted).abs().max() < 1e-6


def test_no_queries():
    q, k = torch.empty(0, 4, 8), torch.randn(10, 2, 8)
    assert selected_attention(q, k, k, torch.empty(0, dtype=torch.int64), AttentionParams(1.0)).shape == (0, 4, 8)
