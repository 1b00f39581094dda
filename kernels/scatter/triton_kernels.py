"""The Triton kernel of `blendkv.kernels.scatter.triton`, which says how it divides the work."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pairs(
    DIM: tl.constexpr, ROTATED: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr
) -> tl.tuple:
    """Dims of the first and of the second member of every pair, and whether there are such.

    The rotated pairs come first, then halves of what is not rotated. Where all or nothing is rotated, no choice between
    the two hides from the compiler that the dims lie in a row.
    """
    pair = tl.arange(0, HALF)
    REST: tl.constexpr = (DIM - ROTATED + 1) // 2
    if ROTATED == 0:
        return pair, pair + REST, pair < REST, pair + REST < DIM
    elif ROTATED == DIM and not INTERLEAVED:
        return pair, pair + DIM // 2, pair < DIM // 2, pair < DIM // 2
    else:
        first, second = OFFSET + pair, OFFSET + ROTATED // 2 + pair
        if INTERLEAVED:
            first, second = OFFSET + 2 * pair, OFFSET + 2 * pair + 1
        rest = pair - ROTATED // 2
        far = rest + REST
        turns = rest < 0
        first = tl.where(turns, first, tl.where(rest < OFFSET, rest, rest + ROTATED))
        second = tl.where(turns, second, tl.where(far < OFFSET, far, far + ROTATED))
        return first, second, rest < REST, turns | (far < DIM - ROTATED)


@triton.jit
def e4m3(octet: tl.tensor) -> tl.tensor:
    """Values of float8_e4m3fn: float16 with 7 exponents less below it, and NaN where all bits are set."""
    bits = octet & 127
    size = (bits.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    size = tl.where(bits == 127, float("nan"), size)
    return tl.where(octet > 127, -size, size)


@triton.jit
def parity(x: tl.tensor) -> tl.tensor:
    """Whether an odd number of the lowest 16 bits is set."""
    x = x ^ (x >> 8)
    x = x ^ (x >> 4)
    x = x ^ (x >> 2)
    return (x ^ (x >> 1)) & 1


@triton.jit
def signs_of(row: tl.tensor, column: tl.tensor, live: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Some rows and columns of a block-diagonal of Hadamard matrices in Sylvester's order: 1, -1, and 0 elsewhere."""
    odd = parity(row[:, None] & column[None, :] & (WIDTH - 1))
    same = (row // WIDTH)[:, None] == (column // WIDTH)[None, :]
    return tl.where(same & live[None, :], 1 - 2 * odd, 0).to(tl.float16)


@triton.jit
def turned(
    data: tl.tensor,
    codebook: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    stride: tl.tensor,
    columns: tl.tuple,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    HADAMARD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tl.tuple:
    """Codebook values times the Hadamard matrix, for the first and the second members of the pairs.

    The dims are taken in parts, so that the matrix fits shared memory. A value is the sum of two float16 numbers to
    within float32's rounding, since those of a codebook for normal values are neither very large nor very small.
    """
    first, second, first_live, second_live = columns
    PART: tl.constexpr = min(64, 2 * HALF)
    a = tl.zeros([BLOCK_T, HALF], tl.float32)
    b = tl.zeros([BLOCK_T, HALF], tl.float32)
    for start in range(0, DIM, PART):
        dim = start + tl.arange(0, PART)
        bit = dim * BITS
        at = data + rows[:, None] + ((bit // 8) * stride)[None, :]
        mask = live[:, None] & (dim < DIM)[None, :]
        word = tl.load(at, mask=mask, other=0).to(tl.int32)
        if BITS == 3:  # an index may begin in one byte and end in the next
            over = mask & ((bit % 8) > 5)[None, :]
            word = word | (tl.load(at + stride, mask=over, other=0).to(tl.int32) << 8)
        index = (word >> (bit % 8)[None, :]) & ((1 << BITS) - 1)
        value = tl.load(codebook + index, mask=mask, other=0.0).to(tl.float32)
        high = value.to(tl.float16)
        low = (value - high.to(tl.float32)).to(tl.float16)
        matrix = signs_of(dim, first, first_live, HADAMARD)
        a = tl.dot(low, matrix, tl.dot(high, matrix, a))
        matrix = signs_of(dim, second, second_live, HADAMARD)
        b = tl.dot(low, matrix, tl.dot(high, matrix, b))
    return a, b


@triton.jit
def read(
    data: tl.tensor, rows: tl.tensor, live: tl.tensor, stride: tl.tensor, column: tl.tensor, there: tl.tensor
) -> tl.tensor:
    """A tile of some columns of some rows."""
    return tl.load(data + rows[:, None] + (column * stride)[None, :], mask=live[:, None] & there[None, :], other=0)


@triton.jit
def cos_sin(
    cos: tl.tensor,
    sin: tl.tensor,
    token: tl.tensor,
    live: tl.tensor,
    column: tl.tensor,
    cos_strides: tl.tuple,
    sin_strides: tl.tuple,
    ROTATED: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tl.tuple:
    """The tables' values for some dims, 1 and 0 where nothing is rotated."""
    dim = column - OFFSET
    mask = live[:, None] & ((dim >= 0) & (dim < ROTATED))[None, :]
    at = cos + (token * cos_strides[0])[:, None] + (dim * cos_strides[1])[None, :]
    cosine = tl.load(at, mask=mask, other=1.0)
    at = sin + (token * sin_strides[0])[:, None] + (dim * sin_strides[1])[None, :]
    return cosine, tl.load(at, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["run", "tokens", "groups", "places"])
def scatter(
    data: tl.tensor,
    scale: tl.tensor,
    signs: tl.tensor,
    codebook: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    bias: tl.tensor,
    slope: tl.tensor,
    along: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    strides: tl.tuple,
    scale_strides: tl.tuple,
    cos_strides: tl.tuple,
    sin_strides: tl.tuple,
    out_strides: tl.tuple,
    run: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    places: tl.tensor,
    CODEC: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROTATED: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BIASED: tl.constexpr,
    TREND: tl.constexpr,
    LISTED: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """``BLOCK_T`` tokens of every ``groups``-th head."""
    token = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = run + token
    if LISTED:
        slot = tl.load(slots + token, mask=token < tokens, other=-1)
    # A slot beyond the output, which no one checks on a GPU, would write into other memory.
    live = (token < tokens) & (slot >= 0) & (slot < places)
    target = slot * out_strides[1] if PAGE == 0 else slot // PAGE * out_strides[0] + slot % PAGE * out_strides[1]

    first, second, first_live, second_live = pairs(DIM, ROTATED, OFFSET, INTERLEAVED, HALF)
    columns = (first, second, first_live, second_live)
    if ROTATED > 0 and CODEC != "turbo":
        cos_a, sin_a = cos_sin(cos, sin, token, live, first, cos_strides, sin_strides, ROTATED, OFFSET)
        cos_b, sin_b = cos_sin(cos, sin, token, live, second, cos_strides, sin_strides, ROTATED, OFFSET)
    for index in range(tl.program_id(0) % groups, heads, groups):
        head = tl.cast(index, tl.int64)
        rows = token * strides[0] + head * strides[1]
        if CODEC == "turbo":
            a, b = turned(data, codebook, rows, live, strides[2], columns, BITS, DIM, HADAMARD, HALF, BLOCK_T)
            scales = token * scale_strides[0] + head * scale_strides[1]
            a *= read(scale, scales, live, scale_strides[2], first // HADAMARD, first_live) * HADAMARD**-0.5
            b *= read(scale, scales, live, scale_strides[2], second // HADAMARD, second_live) * HADAMARD**-0.5
            a *= tl.load(signs + first, mask=first_live, other=1.0)[None, :]
            b *= tl.load(signs + second, mask=second_live, other=1.0)[None, :]
        else:
            a = read(data, rows, live, strides[2], first, first_live)
            b = read(data, rows, live, strides[2], second, second_live)
            if CODEC == "fp8":
                a, b = e4m3(a), e4m3(b)
            a, b = a.to(tl.float32), b.to(tl.float32)
            if CODEC != "raw":
                factor = tl.load(scale + token * scale_strides[0] + head * scale_strides[1], mask=live, other=0.0)
                a, b = a * factor[:, None], b * factor[:, None]
        if BIASED:
            own = bias + head * DIM
            a += tl.load(own + first, mask=first_live, other=0.0)[None, :]
            b += tl.load(own + second, mask=second_live, other=0.0)[None, :]
        if TREND:
            place = tl.load(along + token, mask=live, other=0.0)[:, None]
            own = slope + head * DIM
            a += place * tl.load(own + first, mask=first_live, other=0.0)[None, :]
            b += place * tl.load(own + second, mask=second_live, other=0.0)[None, :]
        if ROTATED > 0:
            if CODEC == "turbo":  # beside the Hadamard products there are no registers to keep them in
                cos_a, sin_a = cos_sin(cos, sin, token, live, first, cos_strides, sin_strides, ROTATED, OFFSET)
                cos_b, sin_b = cos_sin(cos, sin, token, live, second, cos_strides, sin_strides, ROTATED, OFFSET)
            a, b = a * cos_a + b * sin_a, b * cos_b + a * sin_b
        at = out + (target + head * out_strides[2])[:, None]
        tl.store(at + (first * out_strides[3])[None, :], a, mask=live[:, None] & first_live[None, :])
        tl.store(at + (second * out_strides[3])[None, :], b, mask=live[:, None] & second_live[None, :])
