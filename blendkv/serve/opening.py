"""Opens what a server needs: the engine once, and a pipeline per store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from blendkv.blend import parse_mode
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import InputError
from blendkv.pipeline import TOP_K, RagPipeline
from blendkv.retrieval.collection import Collection
from blendkv.serve.backends import Backends, served_name

EngineKind = Literal["torch", "vllm"]


@dataclass(frozen=True)
class Opening:
    """What to open; the fields are those of `RagPipeline.from_store`.

    ``model`` None means the first store's own; ``served`` is the model's name in requests;
    ``engine_arguments`` are more of vLLM's own.
    """

    stores: Mapping[str, Path]
    model: str | None = None
    served: str | None = None
    engine: EngineKind = "torch"
    mode: str | None = None
    top_k: int = TOP_K
    embedder: str | None = None
    memory: str = "2GB"
    disk: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    require_gate: bool = False
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    tenant: str | None = None
    policy: str | None = None


def model_of(opening: Opening) -> str:
    """The model asked for, or the first store's own, or ``demo``."""
    if opening.model is not None:
        return opening.model
    for folder in opening.stores.values():
        if (folder / "collection.sqlite").is_file():
            with Collection(folder) as collection:
                return str(collection.get_meta("model") or "demo")
    return "demo"


def check_mode(opening: Opening) -> None:
    """Refuse a wrong mode before a model is loaded."""
    if opening.mode is not None:
        parse_mode(opening.mode)


async def open_backends(opening: Opening) -> Backends:
    """Open what ``opening.engine`` names; see `open_torch` and `blendkv.serve.vllm_app.open_vllm`.

    Raises
    ------
    InputError, MissingDependencyError, StoreError, EngineError
        If that fails.
    """
    if opening.engine == "vllm":
        from blendkv.serve.vllm_app import open_vllm  # imports vLLM

        return await open_vllm(opening)
    if opening.engine_arguments:
        raise InputError("--engine-arg is for --engine vllm; drop it")
    return await open_torch(opening)


async def open_torch(opening: Opening) -> Backends:
    """Load the model and open the stores over it, without blocking the event loop.

    Raises
    ------
    InputError, StoreError
        As `RagPipeline.from_store`.
    """
    return await asyncio.to_thread(_open_torch, opening)


def _open_torch(opening: Opening) -> Backends:
    check_mode(opening)
    model = model_of(opening)
    engine = TorchEngine.load(model, dtype=opening.dtype, device=opening.device)
    return Backends(served_name(model, opening.served), "torch", open_pipelines(opening, engine, opening.memory))


def open_pipelines(opening: Opening, engine: Any, memory: str) -> dict[str, RagPipeline]:
    """A pipeline per store over one engine; all of them, or none. ``memory`` limits each store's memory tier."""
    with ExitStack() as opened:
        pipelines = {
            name: opened.enter_context(
                RagPipeline.from_store(
                    folder, mode=opening.mode, top_k=opening.top_k, embedder=opening.embedder, memory=memory,
                    disk=opening.disk, engine=engine, require_gate=opening.require_gate, tenant=opening.tenant,
                    policy=opening.policy,
                )
            )
            for name, folder in opening.stores.items()
        }  # fmt: skip
        opened.pop_all()
    return pipelines
