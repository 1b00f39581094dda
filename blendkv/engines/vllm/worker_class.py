"""vLLM workers that remember their model: the way out where the plugin cannot reach it.

``worker_cls="blendkv.engines.vllm.worker_class.CpuWorker"`` (or ``GpuWorker``) serves models whose class is not in
vLLM's own registry, and installations that switch plugins off.
"""

from __future__ import annotations

from typing import Any

from blendkv.engines.vllm.plugin import remember


def __getattr__(name: str) -> Any:
    """Build the worker class on demand: the CPU's and the GPU's modules do not import on each other's machines."""
    if name == "CpuWorker":
        from vllm.v1.worker.cpu_worker import CPUWorker as base
    elif name == "GpuWorker":
        from vllm.v1.worker.gpu_worker import Worker as base
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are CpuWorker and GpuWorker")

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        base.load_model(self, *args, **kwargs)
        remember(self.get_model())

    made = type(name, (base,), {"load_model": load_model, "__module__": __name__})
    globals()[name] = made
    return made
