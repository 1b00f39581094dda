"""What `VllmEngine` asks of vLLM's worker processes, by ``collective_rpc``: chunk KV is computed where the model is.

Given to vLLM as ``worker_extension_cls``. Arguments and results are plain values; an error of ours comes back as
``{"error": [class name, message]}``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from blendkv.engines.base import kv_bytes_per_token
from blendkv.errors import BlendKVError, DamagedChunkError, StoreError, UnsupportedModelError
from blendkv.types import as_token_ids

QUALIFIED_NAME = f"{__name__}.BlendExtension"


class BlendExtension:
    """Methods that every worker gets."""

    def blendkv_describe(self) -> dict[str, Any]:
        """Whether the model can be blended (``unsupported``: why not), the codec, and a token's bytes of KV.

        ``kv_bytes_per_token`` counts K and V as the model has them, ``stored_bytes_per_token`` as the store has them.
        """
        return _answered(lambda: _describe(self.vllm_config.model_config))  # type: ignore[attr-defined]

    def blendkv_precompute(
        self, chunks: list[list[int]], kind: str, prefix: list[int], tenant: str = ""
    ) -> dict[str, Any]:
        """Compute the chunks that the store lacks behind a recipe's prefix, and wait until they are stored."""
        return _answered(lambda: _precompute(chunks, kind, prefix, tenant))


def _answered(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        with torch.inference_mode():
            return call()
    except DamagedChunkError as error:
        return {"error": [StoreError.__name__, str(error)]}
    except BlendKVError as error:
        return {"error": [type(error).__name__, str(error)]}


def _connector() -> Any:
    """The connector of this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def _blender() -> Any:
    """Its worker's half."""
    return _connector().blender()


def _describe(model: Any) -> dict[str, Any]:
    codec = _connector().codec
    try:
        runner = _blender().runner
    except UnsupportedModelError as error:
        nothing = {"kv_bytes_per_token": None, "stored_bytes_per_token": None}
        return {"unsupported": str(error), "codec": codec, **nothing}
    share = model.get_total_num_kv_heads() / runner.layers[0].kv_heads  # a rank has its own heads only
    return {
        "unsupported": None,
        "codec": codec,
        "kv_bytes_per_token": round(kv_bytes_per_token(runner) * share),
        "stored_bytes_per_token": round(kv_bytes_per_token(runner, codec) * share),
    }


def _precompute(chunks: list[list[int]], kind: str, prefix: list[int], tenant: str) -> dict[str, Any]:
    library = _blender().library(kind, as_token_ids(prefix), tenant)
    before = library.counts.computed, library.counts.computed_tokens
    library.precompute([as_token_ids(c) for c in chunks], None)
    return {
        "computed": library.counts.computed - before[0],
        "computed_tokens": library.counts.computed_tokens - before[1],
    }
