"""K and V into a codec's form and out of it; arguments are checked here, then the best backend computes."""

from __future__ import annotations

import torch

from blendkv.kernels import checks, dispatch
from blendkv.kernels.checks import FLOATS, refuse
from blendkv.kernels.ops import rope_shift_scatter
from blendkv.kernels.types import BITS, Codec, Encoded, Stored


def encode_vectors(x: torch.Tensor, codec: Codec, signs: torch.Tensor | None = None) -> Encoded:
    """Encode the vectors of K or V; `rope_shift_scatter` decodes them.

    Every backend on a CPU makes the same bytes, with any instruction set. TurboQuant: arXiv 2504.19874.

    Parameters
    ----------
    x
        ``[tokens, heads, dim]`` of any strides; float64 (which is rounded to float32 first), float32, bfloat16 or
        float16. A vector with a value that is not finite gets codes of zero bits and scales of NaN, and decodes to NaN.
    codec
        ``fp8``, ``int8``, ``turbo4``, ``turbo3`` or ``turbo2``.
    signs
        ``[dim]`` float32 of +1 and -1 for the turbo codecs, on ``x``'s device; None for the others.

    Returns
    -------
    Encoded
        New contiguous tensors on the device of ``x``. A scale is the factor with which the codes fit best: of int8 and
        fp8 by the largest magnitude, of turbo codecs by least squares.

    Raises
    ------
    InputError
        Naming the argument that does not fit.
    """
    checks.shape("x", x, None, None, None)
    checks.dtype("x", x, *FLOATS)
    dim = x.shape[2]
    if codec not in ("fp8", "int8", *BITS):
        raise refuse("codec", repr(codec), ", ".join(("fp8", "int8", *BITS)))
    if dim < 1:
        raise refuse("x", f"of head dim {dim}", "1 or more")
    if codec in BITS:
        if dim % 8:
            raise refuse("x", f"of head dim {dim}", f"a multiple of 8, for {codec}; int8 and fp8 take any")
        if signs is None:
            raise refuse("signs", "missing", f"a tensor, for {codec}")
        checks.shape("signs", signs, dim)
        checks.dtype("signs", signs, torch.float32)
        checks.device("signs", signs, x, "x")
    elif signs is not None:
        raise refuse("signs", "given", f"None, for {codec}")
    found: Encoded = dispatch.run("encode", x.device, x, codec, signs)
    return found


def decode_vectors(k: Stored, v: Stored, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[tokens, heads, dim]`` as values: tensors of ``dtype`` as they are, `Encoded` in new memory.

    Raises
    ------
    InputError
        As `rope_shift_scatter`, which decodes.
    """
    if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
        return k, v
    k_out, v_out = (_room(source, dtype) for source in (k, v))
    rope_shift_scatter(k, v, None, k_out, v_out, 0)
    return k_out, v_out


def _room(source: Stored, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(source, torch.Tensor):
        return torch.empty_like(source, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty(*source.data.shape[:2], source.dim, dtype=dtype, device=source.data.device)
