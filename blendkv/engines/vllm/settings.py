"""What ``kv_connector_extra_config`` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from blendkv.blend import parse_mode
from blendkv.blend.gate import DEFAULT_MODE
from blendkv.config import parse_bytes
from blendkv.errors import InputError
from blendkv.market.admission import TARGETS, AdmissionSettings
from blendkv.market.policies import POLICIES
from blendkv.store.codecs import CODECS
from blendkv.tenants import tenant_tag


@dataclass(frozen=True)
class ConnectorSettings:
    """Options of the connector, checked.

    Attributes
    ----------
    store
        Folder of the store.
    codec
        How chunk KVs are stored (docs/codecs.md); None: as the store was ingested, or raw. Those of another codec never
        match.
    memory
        Limit of the store's memory tier in the engine's process, such as ``2GB``.
    mode
        Mode of requests that name none; None: the one that the quality gate's verdict names, or
        ``blend:head_query@0.05`` for a model that was not measured.
    all_requests
        Blend also requests that carry no ``blendkv`` parameters: their chunks are found by content. Their KV then
        goes into the prefix cache without a salt: every unsalted answer of this engine may rest on blended KV.
    min_saving
        Share of the prefill rows that a blend must save, else the request is prefilled; below 0: blend always.
    step_tokens
        Most rows that blends run through the model in one step; by default ``max_num_batched_tokens``.
    compute_tokens
        Most tokens of missing chunks that are computed in one step.
    load_seconds
        How long a request waits for its chunk KV to be read into host memory before it is prefilled in full.
    require_gate
        Prefill in full what the quality gate has not passed: everything, if it has not measured the model.
    ignore_gate
        Blend whatever the verdict says: for measuring a model again.
    tenant
        Name of the tenant whose chunks requests use that name none (`blendkv.tenants`); without it, those of none.
    policy
        By which rule that memory gives chunks up (`blendkv.market.policies`); None: the usual one. Not a daemon's.
    admission
        Hold requests back that would push out of vLLM's prefix cache what is worth more than they are
        (`blendkv.engines.vllm.admission`).
    targets
        With ``admission``: seconds that a request of a workload class is held at most, where they are not
        `blendkv.market.admission.TARGETS`.
    """

    store: Path
    codec: str | None = None
    memory: str = "2GB"
    mode: str | None = None
    all_requests: bool = False
    min_saving: float = 0.1
    step_tokens: int | None = None
    compute_tokens: int = 512
    load_seconds: float = 10.0
    require_gate: bool = False
    ignore_gate: bool = False
    tenant: str | None = None
    policy: str | None = None
    admission: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parse_bytes(self.memory)
        if self.codec is not None:
            CODECS.get(self.codec)
        if self.policy is not None:
            POLICIES.get(self.policy)
        if parse_mode(self.default_mode).name not in ("reuse", "blend"):
            raise InputError(f"the connector's mode is {self.mode!r}; give reuse or blend:SELECTOR@BUDGET")
        tenant_tag(self.tenant)  # a name that cannot be one is refused before a model is loaded
        for name in ("require_gate", "ignore_gate", "admission"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"the connector's {name} is {getattr(self, name)!r}; true or false is allowed")
        if self.require_gate and self.ignore_gate:
            raise InputError("the connector's require_gate and ignore_gate are both set; drop one of them")
        for name in ("step_tokens", "compute_tokens", "load_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"the connector's {name} is {value}; more than 0 is allowed")
        if self.targets and not self.admission:
            raise InputError("the connector's targets are given without admission; set admission to true, or drop them")
        AdmissionSettings({**TARGETS, **self.targets})  # likewise
        if not self.min_saving < 1:
            raise InputError(f"the connector's min_saving is {self.min_saving}; less than 1 is allowed")

    @property
    def default_mode(self) -> str:
        """Mode of requests that name none, as far as these settings know."""
        return self.mode or DEFAULT_MODE

    @property
    def tag(self) -> str:
        """The tag of ``tenant``; empty without one."""
        return tenant_tag(self.tenant)

    @property
    def memory_bytes(self) -> int:
        """``memory`` in bytes."""
        return parse_bytes(self.memory)

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Check ``kv_connector_extra_config``.

        Raises
        ------
        InputError
            If the store is missing, or an option is unknown or out of range.
        """
        known = {f.name: f.type for f in fields(cls)}
        if unknown := sorted(set(extra) - set(known)):
            raise InputError(f"unknown in kv_connector_extra_config: {unknown}; allowed: {', '.join(known)}")
        if not extra.get("store"):
            raise InputError('BlendConnector needs kv_connector_extra_config={"store": FOLDER}: name the store')
        try:
            return cls(**{**extra, "store": Path(str(extra["store"])).expanduser()})
        except TypeError as error:
            raise InputError(f"kv_connector_extra_config {dict(extra)} has a value of a wrong type: {error}") from error
