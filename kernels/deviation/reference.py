"""The sum itself: plain torch is its own reference."""

from blendkv.kernels.deviation.torch import refuses, run

__all__ = ["refuses", "run"]
