"""Entry point of ``vllm.general_plugins``: how the connector finds the model that vLLM loads.

Every decoder of vLLM's registry is registered again as a subclass that is the same in all respects, except that it
remembers its instance when a `BlendConnector` is configured, and forgets it with the model. Nothing else changes.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

CONNECTOR = "BlendConnector"
_LOADED: list[weakref.ref[nn.Module]] = []


def register() -> None:
    """Called by vLLM in each of its processes before a model is loaded."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    for architecture in _TEXT_GENERATION_MODELS:
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")


def loaded_model() -> nn.Module:
    """The model that this process loaded last.

    Raises
    ------
    LookupError
        If there is none.
    """
    model = _LOADED[-1]() if _LOADED else None
    if model is None:
        raise LookupError("no model was loaded through BlendKV's plugin: is it switched off by VLLM_PLUGINS?")
    return model


def __getattr__(name: str) -> Any:
    """Build the remembering subclass of an architecture when vLLM asks for it."""
    from importlib import import_module

    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    if name not in _TEXT_GENERATION_MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, class_name = _TEXT_GENERATION_MODELS[name]
    base = getattr(import_module(f"vllm.model_executor.models.{module}"), class_name)

    def remember(self: nn.Module, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix, **kwargs)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == CONNECTOR:
            _LOADED[:] = [weakref.ref(self)]

    made = type(name, (base,), {"__init__": remember, "__module__": __name__})
    setattr(sys.modules[__name__], name, made)
    return made
