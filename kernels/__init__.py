"""Tensor operations of the blend. Kernels know tensors only: no models, no prompts, no stores.

An op is called from here; `blendkv.kernels.dispatch` picks the backend that computes it (docs/kernels.md).
"""

from blendkv.kernels.budget import topk_by_budget
from blendkv.kernels.encoding import decode_vectors, encode_vectors
from blendkv.kernels.ops import (
    attention_mass,
    chunk_prefill,
    kv_deviation,
    rope_shift_scatter,
    rope_shift_scatter_all,
    selected_attention,
)
from blendkv.kernels.rotation import RopeTable, rope_table, rotate, unrotate
from blendkv.kernels.types import AttentionOutput, AttentionParams, Encoded, Move, Paged, Statistic, Stored, Trend

__all__ = [
    "AttentionOutput",
    "AttentionParams",
    "Encoded",
    "Move",
    "Paged",
    "RopeTable",
    "Statistic",
    "Stored",
    "Trend",
    "attention_mass",
    "chunk_prefill",
    "decode_vectors",
    "encode_vectors",
    "kv_deviation",
    "rope_shift_scatter",
    "rope_shift_scatter_all",
    "rope_table",
    "rotate",
    "selected_attention",
    "topk_by_budget",
    "unrotate",
]
