"""What a pipeline over a folder begins with: an engine by its name, and the folder tied to the engine's model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from blendkv.engines.base import Engine
from blendkv.errors import InputError, StoreMismatchError
from blendkv.library import store_codec
from blendkv.prompt import DEFAULT_SYSTEM
from blendkv.retrieval.collection import Collection
from blendkv.store.codecs import RAW
from blendkv.types import RecipeKind

CODEC = "codec"
"""What the collection calls the codec of its chunk KVs; see `blendkv.library.store_codec`."""
_log = logging.getLogger(__name__)


def check_store(path: str | Path) -> None:
    """Refuse a path that holds no store, so that commands that only read do not make one.

    Raises
    ------
    InputError
        If there is none.
    """
    if not any((Path(path) / name).is_file() for name in ("index.sqlite", "collection.sqlite")):
        raise InputError(f"{path} holds no store; make one with: blendkv ingest CORPUS --store {path}")


def load_engine(
    kind: str, model: str, store: Path, *, dtype: str, device: str, codec: str | None, require_gate: bool
) -> Engine:
    """Load an engine by its name; what an engine needs is imported with it.

    Raises
    ------
    InputError
        If there is no such engine.
    ModelLoadError, MissingDependencyError
        If the model cannot be loaded, or the engine is not installed.
    """
    if kind == "torch":
        from blendkv.engines.torch.engine import TorchEngine

        return TorchEngine.load(model, dtype=dtype, device=device)
    if kind == "vllm":
        from blendkv.engines.vllm.engine import VllmEngine

        connector = {"require_gate": require_gate, "codec": codec}
        return VllmEngine.load(model, store=store, dtype=dtype, connector=connector)
    raise InputError(f"unknown engine {kind!r}; allowed: torch, vllm")


def start_planner(engine: Engine, folder: Path) -> None:
    """Let the engine plan its loads (docs/planner.md); what both take is measured now."""
    from blendkv.engines.torch.warm_up import start_planner as start

    start(engine, folder)


def claim(
    collection: Collection, engine: Engine, recipe: RecipeKind | None, codec: str | None, system: str | None
) -> dict[str, Any]:
    """Tie the collection to the model that makes its token ids, and return its recipe, codec and system message.

    Raises
    ------
    StoreMismatchError
        If another model made it.
    InputError
        If the recipe is none.
    """
    made_by = collection.get_meta("fingerprint")
    if made_by is not None and made_by != engine.fingerprint:
        raise StoreMismatchError(
            f"{collection.path} was made with model {collection.get_meta('model')!r} (fingerprint {made_by[:12]}), "
            f"given {engine.name!r} ({engine.fingerprint[:12]}): use that model, or ingest into another store"
        )
    if recipe not in (None, "system", "bos"):
        raise InputError(f"unknown recipe {recipe!r}; allowed: system, bos")
    own = store_codec(collection.path, engine.fingerprint)
    if made_by is not None and codec not in (None, own):
        _log.warning(
            "%s was ingested with codec %s, opened with %s: chunk KVs of the other codec never match, so they are "
            "computed anew as they are needed; leave the codec out to use them, or ingest with it to change the store",
            *(collection.path, own, codec),
        )
    settings = {
        "recipe": recipe or collection.get_meta("recipe") or "system",
        "system": system if system is not None else collection.get_meta("system", DEFAULT_SYSTEM),
    }
    if made_by is None:
        values = {"fingerprint": engine.fingerprint, "model": engine.name, **settings}
        if codec is None and own != RAW:
            _log.warning(
                "%s stores chunk KVs with codec %s: calibrate chose it for this model; another: ingest with --codec",
                *(collection.path, own),
            )
            values[CODEC] = own
        for name, value in values.items():
            collection.set_meta(name, value)
    return {**settings, "codec": codec or own}
