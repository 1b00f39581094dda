"""`chunk_prefill`: chunks in one pass, by themselves and through flash-attn's interface."""

import random
import sys
import types

import pytest
import torch
from tiny import seed_of_run

from blendkv.errors import InputError
from blendkv.kernels import AttentionParams, backends, chunk_prefill, selected_attention
from blendkv.kernels.testing import forced


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, softcap, window_size):
    """What flash-attn documents: sequences apart, the causal mask aligned at the bottom right."""
    assert causal
    assert cu_q.dtype == cu_k.dtype == torch.int32
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    for i in range(len(cu_q) - 1):
        rows, keys = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        n, s = rows.stop - rows.start, keys.stop - keys.start
        assert n <= max_q
        assert s <= max_k
        at = torch.arange(n)[:, None] + s - n
        seen = torch.arange(s) <= at
        if window_size != (-1, -1):
            left, right = window_size
            seen = (torch.arange(s) >= at - left) & (torch.arange(s) <= at + right)
        group = q.shape[1] // k.shape[1]
        keys_, values = (t[keys].double().repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), keys_) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.fixture
def flash(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(backends, "why_not", lambda name: None)


def world(rng, dtype=torch.float32):
    lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 4))]
    q, k, v = (torch.randn(sum(lengths), h, 16).to(dtype) for h in (6, 2, 2))
    before = tuple(torch.randn(rng.randint(1, 20), 2, 16).to(dtype) for _ in range(1))
    return lengths, q, k, v, (before[0], torch.randn_like(before[0]))


@pytest.mark.parametrize(
    "params", [AttentionParams(0.25), AttentionParams(0.2, window=7), AttentionParams(0.3, None, 4.0)]
)
@pytest.mark.parametrize("prefix", [False, True])
def test_chunks_are_blind_to_each_other(rng, flash, params, prefix):
    """Each is what it is alone behind the prefix, by our own attention and by flash-attn's interface."""
    lengths, q, k, v, before = world(rng, torch.bfloat16)
    past = len(before[0]) if prefix else 0
    with forced("prefill=torch"):
        got = chunk_prefill(q, k, v, lengths, params, before if prefix else None)
    with forced("prefill=flash"):
        other = chunk_prefill(q, k, v, lengths, params, before if prefix else None)
    first = 0
    for n in lengths:
        rows = slice(first, first + n)
        keys, values = (torch.cat((b, t[rows])) if prefix else t[rows] for b, t in zip(before, (k, v), strict=True))
        with forced("reference"):
            alone = selected_attention(q[rows].double(), keys.double(), values.double(), past + torch.arange(n), params)
        assert (got[rows] - alone.out).abs().max() < 0.02
        assert (other[rows] - alone.out).abs().max() < 0.02
        first += n


def test_flash_refuses_what_it_does_not_know(rng, flash):
    lengths, q, k, v, _ = world(rng)
    with forced("prefill=flash"), pytest.raises(InputError, match="takes bfloat16 and float16, not"):
        chunk_prefill(q, k, v, lengths, AttentionParams(0.25))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    with forced("prefill=flash"), pytest.raises(InputError, match="no learned sinks"):
        chunk_prefill(q, k, v, lengths, AttentionParams(0.25, sinks=torch.zeros(6)))
    with forced("prefill=flash"), pytest.raises(InputError, match="one head dim"):
        chunk_prefill(q, k, v[..., :8], lengths, AttentionParams(0.25))


def test_flash_is_not_used_without_its_package(rng):
    lengths, q, k, v, _ = world(rng)
    with forced("prefill=flash"), pytest.raises(InputError, match="flash-attn is not installed"):
        chunk_prefill(q, k, v, lengths, AttentionParams(0.25))


def test_lengths_must_add_up(rng):
    lengths, q, k, v, _ = world(rng)
    with pytest.raises(InputError, match=r"lengths is .*; allowed: numbers of 1 or more that add up to"):
        chunk_prefill(q, k, v, [*lengths, 1], AttentionParams(0.25))
