"""Tiles of position-sorted queries, and the products over them, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from blendkv.kernels.types import AttentionParams

FUSED = 128
"""Queries per tile of a fused kernel."""
PRODUCT_ROWS = 96
"""Rows (queries x query heads per KV head) per thread and matrix product: its scores stay in the core's cache."""


@dataclass(frozen=True)
class Tile:
    """Rows of the query and the keys ``low .. high - 1`` that they may see; those from ``masked`` on, not all may.

    ``hidden`` is bool ``[queries, high - masked]``, true where a query does not see a key; None where all see all.
    """

    rows: slice
    low: int
    high: int
    masked: int
    hidden: torch.Tensor | None


def split(positions: torch.Tensor, keys: int, window: int | None, size: int) -> Iterator[Tile]:
    """Tiles of at most ``size`` queries."""
    bounds = positions.tolist()
    for start in range(0, len(bounds), size):
        rows = slice(start, min(start + size, len(bounds)))
        first, high = bounds[rows.start], min(bounds[rows.stop - 1] + 1, keys)
        low = 0 if window is None else min(max(0, first - window + 1), high)
        # Without a window every query sees all keys up to the first one's position.
        masked = low if window is not None else min(first + 1, high)
        yield Tile(rows, low, high, masked, hidden(positions[rows], masked, high, window))


def split_products(
    positions: torch.Tensor, q: torch.Tensor, keys: int, group: int, window: int | None
) -> Iterator[Tile]:
    """Tiles for written-out products of ``group`` query heads at a time."""
    rows = PRODUCT_ROWS * torch.get_num_threads() if q.device.type == "cpu" else FUSED * group
    return split(positions, keys, window, max(1, rows // group))


def hidden(own: torch.Tensor, low: int, high: int, window: int | None) -> torch.Tensor | None:
    """Which of the keys ``low .. high - 1`` the queries at ``own`` do not see; None if there are none."""
    if low == high:
        return None
    key = torch.arange(low, high, device=own.device)
    found = key > own[:, None]
    if window is not None:
        found |= key <= own[:, None] - window
    return found


@cache
def _onednn() -> bool:
    """Whether oneDNN's matrix product is to be had: in float32 it is twice as fast as MKL's on AMD."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b.T``. ``a`` must be contiguous, and ``b`` or ``b.T`` (oneDNN is very slow on other strides)."""
    if a.device.type == "cpu" and a.dtype == torch.float32 and a.numel() and b.numel() and _onednn():
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return a @ b.T


def scores(q: torch.Tensor, k: torch.Tensor, tile: Tile, params: AttentionParams) -> torch.Tensor:
    """Masked scores ``[queries x group, keys]``; ``q`` ``[queries, group, dim]``, one head's ``k`` ``[keys, dim]``."""
    queries, group, dim = q.shape
    found = product((q * params.scale).reshape(queries * group, dim), k)
    if params.softcap is not None:
        found.div_(params.softcap).tanh_().mul_(params.softcap)
    if tile.hidden is not None:
        unsure = found.view(queries, group, -1)[..., tile.masked - tile.low :]
        unsure.masked_fill_(tile.hidden[:, None], float("-inf"))
    return found
