"""`BlendConnector`: vLLM asks it for KV of a prompt, it answers with blended chunk KV.

A request is blended when its ``kv_transfer_params`` hold
``{"blendkv": {"segments": [[kind, tokens], ...], "mode": SPEC}}`` and, with prefix caching on, a ``cache_salt`` that
begins with the mode: approximate KV is never found by an exact request, nor by other settings. Every other request,
and every fault on the way, is prefilled in full and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.model_executor.models.utils import extract_layer_index

from blendkv.blend import BlendSettings, parse_mode
from blendkv.engines.vllm.worker import BlendWorker, Load
from blendkv.errors import InputError, UnsupportedModelError

_log = logging.getLogger(__name__)
_KINDS = ("system", "chunk", "history", "query")


@dataclass
class BlendMetadata(KVConnectorMetadata):
    """What the scheduler tells the worker in one step."""

    loads: list[Load] = field(default_factory=list)


class _NotBlendedError(InputError):
    """Why a request is prefilled in full; ``reason`` is one of a few words, to be counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class _Plan:
    segments: tuple[tuple[str, int], ...]
    settings: BlendSettings


class BlendConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. ``kv_connector_extra_config``: ``store``, the folder of the store.

    ``outcomes`` counts requests: ``blended``, and the reasons for full prefill.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.outcomes: Counter[str] = Counter()
        self._plans: dict[str, _Plan | None] = {}
        self._loads: list[Load] = []
        self._failed_blocks: set[int] = set()
        self._worker: BlendWorker | None = None
        self._refused: UnsupportedModelError | None = None
        self._prefix_caching = bool(vllm_config.cache_config.enable_prefix_caching)
        self._groups = len(kv_cache_config.kv_cache_groups)
        if vllm_config.parallel_config.world_size > 1:
            raise InputError("BlendConnector runs in one worker; parallel sizes above 1 are not built yet: use 1")
        policy = self._kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            raise InputError(f"kv_load_failure_policy is {policy!r}; set 'recompute', or a fault would end requests")
        folder = self._kv_transfer_config.kv_connector_extra_config.get("store")
        if not folder:
            raise InputError(
                'BlendConnector needs kv_connector_extra_config={"store": FOLDER}: name the store\'s folder'
            )
        self._folder = folder

    # Scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All of the prompt but its last token, if the request can be blended. Asked again, it does no new work."""
        if request.request_id not in self._plans:
            self._plans[request.request_id] = self._plan(request)
        if self._plans[request.request_id] is None:
            return 0, False
        return max(0, request.num_prompt_tokens - 1 - num_computed_tokens), False

    def _plan(self, request: Any) -> _Plan | None:
        wanted = (request.kv_transfer_params or {}).get("blendkv")
        if wanted is None:
            return None
        try:
            return self._checked(wanted, request)
        except _NotBlendedError as error:
            self._full_prefill(error.reason, error)
        except (InputError, TypeError, ValueError, KeyError, IndexError) as error:
            self._full_prefill("parameters", error)
        return None

    def _checked(self, wanted: dict[str, Any], request: Any) -> _Plan:
        segments = tuple((str(kind), int(tokens)) for kind, tokens in wanted["segments"])
        mode = parse_mode(wanted.get("mode", "blend:head_query@0.05"))
        salt = request.cache_salt
        if mode.settings is None:
            raise _NotBlendedError("mode", "the mode is full: leave blendkv out of kv_transfer_params")
        if self._prefix_caching and not (salt or "").startswith(str(mode)):
            raise _NotBlendedError(
                "cache_salt", f"cache_salt is {salt!r}; with prefix caching it must begin with {mode}"
            )
        if self._groups != 1:
            raise _NotBlendedError("groups", f"the model has {self._groups} KV cache groups; one is blended in vLLM")
        if request.prompt_token_ids is None or request.mm_features or request.lora_request is not None:
            raise _NotBlendedError("input", "embeddings, multimodal input and LoRA are not blended")
        if sum(n for _, n in segments) != request.num_prompt_tokens or min(n for _, n in segments) < 1:
            raise _NotBlendedError("segments", f"{segments} are not the prompt's {request.num_prompt_tokens} tokens")
        if segments[-1][0] != "query" or segments[-1][1] < 2 or not {k for k, _ in segments} <= set(_KINDS):
            raise _NotBlendedError("segments", f"{segments}: kinds are {', '.join(_KINDS)}; a query of 2 ends them")
        return _Plan(segments, mode.settings)

    def _full_prefill(self, reason: str, error: BaseException) -> None:
        self.outcomes[reason] += 1
        if self.outcomes[reason] == 1:
            _log.warning("prefilled in full (said once per reason): %s", error)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks of a request that will be blended."""
        plan = self._plans.get(request.request_id)
        if plan is None or num_external_tokens == 0:
            return
        total = request.num_prompt_tokens - 1
        cut = (*plan.segments[:-1], (plan.segments[-1][0], plan.segments[-1][1] - 1))
        ids = tuple(request.prompt_token_ids[:total])
        written = total - num_external_tokens
        self._loads.append(Load(request.request_id, ids, cut, plan.settings, tuple(blocks.get_block_ids()[0]), written))

    def build_connector_meta(self, scheduler_output: Any) -> BlendMetadata:
        """Hand this step's loads to the worker."""
        loads, self._loads = self._loads, []
        return BlendMetadata(loads)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request."""
        self._plans.pop(request.request_id, None)
        return False, None

    # Worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Blend this step's loads before the forward pass; a fault becomes a full prefill of that request."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata)
        for load in metadata.loads:
            try:
                self._blender().blend(load, self._pages(forward_context))
                self.outcomes["blended"] += 1
            except Exception as error:  # whatever it is, the request can be prefilled
                self._failed_blocks.update(load.block_ids[load.written // self._vllm_config.cache_config.block_size :])
                self._full_prefill(type(error).__name__, error)

    def _blender(self) -> BlendWorker:
        """The worker's half, made at the first request; a model that was refused once is not probed again."""
        if self._refused is not None:
            raise self._refused
        if self._worker is None:
            try:
                self._worker = BlendWorker(self._vllm_config, self._folder)
            except UnsupportedModelError as error:
                self._refused = error
                raise
        return self._worker

    def _pages(self, forward_context: Any) -> list[Any]:
        """Attention layers by index."""
        named = forward_context.no_compile_layers
        return [named[n] for n in sorted((n for n in named if hasattr(named[n], "kv_cache")), key=extract_layer_index)]

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose KV did not arrive since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was written in `start_load_kv`."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is read from pages."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        """Close the store."""
        if self._worker is not None:
            self._worker.store.close()
