"""Rotations: against complex multiplication, back and forth, into strided outputs."""

import pytest
import torch
from tiny import seed_of_run

from blendkv.kernels import rope_table, rotate, unrotate


def angles(positions: int, pairs: int, magnitude: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    theta = torch.rand(positions, pairs) * 6.28
    return magnitude * theta.cos(), magnitude * theta.sin()


@pytest.fixture(autouse=True)
def seed():
    value = seed_of_run()
    print(f"seed {value}")
    torch.manual_seed(value)


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotate_is_complex_multiplication(pairing, offset):
    tokens, heads, dim, pairs = 11, 3, 20, 8
    x = torch.randn(tokens, heads, dim)
    cos, sin = angles(tokens, pairs)
    got = rotate(x, rope_table(cos, sin, pairing, offset))
    part = x[..., offset : offset + 16]
    if pairing == "half":
        real, imaginary = part[..., :pairs], part[..., pairs:]
    else:
        real, imaginary = part[..., ::2], part[..., 1::2]
    turned = torch.complex(real, imaginary) * torch.complex(cos, sin)[:, None]
    want = x.clone()
    if pairing == "half":
        want[..., offset : offset + 16] = torch.cat((turned.real, turned.imag), -1)
    else:
        want[..., offset : offset + 16] = torch.view_as_real(turned).flatten(-2)
    assert torch.allclose(got, want, atol=1e-6)


def test_packed_holds_every_pair_once():
    cos, sin = angles(6, 4)
    table = rope_table(cos, sin, "half", 2)
    assert torch.equal(table.packed, torch.cat((cos, sin), -1))
    assert torch.equal(table.rows(slice(2, 5)).packed, table.packed[2:5])


@pytest.mark.parametrize("magnitude", [1.0, 1.3])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_unrotate_undoes_rotate_magnitude_included(pairing, magnitude):
    x = torch.randn(7, 2, 16)
    table = rope_table(*angles(7, 8, magnitude), pairing)
    there = rotate(x, table)
    assert torch.allclose(there.norm(), x.norm() * magnitude, rtol=1e-4)
    assert torch.allclose(unrotate(there, table), x, atol=1e-5)


def test_bias_is_added_before_the_rotation_and_the_input_is_kept():
    x, bias = torch.randn(5, 2, 16), torch.randn(2, 16)
    kept = x.clone()
    table = rope_table(*angles(5, 8), "half")
    assert torch.allclose(rotate(x, table, bias=bias), rotate(x + bias, table), atol=1e-6)
    assert torch.allclose(rotate(x, None, bias=bias), x + bias)
    assert torch.equal(rotate(x, None), x)
    assert torch.equal(x, kept)


def test_output_may_be_strided_and_of_another_dtype():
    x = torch.randn(5, 2, 16, dtype=torch.bfloat16)
    table = rope_table(*angles(5, 8), "half")
    out = torch.full((2, 9, 16), float("nan"))
    rotate(x, table, out=out[:, 2:7].transpose(0, 1))
    assert torch.equal(out[:, 2:7].transpose(0, 1), rotate(x.float(), table))
    assert out[:, :2].isnan().all()
    assert out[:, 7:].isnan().all()


def test_rows_are_those_of_the_whole():
    x = torch.randn(9, 2, 16)
    table = rope_table(*angles(9, 8), "interleaved")
    some = torch.tensor([1, 4, 8])
    assert torch.equal(rotate(x[some], table.rows(some)), rotate(x, table)[some])
    assert torch.equal(rotate(x[2:5], table.rows(slice(2, 5))), rotate(x, table)[2:5])
