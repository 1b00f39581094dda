"""The Triton backend: run by Triton's interpreter (`make test-triton`) or on a GPU, and compiled for GPUs by name."""

import importlib
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import seed_of_run

from blendkv.errors import InputError
from blendkv.kernels import attention_mass, backends, kv_deviation, rope_shift_scatter, selected_attention
from blendkv.kernels.codes import encode
from blendkv.kernels.testing import (
    attention_case,
    check_attention,
    check_deviation,
    check_scatter,
    exact_attention,
    forced,
    scatter_case,
)
from blendkv.kernels.types import AttentionParams, Encoded, Move

reason = backends.why_not("triton")
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

jit, attention, scatter = (
    importlib.import_module(f"blendkv.kernels.{name}") for name in ("jit", "attention.triton", "scatter.triton")
)
DEVICE = "cpu" if backends.interpreting() else "cuda"
COMPILER = Path(__file__).parents[1] / "support" / "compile_triton.py"
LOW = (torch.bfloat16, torch.float16)


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


def attention_of(rng, queries, keys, **form):
    return attention_case(rng, queries, keys, device=DEVICE, **form)


def green(errors):
    return not {name: e for name, e in errors.items() if e.red}


EXTRAS = [
    {},
    {"window": 1},
    {"window": 7, "sinks": True},
    {"window": 100, "softcap": 3.0},
    {"softcap": 50.0, "sinks": True, "magnitude": 5.0},
    {"head_dim": 20, "v_dim": 8, "kv_heads": 1, "group": 9},
    {"head_dim": 80, "v_dim": 96, "kv_heads": 3, "group": 1},
    {"head_dim": 128, "kv_heads": 1, "group": 4},
    {"head_dim": 256, "kv_heads": 1, "group": 2},
    {"magnitude": 1e-6},
    {"magnitude": 300.0},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_attention_is_right(rng, extra):
    assert green(check_attention("triton", attention_of(rng, 31, 200, **extra)))


@pytest.mark.parametrize("extra", EXTRAS[:6], ids=str)
def test_attention_over_blocks_is_right(rng, extra):
    case = attention_of(rng, 31, 150, block=rng.choice([16, 17]), dtype=torch.float16, **extra)
    assert green(check_attention("triton", case, paged=True))


@pytest.mark.parametrize(("queries", "keys"), [(0, 63), (1, 1), (1, 130), (63, 63), (130, 300)])
def test_attention_is_right_at_odd_sizes(rng, queries, keys):
    case = attention_of(rng, queries, keys, window=rng.choice([None, 40]), kv_heads=1)
    assert green(check_attention("triton", case))
    assert green(check_attention("triton", case, paged=True))


@pytest.mark.parametrize(("dtype", "extra"), list(zip(LOW * 4, EXTRAS[:5] + EXTRAS[6:9], strict=True)), ids=str)
def test_attention_is_right_in_half_precision(rng, extra, dtype):
    assert green(check_attention("triton", attention_of(rng, 70, 300, dtype=dtype, **extra)))


@pytest.mark.parametrize(
    "extra", [{}, {"sinks": True}, {"window": 90, "sinks": True}, {"dtype": torch.bfloat16}], ids=str
)
def test_keys_split_among_programs_give_the_same(rng, monkeypatch, extra):
    monkeypatch.setattr(jit, "cores", lambda device: 132)
    case = attention_of(rng, 9, 400, kv_heads=1, **extra)
    assert green(check_attention("triton", case))
    assert green(check_attention("triton", case, paged=True))


def test_few_queries_fill_a_gpu():
    programs = 8  # 30 queries of Llama-8B: 120 rows of each of 8 KV heads, in one tile
    assert programs * attention.split(programs, 32768 // 32, 132) > 132
    assert attention.split(1000, 1024, 132) == 1
    assert attention.split(1, 3, 132) == 1


def test_rows_of_one_query_may_fill_more_than_a_tile(rng):
    assert green(check_attention("triton", attention_of(rng, 3, 90, kv_heads=1, group=50)))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("positions", [[0, 1, 2], [295, 296, 299], [0, 299], [150] * 3, [310, 400, 5000]], ids=str)
def test_queries_may_crowd_anywhere(rng, positions, window):
    """Keys that no query reads have a deviation too, and queries beyond the last key see those in their window."""
    case = replace(attention_of(rng, len(positions), 300, kv_heads=1), positions=torch.tensor(positions, device=DEVICE))
    case = replace(case, params=replace(case.params, window=window))
    assert green(check_attention("triton", case))


def test_a_query_without_keys_gets_zeros(rng):
    case = attention_of(rng, 2, 50)
    with forced("triton"):
        got = selected_attention(
            case.q, case.k, case.v, torch.tensor([60, 900], device=DEVICE), AttentionParams(1.0, 10), want_lse=True
        )
        none = selected_attention(
            case.q, case.k[:0], case.v[:0], case.positions, AttentionParams(1.0), want_lse=True,
            stored=(case.k[:0], case.v[:0]),
        )  # fmt: skip
        mass = attention_mass(case.q, case.k[:0], case.positions, AttentionParams(1.0), none.lse, "max")
    assert got.out.eq(0).all()
    assert got.lse.eq(-math.inf).all()
    assert none.out.eq(0).all()
    assert none.deviation.shape == mass.shape == (0,)


def test_nothing_is_read_that_no_query_sees(rng):
    """Keys after the last query, or before the first one's window, may hold anything; so may their blocks."""
    case = attention_of(rng, 4, 200, window=30)
    case = replace(case, positions=torch.tensor([90, 95, 99, 120], device=DEVICE))
    exact = exact_attention(case)
    for tensor in (case.k, case.v):
        tensor[:61] = math.nan
        tensor[121:] = math.nan
    for tensor in (case.paged.k, case.paged.v):
        places = tensor[case.paged.table].flatten(0, 1)
        places[:61] = math.nan
        places[121:] = math.nan
        tensor[case.paged.table] = places.unflatten(0, (-1, tensor.shape[1]))
    with forced("triton"):
        for keys, values in ((case.k, case.v), (case.paged, None)):
            got = selected_attention(case.q, keys, values, case.positions, case.params)
            assert torch.allclose(got.out.double(), exact.out, atol=1e-5)


def test_deviation_beside_keys_that_are_not_finite(rng):
    case = attention_of(rng, 2, 100)
    case = replace(case, positions=torch.tensor([3, 40], device=DEVICE))
    exact = exact_attention(case)
    case.v[41:] = math.nan
    with forced("triton"):
        got = selected_attention(case.q, case.k, case.v, case.positions, case.params, stored=case.stored)
    assert torch.allclose(got.out.double(), exact.out, atol=1e-5)
    assert got.deviation[41:].isnan().all()
    assert torch.allclose(got.deviation[:41].double(), exact.deviation[:41])


CODECS = ("fp8", "int8", "turbo4", "turbo3", "turbo2")
FORMS = [
    {"bias": "span"},
    {"bias": "trend", "paged": True, "pairing": "interleaved"},
    {"run": True, "pairing": None, "dtype": torch.bfloat16},
    {"run": True, "paged": True, "rotated": 32, "offset": 8, "bias": "span"},
    {"rotated": 16, "offset": 7, "pairing": "interleaved", "dtype": torch.float16},
]


@pytest.mark.parametrize("codec", ["raw", *CODECS])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scatter_is_right(rng, codec, form):
    assert green(check_scatter("triton", scatter_case(rng, 70, codec=codec, device=DEVICE, **form)))


@pytest.mark.parametrize("codec", ["raw", *CODECS])
@pytest.mark.parametrize(("head_dim", "v_dim"), [(80, 96), (128, 256), (8, 24)])
def test_scatter_is_right_at_any_head_dim(rng, codec, head_dim, v_dim):
    case = scatter_case(rng, 33, codec=codec, head_dim=head_dim, v_dim=v_dim, heads=1, bias="span", device=DEVICE)
    assert green(check_scatter("triton", case))


@pytest.mark.parametrize("tokens", [0, 1, 31, 130])
def test_scatter_is_right_at_odd_sizes(rng, tokens):
    case = scatter_case(rng, tokens, head_dim=20, v_dim=5, rotated=6, offset=3, bias="trend", device=DEVICE)
    assert green(check_scatter("triton", case))


def test_one_program_takes_all_heads_or_one(rng, monkeypatch):
    monkeypatch.setattr(scatter, "SIDE_BY_SIDE", 1000)
    assert green(check_scatter("triton", scatter_case(rng, 40, bias="span", device=DEVICE)))


def test_every_float8_number_is_decoded():
    data = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).view(4, 1, 64)
    source = Encoded("fp8", data, torch.ones(4, 1, 1, device=DEVICE), 64)
    outs = [torch.empty(4, 1, 64, device=DEVICE) for _ in "kv"]
    with forced("triton"):
        rope_shift_scatter(source, source, None, *outs, 0)
    assert torch.equal(outs[0].nan_to_num(1e6), data.float().nan_to_num(1e6))
    assert torch.equal(outs[1].nan_to_num(1e6), outs[0].nan_to_num(1e6))


def test_a_slot_beyond_the_output_is_not_written(rng):
    case = scatter_case(rng, 20, device=DEVICE)
    slots = torch.full((20,), case.k_out.shape[0], device=DEVICE)
    scatter.run([Move(case.k, case.v, case.table, slots, None, None)], case.k_out, case.v_out)
    assert case.k_out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("keys", [0, 1, 131])
def test_deviation_is_right(rng, keys, dtype):
    assert green(check_deviation("triton", attention_of(rng, 0, keys, head_dim=80, v_dim=20, dtype=dtype)))


def test_what_it_cannot_take_is_refused_in_words(rng, monkeypatch):
    def refused(call, text):
        with forced("triton"), pytest.raises(InputError, match=text):
            call()

    def attend(case, scale=1.0):
        selected_attention(case.q, case.k, case.v, case.positions, AttentionParams(scale))

    def mass(case):
        lse = torch.zeros(case.q.shape[:2], device=DEVICE)
        attention_mass(case.q, case.k, case.positions, case.params, lse, "max")

    def move(**form):
        case = scatter_case(rng, 3, device=DEVICE, **form)
        rope_shift_scatter(case.k, case.v, case.table, case.k_out, case.v_out, case.slots)

    double = attention_of(rng, 3, 9, dtype=torch.float64)
    wide = attention_of(rng, 3, 9, head_dim=320)
    plain = attention_of(rng, 3, 9)
    refused(lambda: attend(double), "float64")
    refused(lambda: mass(double), "float64")
    refused(lambda: attend(wide), "head dim of 320")
    refused(lambda: mass(wide), "head dim of 320")
    refused(lambda: attend(plain, scale=-1.0), "scale of -1")
    refused(lambda: kv_deviation(*[double.k] * 4), "float64")
    refused(lambda: move(head_dim=1024), "head dim of 1024")
    table = scatter_case(rng, 3, device=DEVICE).table.rows(slice(None))
    odd = replace(table, cos=table.cos[..., :5], sin=table.sin[..., :5])
    refused(lambda: rope_shift_scatter(plain.k[:3], plain.k[:3], odd, plain.v, plain.v, 0), "5 rotated dims")
    far = [plain.k[:3].to("meta")] * 2
    refused(lambda: rope_shift_scatter(*far, None, plain.v, plain.v, 0), "tensors on both")
    monkeypatch.setattr(jit, "interpreting", lambda: False)
    host = attention_case(rng, 3, 9)
    assert jit.unusable([host.q], []) == "tensors on the CPU"
    source = encode(host.k, "int8")
    assert scatter.refuses([Move(source, source, None, 0)], host.k, host.k) == "tensors on the CPU"


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter copies between devices")
def test_nothing_waits_for_the_gpu(rng):
    case = attention_of(rng, 30, 500, sinks=True, window=90)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with forced("triton"):
            got = selected_attention(
                case.q, case.k, case.v, case.positions, case.params, want_lse=True, stored=case.stored
            )
            attention_mass(case.q, case.k, case.positions, case.params, got.lse, "mean")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    """Nvidia's sm_80 and sm_90, AMD's gfx942; and no backend reads a tensor's values (see the script)."""
    started = {}
    for target in ("sm_80", "sm_90", "gfx942"):
        env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / target)}
        started[target] = subprocess.Popen(
            [sys.executable, COMPILER, target], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    outputs = {target: (process.communicate()[0], process.returncode) for target, process in started.items()}
    for target, (output, code) in outputs.items():
        assert code == 0, f"{target}\n{output}"
        assert "kernels, 0 too large" in output
