"""Compile the Triton kernels for a GPU that need not be there: ``python compile_triton.py sm_90``.

The backends run with tensors of the meta device, whose values cannot be read: a backend that waits for the device
fails here. Launches compile and do nothing else. One line is printed per kernel, and the exit code is 1 if one needs
more shared memory than its GPU has.
"""

import random
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from blendkv.kernels import jit
from blendkv.kernels.attention import triton as attention
from blendkv.kernels.deviation import triton as deviation
from blendkv.kernels.mass import triton as mass
from blendkv.kernels.scatter import triton as scatter
from blendkv.kernels.testing import attention_case, scatter_case
from blendkv.kernels.types import Move

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 99 * 1024),  # sm_86 and sm_89 run the same code with less shared memory
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


class Driver:
    """What a launch asks of a GPU's driver before it compiles."""

    def __init__(self, target):
        self.target = target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target


def attend(queries=40, keys=500, *, paged=False, stored=False, weighed=False, **form):
    case = attention_case(random.Random(0), queries, keys, device="meta", group=4, **form)
    k, v = (case.paged, None) if paged else (case.k, case.v)
    lse = attention.run(
        case.q, k, v, case.positions, case.params, want_lse=True, stored=case.stored if stored else None
    ).lse
    if weighed:
        weights = torch.empty(keys, case.k.shape[1], device="meta")
        mass.run(case.q, k, case.positions, case.params, lse, "max", weigh_by=weights)


def move(**form):
    case = scatter_case(random.Random(0), 100, device="meta", dtype=torch.bfloat16, **form)
    scatter.run([Move(case.k, case.v, case.table, case.slots, case.k_bias, case.v_bias)], case.k_out, case.v_out)


def everything():
    """The widest tiles of every kind, and each feature once."""
    half, brain = torch.float16, torch.bfloat16
    attend(head_dim=64, kv_heads=3, dtype=brain, stored=True, weighed=True)
    attend(head_dim=128, dtype=brain, window=100, paged=True, softcap=30.0, sinks=True, weighed=True)
    attend(head_dim=256, dtype=half, stored=True, weighed=True)
    attend(head_dim=80, v_dim=96, dtype=brain, stored=True)
    attend(head_dim=256, stored=True, weighed=True)
    case = attention_case(random.Random(0), 1, 100, device="meta", dtype=brain)
    deviation.run(case.k, case.stored[0], case.v, case.stored[1], use_k=True, use_v=True)
    move(head_dim=128)
    move(head_dim=256, v_dim=64, pairing="interleaved", rotated=64, codec="fp8", paged=True, bias="span")
    move(head_dim=128, v_dim=96, codec="turbo3", bias="span")
    move(head_dim=64, v_dim=256, codec="turbo4", run=True)
    jit.cores = lambda device: 132
    attend(4, 8000, head_dim=128, dtype=brain, sinks=True)


def main():
    target, shared = TARGETS[sys.argv[1]]
    driver.set_active(Driver(target))
    compiled = {}
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        assert all(0 < size < 65536 for size in grid[1:])
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_only
    everything()
    too_large = 0
    for kernel in compiled.values():
        code = {name: len(text) for name, text in kernel.asm.items() if name in ("cubin", "hsaco")}
        assert code
        print(kernel.name, kernel.metadata.num_warps, "warps", kernel.metadata.shared, "bytes of shared memory", code)
        too_large += kernel.metadata.shared > shared
    print(f"{len(compiled)} kernels, {too_large} too large")
    return int(too_large > 0)


if __name__ == "__main__":
    sys.exit(main())
