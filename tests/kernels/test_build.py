"""Compiling the kernels: once, whole or not at all, and what is said where it cannot be done."""

import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from blendkv.kernels import AttentionParams, build, dispatch, selected_attention

TINY = """
#pragma GCC visibility push(default)
extern "C" const char* blendkv_cpu_isa() { return "tiny"; }
extern "C" int blendkv_cpu_select(const char*) { return 1; }
extern "C" int blendkv_cpu_attention(const void*) { return ANSWER; }
extern "C" int blendkv_cpu_mass(const void*) { return 0; }
extern "C" int blendkv_cpu_scatter(const void*) { return 0; }
extern "C" int blendkv_cpu_deviation(const void*) { return 0; }
extern "C" int blendkv_cpu_encode(const void*) { return 0; }
"""
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Small sources, a folder and a prebuilt folder of their own, and no library loaded."""
    for kind in ("cpu", "cuda"):
        (tmp_path / "csrc" / kind).mkdir(parents=True)
    (tmp_path / "csrc" / "cpu" / "entry.cpp").write_text('#include "answer.h"\n' + TINY)
    (tmp_path / "csrc" / "cpu" / "answer.h").write_text("#define ANSWER 1\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "home"))
    for name in ("CXX", "NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    build._loaded.cache_clear()
    yield tmp_path
    build._loaded.cache_clear()


def answer(path):
    return ctypes.CDLL(str(path)).blendkv_cpu_attention(None)


def counting(folder):
    """A compiler that notes every call."""
    script, log = folder / "counting", folder / "calls"
    script.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {shutil.which("g++") or shutil.which("c++")} "$@"\n')
    script.chmod(0o755)
    log.write_text("")
    return script, lambda: sum(" -c " in line for line in log.read_text().splitlines())


@needs_compiler
def test_a_library_is_compiled_once_and_again_when_its_sources_change(tiny, monkeypatch):
    script, calls = counting(tiny)
    monkeypatch.setenv("CXX", str(script))
    assert build.isa() == "tiny"
    first = build._path("cpu")
    assert answer(first) == 1
    assert build._path("cpu") == first
    assert calls() == 1
    (tiny / "csrc" / "cpu" / "answer.h").write_text("#define ANSWER 2\n")
    second = build._path("cpu")
    assert second != first
    assert answer(second) == 2
    assert calls() == 2


@needs_compiler
def test_flags_and_compiler_are_part_of_the_digest(tiny, monkeypatch):
    first = build._path("cpu")
    monkeypatch.setattr(build, "CXX_FLAGS", (*build.CXX_FLAGS, "-O1"))
    second = build._path("cpu")
    monkeypatch.setenv("CXX", str(counting(tiny)[0]))
    assert len({first, second, build._path("cpu")}) == 3


@needs_compiler
def test_of_processes_that_start_at_once_one_compiles(tiny):
    script, calls = counting(tiny)
    code = (
        "import sys; from pathlib import Path; from blendkv.kernels import build; "
        "build.SOURCES, build.PREBUILT = Path(sys.argv[1]), Path(sys.argv[2]); print(build.isa())"
    )
    command = [sys.executable, "-c", code, tiny / "csrc", tiny / "prebuilt"]
    environ = {**os.environ, "CXX": str(script)}
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(subprocess.run, command, env=environ, cwd="/", capture_output=True) for _ in range(3)]
    assert [run.result().stdout for run in runs] == [b"tiny\n"] * 3
    assert calls() == 1
    assert not list((tiny / "home").rglob("building-*"))


def test_without_a_compiler_one_line_says_so_and_torch_computes(tiny, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    reason = build.why_not("cpu")
    assert reason == "no compiler: looked for g++, c++, clang++; install g++ or set CXX"
    with pytest.raises(build.BuildError, match=r"no compiler: looked for g\+\+"):
        build.library("cpu")
    monkeypatch.setattr(dispatch, "_calls", dispatch.Counter())
    monkeypatch.setattr(dispatch, "_passed_over", {})
    monkeypatch.delenv(dispatch.FORCE, raising=False)
    q = torch.randn(3, 2, 8)
    with caplog.at_level(logging.INFO, "blendkv.kernels"):
        selected_attention(q, q, q, torch.arange(3), AttentionParams(1.0))
        selected_attention(q, q, q, torch.arange(3), AttentionParams(1.0))
    assert [r.message for r in caplog.records] == [f"attention is not computed by cpu here: {reason}"]
    assert dispatch.choices() == [dispatch.Choice("attention", "torch", 2, {"cpu": reason})]


def test_a_compiler_that_is_not_there_is_named(tiny, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++-99 -m64")
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    assert build.why_not("cpu") == "no compiler: looked for /nowhere/g++-99 -m64; install g++ or set CXX"
    wanted = "no compiler: looked for /nowhere/nvcc; install the CUDA toolkit or set NVCC or CUDA_HOME"
    assert build.why_not("cuda") == wanted


@needs_compiler
def test_an_error_shows_the_compilers_last_lines_and_leaves_nothing(tiny):
    (tiny / "csrc" / "cpu" / "answer.h").write_text("#error the answer is missing\n")
    reason = build.why_not("cpu")
    assert re.match(r"\S+ failed with 1:\n", reason)
    assert "the answer is missing" in reason
    assert len(reason.splitlines()) <= build.LAST_LINES + 1
    assert not [p for p in (tiny / "home").rglob("*") if p.suffix == ".so" or p.name.startswith("building-")]


@needs_compiler
def test_a_library_that_does_not_load_is_an_error(tiny):
    path = build._path("cpu")
    path.write_bytes(path.read_bytes()[:100])
    assert build.why_not("cpu").startswith("the compiled library does not load: ")


@needs_compiler
def test_a_folder_that_cannot_be_written_is_an_error(tiny, monkeypatch):
    (tiny / "file").write_text("")
    monkeypatch.setenv("BLENDKV_HOME", str(tiny / "file"))
    assert f"the kernels cannot be written to {tiny / 'file' / 'kernels'}" in build.why_not("cpu")


@needs_compiler
def test_a_prebuilt_library_is_used_while_the_sources_are_the_same(tiny, monkeypatch, capsys):
    assert build.main(["cpu"]) == 0
    made = Path(capsys.readouterr().out.strip())
    assert made == tiny / "prebuilt" / "libblendkv_cpu.so"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert build._path("cpu") == made
        assert build.isa() == "tiny"
    (tiny / "csrc" / "cpu" / "answer.h").write_text("#define ANSWER 3\n")
    stale = build._path("cpu")
    assert stale != made
    assert answer(stale) == 3
    (tiny / "prebuilt" / "cpu.json").write_text("{")
    assert build._path("cpu") == stale


def test_the_command_says_what_is_wrong(tiny, monkeypatch, capsys):
    assert build.main([]) == 2
    assert build.main(["gpu"]) == 2
    assert capsys.readouterr().err == "usage: python -m blendkv.kernels.build cpu [cuda]\n" * 2
    monkeypatch.setenv("PATH", "")
    assert build.main(["cpu"]) == 1
    assert "no compiler" in capsys.readouterr().err
    monkeypatch.undo()
    done = subprocess.run([sys.executable, "-m", "blendkv.kernels.build"], cwd="/", capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "usage: python -m blendkv.kernels.build cpu [cuda]\n"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_cuda_sources_are_compiled_by_nvcc(tiny):
    (tiny / "csrc" / "cuda" / "twice.cu").write_text(
        '#include "twice.cuh"\n__global__ void kernel(float* x) { x[threadIdx.x] *= FACTOR; }\n'
        'extern "C" __attribute__((visibility("default"))) int twice(float* x) {\n'
        "  kernel<<<1, 32>>>(x);\n  return FACTOR;\n}\n"
    )
    (tiny / "csrc" / "cuda" / "twice.cuh").write_text("#define FACTOR 2\n")
    assert build.library("cuda").twice(None) == 2
    assert build._path("cuda").name == "libblendkv_cuda.so"


def test_no_sources_are_an_error(tiny):
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    assert build.why_not("cuda") == f"there are no sources in {tiny / 'csrc' / 'cuda'}"


@needs_compiler
def test_the_sources_have_no_warnings_and_share_no_code_between_instruction_sets(tmp_path, monkeypatch):
    """A function that two sets' objects share is linked once, and may hold what the running CPU does not know."""
    ends = {name: build._sets()[name] for name in ("baseline", "avx512bf16") if name in build._sets()}
    monkeypatch.setattr(build, "_sets", lambda: ends)
    compiler = build._compiler("cpu")
    strict = ("-O1", "-Wall", "-Wextra", "-Werror")
    steps, _ = build._steps("cpu", strict)
    commands = [[*compiler.command, *flags, "-c", str(p), "-o", str(tmp_path / name)] for p, name, flags in steps]
    with ThreadPoolExecutor(build.MOST_JOBS) as pool:
        list(pool.map(build._run, commands))
    for _, name, _ in steps:
        if name == "entry.o" or shutil.which("nm") is None:
            continue
        own = name.removesuffix(".o").rpartition("-")[2]
        listed = subprocess.run(["nm", "--defined-only", tmp_path / name], capture_output=True, text=True, check=True)
        shared = [line.split()[-1] for line in listed.stdout.splitlines() if line.split()[-2] in "TWVu"]
        assert shared
        assert all(f"{len(own)}{own}" in symbol for symbol in shared), name


@needs_compiler
def test_torch_and_the_kernels_share_one_openmp():
    code = """
import torch
from blendkv.kernels import build
torch.set_num_threads(2)
build.library("cpu")
torch.randn(500, 500) @ torch.randn(500, 500)
print(len({line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "1"
