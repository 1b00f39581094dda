"""nvcc compiles the CUDA kernels for every target without a warning, and no kernel spills registers."""

import ctypes
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import simt

from blendkv.kernels import build

pytestmark = [
    pytest.mark.xdist_group("cuda-build"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc"),
]
ENTRY = re.compile(
    r"entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_90a": 227 * 1024}
"""Bytes of shared memory that a block can have."""
SYMBOLS = (
    "attention_bf16", "attention_f16", "mass_bf16", "mass_f16", "scatter_chunks", "scatter_values", "deviation", "use",
)  # fmt: skip
WARN = ("-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra")


def compile_file(task):
    source, arch, folder = task
    number = arch.removeprefix("sm_")
    target = folder / f"{source.stem}.{arch}.o"
    flags = build.NVCC_FLAGS[: build.NVCC_FLAGS.index("-gencode")]
    command = ["nvcc", *flags, *WARN, f"-gencode=arch=compute_{number},code={arch}", "-Xptxas=-v", "-c", source]
    done = subprocess.run([*command, "-o", target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [(m[1], m[2], *map(int, m.groups()[2:])) for m in ENTRY.finditer(done.stderr)]


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    """(kernel, target, stack, spill stores, spill loads, registers) of every kernel for every target."""
    folder = tmp_path_factory.mktemp("cubin")
    tasks = [(source, arch, folder) for source in sorted(simt.SOURCES.glob("*.cu")) for arch in SHARED]
    with ThreadPoolExecutor(2) as pool:
        return [entry for found in pool.map(compile_file, tasks) for entry in found]


def test_no_kernel_spills(entries):
    assert {e[1] for e in entries} == set(SHARED)
    kernels = {e[0] for e in entries}
    for name, most in (("attention_kernel", 10), ("combine_kernel", 2), ("mass_kernel", 10), ("scatter_", 2)):
        assert sum(name in k for k in kernels) == most, name
    for kernel, target, stack, stores, loads, _ in entries:
        assert (stack, stores, loads) == (0, 0, 0), f"{kernel} for {target}"


def test_two_attention_blocks_fit_a_multiprocessor(entries):
    """65536 registers, 128 threads per block, allocated by 256 per warp."""
    for kernel, target, _, _, _, registers in entries:
        blocks = 2 if "attention_kernel" in kernel else 3
        assert -(-registers // 8) * 8 * 128 * blocks <= 65536, f"{kernel} for {target}: {registers} registers"


def test_shared_memory_of_every_kernel(tmp_path):
    """Asked of the headers themselves, compiled for the host."""
    widths = ", ".join(f"AttentionTile<{d}>::kShared, MassTile<{d}>::kShared" for d in (64, 80, 96, 128, 256))
    source = tmp_path / "shared.cpp"
    source.write_text(
        '#include "attention.cuh"\n#include "mass.cuh"\nusing namespace blendkv;\n'
        f'extern "C" const int shared[] = {{{widths}}};\n'
    )
    library = tmp_path / "shared.so"
    command = [simt.compiler(), *simt.FLAGS, f"-I{simt.SOURCES}", "-shared", source, "-o", library]
    subprocess.run(command, check=True)
    needed = list((ctypes.c_int * 10).in_dll(ctypes.CDLL(str(library)), "shared"))
    assert min(needed) > 0
    assert max(needed) <= min(SHARED.values())
    assert 2 * (max(needed) + 1024) <= 164 * 1024  # two blocks per multiprocessor, the system's share included


def test_the_library_loads_and_says_what_an_error_is():
    assert build.why_not("cuda") is None
    library = build.library("cuda")
    for name in SYMBOLS:
        assert library[f"blendkv_cuda_{name}"]
    library.blendkv_cuda_error.restype = ctypes.c_char_p
    assert b"out of memory" in library.blendkv_cuda_error(2)
