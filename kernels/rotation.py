"""RoPE at arbitrary positions, forward and back, with the model's own cos and sin (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True)
class RopeTable:
    """cos and sin of a run of positions, spread over the rotated dims.

    ``cos`` and ``sin`` have shape ``[positions, 1, dims]`` in float32; ``sin`` carries the sign of each pair's
    partner, so that a rotation is ``x * cos + partner(x) * sin``. ``magnitude2`` (``[positions, 1, dims]``) is the
    squared magnitude that YaRN and LongRoPE fold into cos and sin (1 elsewhere), divided out on the way back.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    magnitude2: torch.Tensor
    pairing: Pairing
    offset: int = 0

    @cached_property
    def packed(self) -> torch.Tensor:
        """The cos and sin of every pair once, side by side: ``[positions, dims]``, the bytes of one of the two tables.

        Of ``half`` pairs alone, whose second members' sine has the sign that the pair's has.
        """
        half = self.cos.shape[-1] // 2
        return torch.cat((self.cos[:, 0, half:], self.sin[:, 0, half:]), -1)

    def rows(self, index: torch.Tensor | slice) -> RopeTable:
        """The table of some of the positions."""
        return RopeTable(self.cos[index], self.sin[index], self.magnitude2[index], self.pairing, self.offset)


def rope_table(cos: torch.Tensor, sin: torch.Tensor, pairing: Pairing, offset: int = 0) -> RopeTable:
    """Spread per-pair cos and sin, each ``[positions, dims / 2]``, over the dims that they rotate.

    ``pairing`` says which dims form a pair: ``half`` joins i with i + dims/2 (GPT-NeoX, Llama), ``interleaved``
    joins 2i with 2i + 1 (GPT-J, Cohere, GLM). ``offset`` is the first rotated dim of a head.
    """
    cos, sin = cos.float(), sin.float()
    if pairing == "half":
        full_cos, full_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    else:
        full_cos = cos.repeat_interleave(2, -1)
        full_sin = torch.stack((-sin, sin), -1).flatten(-2)
    return RopeTable(
        full_cos.unsqueeze(1), full_sin.unsqueeze(1), (full_cos.square() + full_sin.square()).unsqueeze(1),
        pairing, offset,
    )  # fmt: skip


def _partner(x: torch.Tensor, pairing: Pairing) -> torch.Tensor:
    """The other member of each pair, in place of each element."""
    if pairing == "half":
        return x.roll(x.shape[-1] // 2, -1)
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, table: RopeTable) -> None:
    dims = cos.shape[-1]
    part = x[..., table.offset : table.offset + dims]
    partner = _partner(part, table.pairing)
    part.mul_(cos).addcmul_(partner, sin)


def rotate(
    x: torch.Tensor, table: RopeTable | None, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotate ``x + bias`` to the table's positions.

    Parameters
    ----------
    x
        ``[tokens, heads, head_dim]``, any float dtype; not changed.
    table
        The table of the tokens' positions; None for a layer without RoPE.
    bias
        ``[heads, head_dim]`` or ``[tokens, heads, head_dim]`` float32, added before the rotation (the shift).
    out
        Where to write, shape of ``x``, any float dtype and strides; a new tensor of ``x``'s dtype by default.

    Returns
    -------
    torch.Tensor
        ``out``. The arithmetic is float32.
    """
    out = torch.empty_like(x) if out is None else out
    if table is None and bias is None:
        return out.copy_(x)
    work = x.float() if x.dtype != torch.float32 else x.clone()
    if bias is not None:
        work.add_(bias)
    if table is not None:
        _apply(work, table.cos, table.sin, table)
    return out.copy_(work)


def unrotate(x: torch.Tensor, table: RopeTable | None) -> torch.Tensor:
    """Undo `rotate` for ``x`` ``[tokens, heads, head_dim]``, magnitude divided out; float32 result."""
    work = x.to(torch.float32, copy=True)
    if table is not None:
        _apply(work, table.cos / table.magnitude2, -table.sin / table.magnitude2, table)
    return work
