"""The emulated GPU finds faults that are put into the CUDA kernels: its silence in test_cuda.py means something."""

import contextlib
import random
import shutil

import pytest
import simt
import torch

from blendkv.errors import BlendKVError
from blendkv.kernels import attention_mass, selected_attention
from blendkv.kernels.testing import attention_case, forced

pytestmark = pytest.mark.xdist_group("cuda-faults")
WAIT = "    copy_wait<0>();\n    block_sync();  // "
MUTANTS = {
    "V is read before it is there": ("attention.cuh", WAIT + "V is", "    copy_wait<0>();  // V is"),
    "K is read before it is there": ("attention.cuh", WAIT + "K is", "    copy_wait<0>();  // K is"),
    "a copy is not waited for": ("attention.cuh", WAIT + "K is", WAIT.replace("0", "1") + "K is"),
    "the mask is one key off": ("attention_rows.cuh", "own > range.high)", "own > range.high + 1)"),
    "B's halves are swapped": ("layout.cuh", "return (lane >> 3) & 1;", "return ((lane >> 3) & 1) ^ 1;"),
    "the output is not scaled to a new top": ("attention_rows.cuh", "out[p][n][2 * h] *= kept;", ""),
    "an even pitch": ("layout.cuh", "(kChunks | 1) * 16", "kChunks * 16"),
    "rows take the keys' place too soon": ("mass.cuh", "  block_sync();  // every warp has its keys\n", ""),
    "rows are overwritten while they are read": ("mass.cuh", "    block_sync();  // the stage is free\n", ""),
    "rows are read before they are there": (
        "mass.cuh",
        "    copy_wait<1>();\n    block_sync();\n",
        "    copy_wait<1>();\n",
    ),
}
"""A fault by file: what is there, and what is put in its place."""


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_the_emulated_gpu_finds_faults(tmp_path, monkeypatch, mutant):
    name, right, wrong = MUTANTS.get(mutant, ("layout.cuh", "", ""))
    op = "mass" if name == "mass.cuh" else "attention"
    sources = tmp_path / "cuda"
    shutil.copytree(simt.SOURCES, sources)
    for other in set(sources.glob("*.cu")) - {sources / f for f in ("attention_bf16.cu", "mass.cu", "status.cu")}:
        other.unlink()
    (sources / ("attention_bf16.cu" if op == "mass" else "mass.cu")).unlink()
    text = (sources / name).read_text()
    assert right in text
    (sources / name).write_text(text.replace(right, wrong))
    library = simt.compile_emulated(tmp_path, sources)
    simt.stand_in(monkeypatch, library)
    case = attention_case(random.Random(5), 60, 300, head_dim=128, dtype=torch.bfloat16)
    found = {}
    for backend in ("torch", "cuda"):
        with contextlib.suppress(BlendKVError), forced("torch"):  # a failed launch is a fault found, too
            lse = selected_attention(case.q, case.k, case.v, case.positions, case.params, want_lse=True).lse
            with forced(backend):
                if op == "mass":
                    found[backend] = attention_mass(case.q, case.k, case.positions, case.params, lse, "max")
                else:
                    found[backend] = selected_attention(case.q, case.k, case.v, case.positions, case.params).out
    plain = found["torch"].float()
    off = (found.get("cuda", plain + torch.inf).float() - plain).abs().max() / plain.abs().max()
    assert (not off < 0.02 or simt.conflicts(library)[1] > 0) == (mutant is not None)
