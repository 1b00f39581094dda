"""Tensor operations of the blend. Kernels know tensors only: no models, no prompts, no stores."""

from blendkv.kernels.attention import AttentionParams, scored_attention, selected_attention
from blendkv.kernels.budget import topk_by_budget
from blendkv.kernels.deviation import kv_deviation
from blendkv.kernels.rotation import RopeTable, rope_table, rotate, unrotate

__all__ = [
    "AttentionParams",
    "RopeTable",
    "kv_deviation",
    "rope_table",
    "rotate",
    "scored_attention",
    "selected_attention",
    "topk_by_budget",
    "unrotate",
]
