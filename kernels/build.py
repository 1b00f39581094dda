"""Compiles the C++ and CUDA sources on first use, into shared libraries that are loaded through ctypes.

The libraries have a plain C interface and know nothing of torch's headers: they compile in seconds, and fit any torch.
A compiled one lies in ``<BlendKV's folder>/kernels/<digest>``, the digest being that of sources, flags and compiler.
``python -m blendkv.kernels.build cpu cuda`` compiles for machines without a compiler: it puts the libraries into
``blendkv/kernels/prebuilt``, from where they are used while the sources are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from blendkv.config import home
from blendkv.errors import BlendKVError

log = logging.getLogger(__name__)

Kind = Literal["cpu", "cuda"]

SOURCES = Path(__file__).resolve().parent / "csrc"
PREBUILT = Path(__file__).resolve().parent / "prebuilt"
CXX_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
)  # fmt: skip
_AVX512 = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl",
           "-mprefer-vector-width=512")  # fmt: skip
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
}
"""Every C++ source but ``entry.cpp`` is compiled once for each; other processors than x86-64 get the first alone."""
EXACT = {"encode": ("-ffp-contract=off",)}
"""More flags by source: what must make the same bytes everywhere joins no product and sum into one rounding."""
NVCC_FLAGS = (
    "-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden",
    "-gencode", "arch=compute_80,code=sm_80",
    "-gencode", "arch=compute_90,code=[sm_90,compute_90]",
)  # fmt: skip
"""Of every ``csrc/cuda/*.cu``: later GPUs compile the PTX of compute_90 when they load it."""
MOST_JOBS = 2
LAST_LINES = 8
"""Of what a compiler wrote, in an error."""


class BuildError(BlendKVError):
    """A library of kernels cannot be compiled or loaded here; the message says why in one line or the compiler's."""


@dataclass(frozen=True)
class Compiler:
    """A command and what its ``--version`` says."""

    command: tuple[str, ...]
    version: str


def _found(names: list[str], hint: str) -> Compiler:
    for name in names:
        words = shlex.split(name)
        if words and (path := shutil.which(words[0])) is not None:
            command = (path, *words[1:])
            ran = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
            if ran.returncode == 0:
                return Compiler(command, ran.stdout.strip())
    raise BuildError(f"no compiler: looked for {', '.join(names)}; {hint}")


def _compiler(kind: Kind) -> Compiler:
    """The compiler: what the environment names, or else what is found.

    Raises
    ------
    BuildError
        If there is none.
    """
    if kind == "cpu":
        given = os.environ.get("CXX")
        return _found([given] if given else ["g++", "c++", "clang++"], "install g++ or set CXX")
    given = os.environ.get("NVCC")
    root = os.environ.get("CUDA_HOME")
    names = [given] if given else ([f"{root}/bin/nvcc"] if root else []) + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return _found(names, "install the CUDA toolkit or set NVCC or CUDA_HOME")


def _files(kind: Kind) -> list[Path]:
    return sorted(p for p in (SOURCES / kind).rglob("*") if p.suffix in {".cpp", ".h", ".cu", ".cuh"})


def _digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(f"{len(data)}:".encode() + data)
    return total.hexdigest()[:20]


def sources_digest(kind: Kind) -> str:
    """Names and contents of the sources."""
    return _digest(*(part for p in _files(kind) for part in (p.relative_to(SOURCES).as_posix(), p.read_bytes())))


def _sets() -> dict[str, tuple[str, ...]]:
    if platform.machine().lower() in {"x86_64", "amd64"}:
        return INSTRUCTION_SETS
    return {"baseline": ()}


def _openmp() -> str:
    """How to link the OpenMP runtime: the file of torch's own, so that both use one pool of threads."""
    own = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(own[0]) if own else "-lgomp"


def _steps(kind: Kind, extra: tuple[str, ...]) -> tuple[list[tuple[Path, str, tuple[str, ...]]], tuple[str, ...]]:
    """Every (source, name of the object, flags), and what to link with."""
    if kind == "cuda":
        steps = [(p, f"{p.stem}.o", (*NVCC_FLAGS, *extra)) for p in _files(kind) if p.suffix == ".cu"]
        return steps, ("-shared", "-cudart=static")
    flags, steps = (*CXX_FLAGS, *extra), []
    for source in (p for p in _files(kind) if p.suffix == ".cpp"):
        if source.stem == "entry":
            steps.append((source, "entry.o", flags))
            continue
        for name, own in _sets().items():
            special = (*own, *EXACT.get(source.stem, ()), f"-DBLENDKV_ISA={name}")
            steps.append((source, f"{source.stem}-{name}.o", (*flags, *special)))
    return steps, ("-shared", _openmp())


def _run(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-LAST_LINES:]
        raise BuildError(f"{Path(command[0]).name} failed with {ran.returncode}:\n" + "\n".join(said))


def compile_library(kind: Kind, out: Path, compiler: Compiler, extra: tuple[str, ...] = ()) -> None:
    """Compile and link the sources of a kind into ``out``, which appears when it is whole.

    Parameters
    ----------
    kind
        ``cpu`` or ``cuda``.
    out
        The library's path; its folder is made.
    compiler
        Of `_compiler`.
    extra
        More flags for every source.

    Raises
    ------
    BuildError
        With the last lines that the compiler wrote.
    """
    steps, link = _steps(kind, extra)
    if not steps:
        raise BuildError(f"there are no sources in {SOURCES / kind}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix="building-") as folder:
        objects = [str(Path(folder) / name) for _, name, _ in steps]
        commands = [
            [*compiler.command, *flags, "-c", str(source), "-o", target]
            for (source, _, flags), target in zip(steps, objects, strict=True)
        ]
        with ThreadPoolExecutor(MOST_JOBS) as pool:
            list(pool.map(_run, commands))
        whole = Path(folder) / out.name
        _run([*compiler.command, *objects, *link, "-o", str(whole)])
        whole.replace(out)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock, so that of several processes one compiles and the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _name(kind: Kind) -> str:
    return f"libblendkv_{kind}.so"


def _prebuilt(kind: Kind) -> Path | None:
    """The library beside the package, if it was made from these sources for this processor."""
    path = PREBUILT / _name(kind)
    try:
        made = json.loads((PREBUILT / f"{kind}.json").read_text())
    except (OSError, ValueError):
        return None
    same = made == {"sources": sources_digest(kind), "machine": platform.machine()}
    return path if same and path.is_file() else None


def _path(kind: Kind) -> Path:
    """Where the library lies; it is compiled if it lies nowhere."""
    ready = _prebuilt(kind)
    if ready is not None:
        return ready
    compiler = _compiler(kind)
    steps, link = _steps(kind, ())
    flags = [" ".join((name, *flags)) for _, name, flags in steps] + [" ".join(link)]
    root = home() / "kernels"
    path = root / _digest(sources_digest(kind), *flags, *compiler.command, compiler.version) / _name(kind)
    if not path.is_file():
        try:
            with _locked(root / f"{path.parent.name}.lock"):
                if not path.is_file():
                    log.info("compiling the %s kernels, once for these sources and this compiler", kind)
                    compile_library(kind, path, compiler)
        except OSError as error:
            raise BuildError(f"the kernels cannot be written to {root}: {error}") from error
    return path


@cache
def _loaded(kind: Kind) -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        library = ctypes.CDLL(str(_path(kind)))
    except BuildError as error:
        return str(error)
    except OSError as error:
        return f"the compiled library does not load: {error}"
    if kind == "cpu":
        library.blendkv_cpu_isa.restype = ctypes.c_char_p
        library.blendkv_cpu_select.argtypes = [ctypes.c_char_p]
        for op in ("attention", "mass", "scatter", "deviation", "encode"):
            function = library[f"blendkv_cpu_{op}"]
            function.argtypes, function.restype = [ctypes.c_char_p], None
    return library


def library(kind: Kind) -> ctypes.CDLL:
    """The kernels' compiled library; compiled on the first call, which takes up to half a minute.

    Parameters
    ----------
    kind
        ``cpu`` or ``cuda``.

    Raises
    ------
    BuildError
        If there is no compiler, or it fails, or the result does not load.
    """
    loaded = _loaded(kind)
    if isinstance(loaded, str):
        raise BuildError(loaded)
    return loaded


def why_not(kind: Kind) -> str | None:
    """Why there is no library of a kind here; None if there is one. The first call may compile."""
    loaded = _loaded(kind)
    return loaded if isinstance(loaded, str) else None


def isa() -> str:
    """Which of `INSTRUCTION_SETS` the CPU's kernels run with."""
    return str(library("cpu").blendkv_cpu_isa().decode())


def prebuild(kind: Kind) -> Path:
    """Compile a library into the folder beside the package.

    Raises
    ------
    BuildError
        As for `library`.
    """
    path = PREBUILT / _name(kind)
    compile_library(kind, path, _compiler(kind))
    made = {"sources": sources_digest(kind), "machine": platform.machine()}
    (PREBUILT / f"{kind}.json").write_text(json.dumps(made))
    return path


def main(kinds: list[str]) -> int:
    """Prebuild the kinds that are named."""
    if not kinds or any(kind not in ("cpu", "cuda") for kind in kinds):
        print("usage: python -m blendkv.kernels.build cpu [cuda]", file=sys.stderr)
        return 2
    try:
        for kind in kinds:
            print(prebuild(kind))  # type: ignore[arg-type]
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
