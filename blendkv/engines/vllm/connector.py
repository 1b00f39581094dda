"""`BlendConnector`: vLLM asks it for KV of a prompt, it answers with blended chunk KV.

A request is blended when its ``kv_transfer_params`` hold ``{"blendkv": {...}}`` (`blendkv.engines.vllm.plan`) and, with
prefix caching on, a ``cache_salt`` that begins with the mode: approximate KV is never found by an exact request, nor by
other settings. Every other request, and every fault on the way, is prefilled in full and counted.

vLLM makes one of these in its scheduler's process and one in each worker's; `BlendScheduler` and `BlendWorker` do the
work of the two halves.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from blendkv.blend.gate import Gate
from blendkv.engines.fingerprint import fingerprint_folder
from blendkv.engines.vllm import stores
from blendkv.engines.vllm.admission import Admission
from blendkv.engines.vllm.holdings import Holdings
from blendkv.engines.vllm.messages import BlendMetadata, Load, WorkerReport, reason_of
from blendkv.engines.vllm.plan import Facts, Planner
from blendkv.engines.vllm.plugin import activate
from blendkv.engines.vllm.prefetch import Prefetcher
from blendkv.engines.vllm.scheduler import BlendScheduler
from blendkv.engines.vllm.settings import ConnectorSettings
from blendkv.engines.vllm.stats import BlendProm, BlendStats
from blendkv.engines.vllm.worker import BlendWorker, bos_token_id, described, model_folder
from blendkv.errors import InputError, StoreError, UnsupportedModelError
from blendkv.library import store_codec
from blendkv.matching import ChunkFinder, TenantFinders
from blendkv.store.codecs import check_codec

activate()
_log = logging.getLogger(__name__)
_SCHEDULERS: weakref.WeakValueDictionary[str, BlendScheduler] = weakref.WeakValueDictionary()
"""Scheduler's halves of this process by vLLM's engine id.

