"""Chunk by chunk: with ``BLENDKV_KERNELS=reference`` by the reference of `selected_attention`."""

from blendkv.kernels.prefill.torch import refuses, run

__all__ = ["refuses", "run"]
