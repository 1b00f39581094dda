"""The CUDA kernels on the CPU: compiled by a C++ compiler with tests/kernels/simt, and put in the GPU's place."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blendkv.kernels import backends, build, cuda_call

SOURCES = Path(cuda_call.__file__).resolve().parent / "csrc" / "cuda"
EMULATOR = Path(__file__).resolve().parents[1] / "kernels" / "simt"
FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-DBLENDKV_EMULATED", f"-I{EMULATOR}", "-Wall", "-Wextra", "-Werror",
    "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE", "-x", "c++",
)  # fmt: skip


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def compile_emulated(folder: Path, sources: Path = SOURCES) -> ctypes.CDLL:
    """Compile every source file, two at a time, into a library in ``folder``."""
    name = compiler()
    if name is None:
        pytest.skip("there is no C++ compiler")

    def one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        done = subprocess.run([name, *FLAGS, "-c", source, "-o", target], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(one, sorted(sources.glob("*.cu"))))
    library = folder / "emulated.so"
    subprocess.run([name, "-shared", *objects, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def stand_in(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL) -> None:
    """Let the backend ``cuda`` run tensors of the CPU by an emulated library."""
    found = backends.why_not
    monkeypatch.setattr(build, "library", lambda kind: library)
    monkeypatch.setattr(backends, "why_not", lambda name: None if name == "cuda" else found(name))
    monkeypatch.setattr(cuda_call, "refuses_device", lambda device: None)
    monkeypatch.setattr(cuda_call, "on_stream", lambda start, device: start(0))
    monkeypatch.setattr(cuda_call, "processors", lambda device: 4)


def conflicts(library: ctypes.CDLL) -> tuple[int, int]:
    """Matrices that ldmatrix read since the library was loaded, and how many of them with conflicts of banks."""
    counted = library.blendkv_emulated_matrices, library.blendkv_emulated_conflicts
    for function in counted:
        function.restype = ctypes.c_longlong
    return counted[0](), counted[1]()
