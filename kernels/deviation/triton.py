"""Squared differences per token on a GPU: a program reads all heads of its tokens, and writes each sum once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blendkv.kernels import jit
from blendkv.kernels.jit import read_rows

ELEMENTS = 4096
"""Values that a program holds at a time of each tensor: 32 registers of 128 threads. Not measured."""


def refuses(
    k_a: torch.Tensor, k_b: torch.Tensor, v_a: torch.Tensor, v_b: torch.Tensor, *, use_k: bool, use_v: bool
) -> str | None:
    """Float64, and tensors that are not on one GPU."""
    return jit.unusable([k_a], [k_b, v_a, v_b])


def run(
    k_a: torch.Tensor, k_b: torch.Tensor, v_a: torch.Tensor, v_b: torch.Tensor, *, use_k: bool, use_v: bool
) -> torch.Tensor:
    """See `blendkv.kernels.kv_deviation`."""
    tokens = k_a.shape[0]
    out = torch.empty(tokens, dtype=torch.float32, device=k_a.device)
    if tokens == 0:
        return out
    block_k, block_v = triton.next_power_of_2(k_a.shape[2]), triton.next_power_of_2(v_a.shape[2])
    block = max(1, min(16, ELEMENTS // max(block_k, block_v)))
    with jit.on(k_a.device):
        deviation[(triton.cdiv(tokens, block),)](
            k_a, k_b, v_a, v_b, out, k_a.stride(), k_b.stride(), v_a.stride(), v_b.stride(),
            tokens, k_a.shape[1], v_a.shape[1],
            K_DIM=k_a.shape[2], V_DIM=v_a.shape[2], BLOCK_K=block_k, BLOCK_V=block_v, BLOCK=block,
            USE_K=use_k, USE_V=use_v,
        )  # fmt: skip
    return out


@triton.jit
def _sum(
    a: tl.tensor,
    b: tl.tensor,
    a_strides: tl.tuple,
    b_strides: tl.tuple,
    token: tl.tensor,
    live: tl.tensor,
    heads: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    found = tl.zeros([BLOCK], tl.float32)
    for head in range(0, heads):
        at = tl.cast(head, tl.int64)
        first = read_rows(a + at * a_strides[1], token * a_strides[0], live, a_strides[2], DIM, BLOCK_D, True)
        second = read_rows(b + at * b_strides[1], token * b_strides[0], live, b_strides[2], DIM, BLOCK_D, True)
        gap = first.to(tl.float32) - second.to(tl.float32)
        found += tl.sum(gap * gap, 1)
    return found


@triton.jit(do_not_specialize=["tokens"])
def deviation(
    k_a: tl.tensor,
    k_b: tl.tensor,
    v_a: tl.tensor,
    v_b: tl.tensor,
    out: tl.tensor,
    ka_strides: tl.tuple,
    kb_strides: tl.tuple,
    va_strides: tl.tuple,
    vb_strides: tl.tuple,
    tokens: tl.tensor,
    k_heads: tl.tensor,
    v_heads: tl.tensor,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_K: tl.constexpr,
    USE_V: tl.constexpr,
) -> None:
    """``BLOCK`` tokens."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    found = tl.zeros([BLOCK], tl.float32)
    if USE_K:
        found += _sum(k_a, k_b, ka_strides, kb_strides, token, live, k_heads, K_DIM, BLOCK_K, BLOCK)
    if USE_V:
        found += _sum(v_a, v_b, va_strides, vb_strides, token, live, v_heads, V_DIM, BLOCK_V, BLOCK)
    tl.store(out + token, found, mask=live)