A worker in the same process tells them at once: a request that ends in its first step ends before that step's output,
with the worker's report, is looked at.
"""


class BlendConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module; `ConnectorSettings` says what ``kv_connector_extra_config`` may hold.

    Raises
    ------
    InputError
        If vLLM is configured in a way that does not work with it.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config)
        self.settings = ConnectorSettings.read(self._kv_transfer_config.kv_connector_extra_config)
        if self.settings.admission and not vllm_config.cache_config.enable_prefix_caching:
            raise InputError("the connector's admission is on without prefix caching: turn enable_prefix_caching on")
        self.outcomes: Counter[str] = Counter()
        self._report = WorkerReport()
        self._failed_blocks: set[int] = set()
        self._blender: BlendWorker | None = None
        self._refused: UnsupportedModelError | None = None
        self._fingerprint = fingerprint_folder(model_folder(vllm_config))
        self.codec = self.settings.codec or store_codec(self.settings.store, self._fingerprint)
        check_codec(self.codec, [vllm_config.model_config.get_head_size()])
        self._scheduler: BlendScheduler | None = None
        self._apart = vllm_config.parallel_config.distributed_executor_backend != "uni"  # workers are other processes
        idle_memory = self._apart and role == KVConnectorRole.SCHEDULER
        memory = 0 if idle_memory else self.settings.memory_bytes
        self._store = stores.acquire(self.settings.store, memory, self.settings.policy)
        self._closed = False
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler()
            _SCHEDULERS[str(self._kv_transfer_config.engine_id)] = self._scheduler

    # Scheduler

    def _make_scheduler(self) -> BlendScheduler:
        config = self._vllm_config
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        bos = bos_token_id(config)
        caching, tenant = bool(config.cache_config.enable_prefix_caching), self.settings.tag
        facts = Facts(self._fingerprint, dtype, bos, caching, self.codec, tenant)

        def finder_of(tag: str) -> ChunkFinder:
            return ChunkFinder(self._store, self._fingerprint, dtype, bos, self.codec, tag)

        finder = TenantFinders(finder_of, tenant)
        try:
            finder.refresh()  # the first one reads the whole index
        except StoreError as error:  # a daemon that does not answer now; each step tries again
            _log.warning("chunks cannot be found by content yet: %s", error)
        gate, settings = self._gate(), self.settings
        if settings.mode is None:
            settings = replace(settings, mode=str(gate.mode(None)))
        planner = Planner(settings, facts, self._store, finder)
        remembered = self.settings.memory_bytes if self._apart else 0
        prefetcher = Prefetcher(self._store, self.settings.load_seconds, remembered)
        step_tokens = self.settings.step_tokens or config.scheduler_config.max_num_batched_tokens
        return BlendScheduler(settings, planner, prefetcher, step_tokens, finder.refresh, gate)

    def _gate(self) -> Gate:
        if self.settings.ignore_gate:
            return Gate()
        model = str(model_folder(self._vllm_config))
        return Gate.read(self.settings.store, self._fingerprint, model, self.settings.require_gate, self.codec)

    @property
    def scheduler(self) -> BlendScheduler:
        """The scheduler's half, in the scheduler's process."""
        assert self._scheduler is not None
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Look into vLLM's prefix cache from now on, if requests may be held back for what lies there."""
        if self.settings.admission:
            sizes = [group.kv_cache_spec.block_size for group in self._kv_cache_config.kv_cache_groups]
            self.scheduler.admission = Admission(Holdings(gpu_block_pool, sizes), self.settings.targets)

    def on_new_request(self, request: Any) -> None:
        """A request waits from now on."""
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All of the prompt but its last token, if the request is to be blended; None while that is not known yet."""
        return self.scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks of a request that will be blended."""
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> BlendMetadata:
        """Hand this step's work to the worker."""
        return self.scheduler.metadata(scheduler_output.num_scheduled_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear from the workers."""
        if isinstance(connector_output.kv_connector_worker_meta, WorkerReport):
            self.scheduler.heard(connector_output.kv_connector_worker_meta)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; say in its ``kv_transfer_params`` what became of it."""
        done = self.scheduler.finished(request, block_ids)
        return False, None if done is None else {"blendkv": done}

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while chunks wait to be computed."""
        return self.scheduler.has_work

    # Statistics

    def get_kv_connector_stats(self) -> BlendStats | None:
        """Figures since the last call; the scheduler's half has them all."""
        if self._scheduler is None or self._scheduler.stats.is_empty():
            return None
        taken, self._scheduler.stats = self._scheduler.stats, BlendStats()
        return taken

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlendStats:
        """Figures from another process."""
        return BlendStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> BlendProm:
        """Prometheus counters for vLLM's ``/metrics``."""
        return BlendProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Probe the model, now that it is there: what cannot be blended is known, and said, from the start."""
        try:
            self.blender()
        except UnsupportedModelError as error:
            _log.warning("this model is not blended, every request is prefilled in full: %s", error)

    def blender(self) -> BlendWorker:
        """The worker's half.

        Raises
        ------
        UnsupportedModelError
            If the model cannot be blended; it is probed once.
        """
        if self._refused is not None:
            raise self._refused
        if self._blender is None:
            try:
                self._blender = BlendWorker(
                    self._vllm_config, self._kv_cache_config, self._store, self._fingerprint, self.codec
                )
            except UnsupportedModelError as error:
                self._refused, self._report.refused = error, str(error)
                raise
        return self._blender

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do this step's work; a fault becomes a full prefill of the request it hit."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata)
        for work in metadata.computes:
            try:
                self.outcomes["computed"] += self.blender().compute(work)
            except Exception as error:  # whoever needs the chunk computes it again, or is prefilled
                self._count(reason_of(error), error)
        for load in metadata.loads:
            try:
                report = self.blender().blend(load)
            except Exception as error:  # whatever it is, the request can be prefilled
                self._fail(load, error)
            else:
                self.outcomes["blended"] += 1
                self._report.reports[load.request_id] = described(report)
        near = _SCHEDULERS.get(str(self._kv_transfer_config.engine_id))
        if near is not None:
            near.heard(self._report)
            self._report = WorkerReport()

    def _fail(self, load: Load, error: Exception) -> None:
        """Have vLLM prefill the request, or prefill it here where vLLM cannot be told."""
        reason = reason_of(error)
        self._count(reason, error)
        self._report.failures[load.request_id] = reason
        groups = self._kv_cache_config.kv_cache_groups
        if len(groups) > 1:  # vLLM takes reports of failed blocks for models with one KV cache group only
            self.blender().prefill(load)
            return
        block_size = groups[0].kv_cache_spec.block_size
        self._failed_blocks.update(load.block_ids[0][load.written // block_size :])

    def _count(self, reason: str, error: Exception) -> None:
        self.outcomes[reason] += 1
        if self.outcomes[reason] == 1:
            _log.warning("prefilled in full (%s; said once per reason): %s", reason, error, exc_info=error)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose KV did not arrive since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What was done since the last call, for a scheduler's half in another process."""
        taken, self._report = self._report, WorkerReport()
        return taken or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was written in `start_load_kv`."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is read from pages."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        """Give the store back, once."""
        if self._scheduler is not None:
            self._scheduler.close()
        if not self._closed:
            self._closed = True
            stores.release(self.settings.store)


def _check(config: VllmConfig) -> None:
    """Refuse configurations that would not work, before a model is loaded for nothing."""
    policy = config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise InputError(f"kv_load_failure_policy is {policy!r}; set 'recompute', or a fault would end requests")
    parallel = config.parallel_config
    sizes = "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"
    for name in sizes:
        if (size := getattr(parallel, name, 1)) > 1:
            raise InputError(f"{name} is {size}; BlendConnector needs all layers and tokens in each worker: use 1")
