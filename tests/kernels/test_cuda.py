"""The CUDA kernels' numbers: on a GPU where there is one, and everywhere on an emulated one (tests/kernels/simt)."""

import random
from dataclasses import replace

import pytest
import simt
import torch
from tiny import seed_of_run

from blendkv.errors import BlendKVError, InputError
from blendkv.eval.bench import device_blend
from blendkv.kernels import Paged, attention_mass, dispatch, rope_shift_scatter, selected_attention
from blendkv.kernels.attention import cuda as attention_cuda
from blendkv.kernels.testing import (
    attention_case,
    check_attention,
    check_deviation,
    check_scatter,
    forced,
    scatter_case,
)

pytestmark = pytest.mark.xdist_group("cuda")
GPU = torch.cuda.is_available()
HALVES = (torch.bfloat16, torch.float16)
SIZES = ((0, 5), (1, 1), (1, 31), (31, 63), (63, 130), (90, 1000))
EXTRAS = [
    {},
    {"window": 1},
    {"window": 7},
    {"window": 150, "softcap": 5.0, "sinks": True},
    {"sinks": True, "group": 1},
    {"kv_heads": 1, "group": 7},
    {"magnitude": 1e-3},
    {"magnitude": 30.0, "block": 32},
]
WIDTHS = ((8, None), (24, None), (64, None), (80, 64), (96, None), (128, None), (192, 128), (256, None))
SCATTERS = [
    {},
    {"pairing": "interleaved", "rotated": 16, "offset": 8},
    {"pairing": "half", "rotated": 32, "offset": 32},
    {"pairing": None, "bias": "span"},
    {"bias": "trend", "paged": True},
    {"bias": "span", "run": True},
    {"run": True, "paged": True, "v_dim": 32},
    {"head_dim": 80},
    {"head_dim": 96, "v_dim": 256},
    {"head_dim": 128, "heads": 1},
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return simt.compile_emulated(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(params=["emulated", "gpu"])
def device(request, monkeypatch):
    if request.param == "emulated":
        simt.stand_in(monkeypatch, request.getfixturevalue("emulated"))
        return "cpu"
    if not GPU:
        pytest.skip("there is no GPU")
    return "cuda"


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


def green(found, what):
    for name, one in found.items():
        assert not one.red, f"{name} of {what}: {one}"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_attention_and_mass(rng, device, extra, dtype):
    for queries, keys in SIZES:
        case = attention_case(rng, queries, keys, dtype=dtype, device=device, **extra)
        for paged in (False, True):
            green(check_attention("cuda", case, paged=paged), f"{queries} of {keys}, paged {paged}")


@pytest.mark.parametrize(("head_dim", "v_dim"), WIDTHS)
def test_head_dims(rng, device, head_dim, v_dim):
    for dtype in HALVES:
        case = attention_case(rng, 50, 210, head_dim=head_dim, v_dim=v_dim, dtype=dtype, window=100, device=device)
        case = replace(case, paged=replace(case.paged, table=case.paged.table.long()))
        for paged in (False, True):
            green(check_attention("cuda", case, paged=paged), f"{dtype}, paged {paged}")


@pytest.mark.parametrize("ways", [2, 5])
def test_keys_split_over_blocks(rng, device, monkeypatch, ways):
    monkeypatch.setattr(attention_cuda, "splits", lambda *sizes: ways)
    for queries, keys in SIZES:
        for extra in ({}, {"window": 9}, {"softcap": 5.0, "sinks": True, "head_dim": 128}):
            case = attention_case(rng, queries, keys, dtype=torch.bfloat16, device=device, **extra)
            green(check_attention("cuda", case), f"{queries} of {keys}, {extra}")


def test_few_queries_fill_a_gpu(rng, device):
    assert attention_cuda.splits(120, 8, 32768, 128, 132) == 64  # 30 queries of Llama-8B: 512 blocks
    assert attention_cuda.splits(40000, 8, 32768, 128, 132) == 1
    assert attention_cuda.splits(0, 8, 0, 128, 132) == 1
    case = attention_case(rng, 9, 2100, dtype=torch.bfloat16, device=device)
    green(check_attention("cuda", case), "9 of 2100")


@pytest.mark.parametrize("window", [None, 3, 40])
def test_queries_beyond_the_keys(rng, device, window):
    case = attention_case(rng, 40, 100, dtype=torch.float16, window=window, device=device)
    case = replace(case, positions=case.positions * 3 + 5)  # the last ones' windows hold no key
    green(check_attention("cuda", case), f"window {window}")


def test_no_keys(device):
    q = torch.randn(3, 4, 64, dtype=torch.bfloat16, device=device)
    none = torch.empty(0, 2, 64, dtype=torch.bfloat16, device=device)
    case_params = attention_case(random.Random(0), 1, 1).params
    with forced("cuda"):
        done = selected_attention(q, none, none, torch.arange(3, device=device), case_params, want_lse=True)
    assert not done.out.any()
    assert done.lse.isneginf().all()


@pytest.mark.parametrize("layout", ["heads first", "tokens first", "odd strides"])
def test_strides(rng, device, layout):
    case = attention_case(rng, 33, 130, dtype=torch.bfloat16, device=device)
    if layout == "odd strides":
        wide = [torch.full((*t.shape[:2], 67), float("nan"), dtype=t.dtype, device=device) for t in (case.k, case.v)]
        for to, t in zip(wide, (case.k, case.v), strict=True):
            to[..., 3:].copy_(t)
        q = torch.empty(*case.q.shape[:2], 2 * 64, dtype=case.q.dtype, device=device)[..., ::2].copy_(case.q)
        case = replace(case, q=q, k=wide[0][..., 3:], v=wide[1][..., 3:])
    elif layout == "tokens first":
        case = replace(case, k=case.k.contiguous(), q=case.q.transpose(0, 1).contiguous().transpose(0, 1))
    green(check_attention("cuda", case), layout)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_deviation(rng, device, dtype):
    for keys, head_dim, v_dim in ((0, 64, None), (1, 20, 9), (31, 64, 128), (130, 80, None)):
        case = attention_case(rng, 0, keys, head_dim=head_dim, v_dim=v_dim, dtype=dtype, device=device)
        green(check_deviation("cuda", case), f"{keys} keys of {head_dim}")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("codec", ["raw", "fp8", "int8", "turbo4", "turbo3", "turbo2"])
def test_scatter(rng, device, codec, dtype):
    emulated = device == "cpu"  # a GPU takes long for the reference, which goes value by value
    for extra in SCATTERS if emulated else rng.sample(SCATTERS, 3):
        for tokens in (0, 1, 33) if emulated else (33,):
            case = scatter_case(rng, tokens, codec=codec, dtype=dtype, device=device, **extra)
            green(check_scatter("cuda", case), f"{tokens} tokens, {extra}")


@pytest.mark.parametrize("codec", ["raw", "fp8", "int8"])
def test_scatter_of_vectors_that_do_not_go_by_eights(rng, device, codec):
    for extra in ({"head_dim": 20}, {"head_dim": 9, "pairing": None}, {"head_dim": 24, "rotated": 12, "offset": 4}):
        for bias in ("none", "span", "trend"):
            case = scatter_case(rng, 31, codec=codec, dtype=torch.bfloat16, bias=bias, device=device, **extra)
            green(check_scatter("cuda", case), f"{extra}, bias {bias}")


def test_every_byte_of_fp8(rng, device):
    case = scatter_case(rng, 1, codec="fp8", heads=1, head_dim=256, pairing=None, run=True, device=device)
    data = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).view(1, 1, 256)
    case = replace(case, k=replace(case.k, data=data, scale=torch.ones_like(case.k.scale)), slots=0)
    with forced("cuda"):
        rope_shift_scatter(case.k, case.v, None, case.k_out, case.v_out, 0)
    assert torch.equal(case.k_out[0, 0].nan_to_num(1e9), data.float()[0, 0].nan_to_num(1e9))


def test_refusals_are_sentences(rng, device):
    single = attention_case(rng, 1, 4, device=device)
    wide = attention_case(rng, 1, 4, head_dim=20, dtype=torch.float16, device=device)
    half = attention_case(rng, 1, 4, dtype=torch.float16, block=6, device=device)
    backwards = replace(half, params=replace(half.params, scale=-1.0))
    paged = replace(half, k=half.paged, v=None)
    for case, words in (
        (single, "multiplies bfloat16 and float16"),
        (wide, "head dim 20"),
        (backwards, "scale -1.0"),
        (paged, "6 tokens, which is not a power of 2"),
    ):
        with forced("cuda"), pytest.raises(InputError, match=words):
            selected_attention(case.q, case.k, case.v, case.positions, case.params)


def test_nothing_waits_for_the_gpu(rng):
    if not GPU:
        pytest.skip("there is no GPU")
    case = attention_case(rng, 60, 3000, dtype=torch.bfloat16, device="cuda")
    move = scatter_case(rng, 33, codec="turbo4", dtype=torch.bfloat16, device="cuda")
    with forced("cuda"):
        for _ in range(2):
            lse = selected_attention(
                case.q, case.k, case.v, case.positions, case.params, want_lse=True, stored=case.stored
            ).lse
            attention_mass(case.q, case.k, case.positions, case.params, lse, "mean")
            rope_shift_scatter(move.k, move.v, move.table, move.k_out, move.v_out, move.slots)
            torch.cuda.set_sync_debug_mode("error")  # from the second round on
    torch.cuda.set_sync_debug_mode("default")


def test_a_failed_launch_is_an_error(rng, emulated, monkeypatch):
    simt.stand_in(monkeypatch, emulated)
    case = attention_case(rng, 2, 40, dtype=torch.bfloat16)
    off = torch.zeros(1 + case.paged.k.numel(), dtype=torch.bfloat16)[1:].view(case.paged.k.shape)
    monkeypatch.setattr(attention_cuda.cuda_call, "in_chunks", lambda *args: True)  # lets a wrong address through
    with forced("cuda"), pytest.raises(BlendKVError, match=r"attention_bf16: cp\.async reads"):
        selected_attention(case.q, Paged(off, off, case.paged.table, 40), None, case.positions, case.params)


def test_shared_memory_has_no_bank_conflicts(rng, emulated, monkeypatch):
    simt.stand_in(monkeypatch, emulated)
    for head_dim in (64, 80, 96, 128, 256):
        case = attention_case(rng, 20, 70, head_dim=head_dim, dtype=torch.bfloat16)
        check_attention("cuda", case)
    read, conflicting = simt.conflicts(emulated)
    assert read > 0
    assert conflicting == 0


def test_a_whole_blend_on_the_emulated_gpu(emulated, monkeypatch):
    """The engine's own calls and layouts: everything recomputed gives full prefill, to twice plain torch's rounding."""
    simt.stand_in(monkeypatch, emulated)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny = {**device_blend.LLAMA_8B, **sizes, "head_dim": 32, "vocab_size": 500}
    found = {}
    for backend in ("torch", "cuda"):
        with forced(backend):
            found[backend] = device_blend.check_blend(tiny, "cpu", torch.bfloat16, 300)
    assert found["cuda"]["budget 1"] <= 2 * found["torch"]["budget 1"]
    assert found["cuda"]["budget 0"] > 0.1
    used = {choice.op for choice in dispatch.choices() if choice.backend == "cuda"}
    assert used >= {"attention", "scatter"}
