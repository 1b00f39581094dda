"""What answers: one engine under a pipeline per named store, and which of them a request means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from blendkv.daemon.client import DaemonStore
from blendkv.errors import BlendKVError
from blendkv.observe.collectors import ClientFacts, StoreFacts
from blendkv.pipeline import RagPipeline
from blendkv.serve.errors import ApiError
from blendkv.serve.keys import Client
from blendkv.serve.settings import DEFAULT_STORE
from blendkv.store.door import Store
from blendkv.store.index import Index

RAG = "rag"


@dataclass(frozen=True)
class Backends:
    """The pipelines of a server, all over one engine.

    Attributes
    ----------
    model
        The model's name in requests.
    engine
        Name of the engine's kind: ``torch`` or ``vllm``.
    stores
        Pipelines by the name of their store, in the order of the command line.
    plain
        An ASGI app that serves requests without a collection; None: the engine behind the pipelines does.
    serial
        Whether the engine runs one request at a time.
    shut_down
        Ends the engine, after the stores are closed.
    registry
        The engine's own metrics, shown beside the server's.
    alive
        Whether the engine can still answer.
    """

    model: str
    engine: str
    stores: Mapping[str, RagPipeline]
    plain: ASGIApp | None = None
    serial: bool = True
    shut_down: Callable[[], None] = lambda: None
    registry: Collector | None = None
    alive: Callable[[], bool] = lambda: True

    def of(self, client: Client) -> Backends:
        """What a client may use, over its tenant's own chunk KVs. It is not to be closed.

        Raises
        ------
        InputError
            If its tenant cannot be one.
        """
        if not client.tenant:
            return self
        allowed = self.stores.keys() if client.collections is None else client.collections
        own = {name: p.for_tenant(client.tenant) for name, p in self.stores.items() if name in allowed}
        return replace(self, stores=own)

    @property
    def default(self) -> str:
        """The store that ``true`` means: the one called ``default``, or else the first."""
        return DEFAULT_STORE if DEFAULT_STORE in self.stores else next(iter(self.stores))

    @property
    def models(self) -> list[str]:
        """Names to ask for: the model, the model with the default store, and with each store."""
        named = [f"{self.model}/{RAG}/{name}" for name in self.stores] if len(self.stores) > 1 else []
        return [self.model, f"{self.model}/{RAG}", *named]

    def target(self, model: str, collection: str | bool | None) -> str | None:
        """The store that a request names, or None for a plain one.

        ``MODEL/rag`` and ``MODEL+rag`` mean the default store, ``MODEL/rag/NAME`` another one; the ``collection`` of
        the request's own field goes before the model's name.

        Raises
        ------
        ApiError
            404 if there is no such model or collection.
        """
        by_model = self._by_model(model)
        if collection is None:
            return by_model
        return self.store(collection) if collection is not False else None

    def store(self, collection: str | bool | None) -> str:
        """The name of a store.

        Raises
        ------
        ApiError
            404 if there is none of that name.
        """
        name = collection if isinstance(collection, str) else self.default
        if name not in self.stores:
            have = ", ".join(self.stores)
            raise ApiError(404, f"there is no collection {name!r:.80}; there are: {have}", param="blendkv.collection",
                           code="collection_not_found")  # fmt: skip
        return name

    def _by_model(self, model: str) -> str | None:
        if model in ("", self.model):
            return None
        rest = model.removeprefix(self.model)
        if rest != model and rest[:1] in ("/", "+"):
            word, _, name = rest[1:].partition("/")
            if word == RAG and (not name or name in self.stores):
                return self.store(name or True)
        allowed = ", ".join(self.models)
        raise ApiError(404, f"there is no model {model!r:.80}; there are: {allowed}", param="model",
                       code="model_not_found")  # fmt: skip

    def facts(self) -> dict[str, StoreFacts]:
        """A record per store, for the metrics; a store that cannot tell is left out."""
        found = {}
        for name, pipeline in self.stores.items():
            try:
                found[name] = _facts(pipeline)
            except BlendKVError:
                continue
        return found

    def close(self) -> None:
        """Write what waits, close the stores, and end the engine."""
        for pipeline in self.stores.values():
            pipeline.close()
        self.shut_down()


def _facts(pipeline: RagPipeline) -> StoreFacts:
    store = pipeline.store
    counts: dict[str, Any] = asdict(pipeline.library.counts)
    index = store.index
    codecs = index.usage.read() if isinstance(index, Index) else {}
    daemon = _client(store)
    return StoreFacts(
        store.stat(), counts, pipeline.documents, dict(pipeline.fallbacks), pipeline.gate.state, codecs, daemon
    )


def _client(store: Store) -> ClientFacts | None:
    """A daemon as this process sees it; None for a store in this process."""
    if not isinstance(store, DaemonStore):
        return None
    return ClientFacts(store.up, store.reconnects, store.missed, store.pin_failures)


def served_name(model: str, given: str | None) -> str:
    """The model's name in requests: the one given, or the last part of its path or hub id."""
    return given or Path(model).name or model
