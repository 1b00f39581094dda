"""How the connector finds the model that vLLM loads, without a change to vLLM.

vLLM hands a connector its KV pages but not its model. When a `BlendConnector` is configured, every decoder of vLLM's
registry is registered again as a subclass that is the same in all respects, except that it remembers its instance.
vLLM imports the connector's module while it makes its configuration, before any process loads a model: that import
calls `activate` there, and the entry point of ``vllm.general_plugins`` does so in the processes that it starts.
Without the connector, an installed BlendKV registers nothing.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

from torch import nn

from blendkv.errors import UnsupportedModelError

ACTIVE = "BLENDKV_VLLM_ACTIVE"
"""Environment variable that tells vLLM's worker processes, which inherit it, that the connector is configured."""
_LOADED: list[weakref.ref[nn.Module]] = []
_REGISTERED: list[bool] = []


def register() -> None:
    """Entry point: called by vLLM in each of its processes before a model is loaded."""
    if os.environ.get(ACTIVE) == "1":
        activate()


def activate() -> None:
    """Register the remembering subclasses in this process, once, and tell the processes that it starts."""
    os.environ[ACTIVE] = "1"
    if _REGISTERED:
        return
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    for architecture in _TEXT_GENERATION_MODELS:
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")
    _REGISTERED.append(True)


def remember(model: nn.Module) -> None:
    """Make ``model`` the one that `loaded_model` returns, for as long as it lives."""
    _LOADED[:] = [weakref.ref(model)]


def loaded_model() -> nn.Module:
    """The model that this process loaded last.

    Raises
    ------
    UnsupportedModelError
        If there is none.
    """
    model = _LOADED[-1]() if _LOADED else None
    if model is None:
        raise UnsupportedModelError(
            "no model was loaded through BlendKV's plugin; if VLLM_PLUGINS is set, add 'blendkv' to it, or give vLLM "
            "worker_cls='blendkv.engines.vllm.worker_class.GpuWorker' (CpuWorker on CPU)"
        )
    return model


def __getattr__(name: str) -> Any:
    """Build the remembering subclass of an architecture when vLLM asks for it."""
    from importlib import import_module

    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    if name not in _TEXT_GENERATION_MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, class_name = _TEXT_GENERATION_MODELS[name]
    base = getattr(import_module(f"vllm.model_executor.models.{module}"), class_name)

    def build(self: nn.Module, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix, **kwargs)
        if not prefix:  # a model inside another one, such as a drafter's, has a prefix
            remember(self)

    made = type(name, (base,), {"__init__": build, "__module__": __name__})
    setattr(sys.modules[__name__], name, made)
    return made
