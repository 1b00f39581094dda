"""`encode_vectors`: the reference's bytes from every backend and every instruction set of this machine."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.kernels import (
    Trend,
    build,
    codes,
    decode_vectors,
    dispatch,
    encode_vectors,
    rope_shift_scatter,
    rope_table,
)
from blendkv.kernels.testing import forced

CODECS = ("fp8", "int8", "turbo4", "turbo3", "turbo2")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NO_COMPILER = (build.why_not("cpu") or "").startswith("no compiler")
SCALES = (1.0, 1e-3, 30.0, 1e-20, 1e20, 1e-30, 1e30, 1e-39, 1e-42)
"""Squares of some leave float32, and some are subnormal numbers."""
SPECIAL = (torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3e38)


@contextmanager
def instructions(name):
    """Whether this CPU has an instruction set, which is used inside."""
    library, best = build.library("cpu"), build.isa()
    try:
        yield not library.blendkv_cpu_select(name.encode())
    finally:
        library.blendkv_cpu_select(best.encode())


def signs(dim, codec, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (dim,), generator=generator).float() * 2 - 1 if codec.startswith("turbo") else None


def by(backend, x, codec):
    with forced(f"encode={backend}"):
        return encode_vectors(x, codec, signs(x.shape[2], codec))


def assert_same(found, wanted, *context):
    assert (found.codec, found.dim) == (wanted.codec, wanted.dim)
    for one, other in ((found.data, wanted.data), (found.scale, wanted.scale)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), context
        assert one.is_contiguous()
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8)), context
    assert torch.equal(found.scale.isnan(), wanted.scale.isnan()), context
    assert torch.equal(found.scale.nan_to_num(0.0), wanted.scale.nan_to_num(0.0)), context


@st.composite
def vectors(draw):
    """K or V ``[tokens, heads, dim]`` of any size that a kernel has a way for, of odd strides and values."""
    dim = draw(st.sampled_from([1, 5, 8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 192, 256, 512, 1024]))
    tokens, heads = draw(st.integers(0, 9)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(tokens, heads, dim, generator=generator)
    x *= torch.tensor(SCALES)[torch.randint(0, len(SCALES), (tokens, heads, 1), generator=generator)]
    for _ in range(draw(st.integers(0, 3)) if tokens else 0):
        place = draw(st.integers(0, tokens - 1)), draw(st.integers(0, heads - 1)), draw(st.integers(0, dim - 1))
        x[place] = draw(st.sampled_from(SPECIAL))
    if draw(st.booleans()) and tokens:
        x[0] = 0.0
    x = x.to(DTYPES[draw(st.sampled_from(list(DTYPES)))])
    layout = draw(st.sampled_from(["contiguous", "heads first", "wide", "strided"]))
    if layout == "heads first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "wide":
        return torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., :dim]
    return x.repeat_interleave(2, -1)[..., ::2] if layout == "strided" else x


@pytest.mark.parametrize("codec", CODECS)
@given(x=vectors())
@settings(max_examples=80)
def test_every_backend_makes_the_reference_s_bytes(codec, x):
    if codec.startswith("turbo") and x.shape[2] % 8:
        x = x[..., :1].expand(*x.shape[:2], 8)
    kept = x.clone()
    wanted = by("reference", x, codec)
    assert_same(by("torch", x, codec), wanted, "torch")
    for name in () if NO_COMPILER else build.INSTRUCTION_SETS:
        with instructions(name) as there:
            if there:
                assert_same(by("cpu", x, codec), wanted, name, tuple(x.shape), x.dtype)
    assert torch.equal(x.nan_to_num(7.0), kept.nan_to_num(7.0))


@pytest.mark.parametrize("codec", CODECS)
def test_values_on_a_bound_go_to_the_same_side(codec):
    """Values that lie between two codes: halves of a step, and sums that are equal in magnitude."""
    steps = torch.arange(-254, 255).float() / 2
    x = torch.zeros(512)
    x[:509] = steps
    x[509:512] = 127.0
    for each in (x.view(1, 2, 256), x.view(4, 2, 64), (x / 127 * 448).view(8, 4, 16)):
        wanted = by("reference", each, codec)
        assert_same(by("torch", each, codec), wanted)
        if not NO_COMPILER:
            assert_same(by("cpu", each, codec), wanted)


@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("codec", CODECS)
def test_threads_and_tiles_leave_no_seam(codec, monkeypatch):
    x = torch.randn(701, 5, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    wanted = by("reference", x, codec)
    monkeypatch.setattr("blendkv.kernels.encode.torch.TILE", 3000)
    assert_same(by("torch", x, codec), wanted)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert_same(by("cpu", x, codec), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_encoded_decodes(codec):
    x = torch.randn(30, 2, 64, generator=torch.Generator().manual_seed(4))
    found = encode_vectors(x, codec, signs(64, codec))
    out = torch.empty(2, 30, 2, 64)
    rope_shift_scatter(found, found, None, out[0], out[1], 0)
    assert torch.allclose(out[0], codes.decode(found), atol=1e-5)
    assert (out[0] - x).square().mean() < 0.13


@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")
def test_what_the_kernel_does_not_take_is_counted_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_calls", dispatch.Counter())
    monkeypatch.setattr(dispatch, "_passed_over", {})
    monkeypatch.delenv(dispatch.FORCE, raising=False)
    wide, very = torch.randn(2, 1, 16, dtype=torch.float64), torch.randn(2, 1, 2048)
    with caplog.at_level(logging.INFO, "blendkv.kernels.dispatch"):
        for x in (wide, wide, very, very):
            found = encode_vectors(x, "turbo2", signs(x.shape[2], "turbo2"))
            assert_same(found, codes.encode(x, "turbo2", signs(x.shape[2], "turbo2")))
        encode_vectors(wide.float(), "int8")
    said = [r.message for r in caplog.records]
    assert [text.split(":")[0] for text in said] == ["encode is not computed by cpu here"] * 2
    assert "x is torch.float64" in said[0]
    assert "up to 1024, this is 2048" in said[1]
    assert [(c.backend, c.calls) for c in dispatch.choices()] == [("cpu", 1), ("torch", 4)]


def test_what_does_not_fit_is_refused():
    x, some = torch.zeros(2, 1, 8), torch.ones(8)
    for args, text in (
        ((x, "zip"), "codec is 'zip'; allowed: fp8, int8, turbo4, turbo3, turbo2"),
        ((x[0], "int8"), r"x is of shape \[1, 8\]; allowed"),
        ((x.int(), "int8"), "x is torch.int32; allowed: torch.float64"),
        ((x[..., :0], "int8"), "x is of head dim 0; allowed: 1 or more"),
        ((x[..., :4], "turbo4", some[:4]), "x is of head dim 4; allowed: a multiple of 8, for turbo4"),
        ((x, "turbo4"), "signs is missing; allowed: a tensor, for turbo4"),
        ((x, "turbo4", some[:4]), r"signs is of shape \[4\]; allowed: \[8\]"),
        ((x, "turbo4", some.double()), "signs is torch.float64; allowed: torch.float32"),
        ((x, "int8", some), "signs is given; allowed: None, for int8"),
    ):
        with pytest.raises(InputError, match=text):
            encode_vectors(*args)


@pytest.mark.parametrize("codec", CODECS)
@given(
    seed=st.integers(0, 2**31),
    dim=st.sampled_from([8, 24, 64, 80, 128, 256]),
    dtype=st.sampled_from(list(DTYPES)),
    bias=st.sampled_from(["none", "span", "trend"]),
    tokens=st.sampled_from([1, 70, 1500]),
)
@settings(max_examples=20)
def test_decoding_on_the_way_gives_what_decoding_first_gives(codec, seed, dim, dtype, bias, tokens):
    """Bit for bit in 16 bits; in float32 a product and a sum may be rounded as one."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(*size, generator=generator)

    k, v = (encode_vectors(randn(tokens, 8, dim).to(DTYPES[dtype]), codec, signs(dim, codec)) for _ in "kv")
    angle = randn(tokens, dim // 2)
    table = rope_table(angle.cos(), angle.sin(), "half" if seed % 2 else "interleaved")
    added = None
    if bias != "none":
        added = randn(8, dim) if bias == "span" else Trend(randn(8, dim), randn(8, dim), randn(tokens))
    for backend in ("torch",) if NO_COMPILER else ("cpu", "torch"):
        found = []
        with forced(f"scatter={backend}"):
            for pair in (decode_vectors(k, v, DTYPES[dtype]), (k, v)):
                outs = [torch.zeros(tokens + 3, 8, dim, dtype=DTYPES[dtype]) for _ in "kv"]
                rope_shift_scatter(*pair, table, *outs, 2, k_bias=added, v_bias=added)
                found.append(outs)
        for one, other in zip(*found, strict=True):
            if dtype == "float32":
                assert torch.allclose(one, other, atol=1e-5)
            else:
                assert torch.equal(one, other)


def test_tensors_pass_and_what_is_coded_is_decoded_beside_them():
    v = torch.randn(6, 2, 24)
    assert all(found is given for found, given in zip(decode_vectors(v, v, torch.float32), (v, v), strict=True))
    k = encode_vectors(v[..., :16], "int8")
    found_k, found_v = decode_vectors(k[torch.tensor([4, 1])], v[torch.tensor([4, 1])], torch.float32)
    assert torch.equal(found_k, codes.decode(k)[[4, 1]])
    assert torch.equal(found_v, v[[4, 1]])
