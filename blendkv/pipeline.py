"""RAG with blended chunk KV, top to bottom: ingest -> chunk KV -> store; retrieve -> prompt -> blend -> decode."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from blendkv.answer import Answer, AnswerStream
from blendkv.blend import Mode, parse_mode
from blendkv.blend.gate import REASON, Gate
from blendkv.chat import ChatSession
from blendkv.claims import CODEC, check_store, claim, load_engine, start_planner
from blendkv.config import parse_bytes
from blendkv.daemon.opening import open_store
from blendkv.engines.base import Conversation, Engine, GenerationOptions, Outcome, check_room
from blendkv.errors import InputError
from blendkv.ingest import IngestProgress, IngestReport, Precompute, ingest
from blendkv.market.context import using
from blendkv.market.hints import Hint
from blendkv.market.words import check_hint, use_of
from blendkv.prompt import DEFAULT_SYSTEM, PromptBuilder
from blendkv.retrieval.collection import Collection
from blendkv.retrieval.embed import MINILM, Embedder, SentenceEmbedder
from blendkv.retrieval.load import MAX_DOCUMENT_BYTES
from blendkv.retrieval.retriever import HybridRetriever, RetrievedChunk, Retriever
from blendkv.store.codecs import CODECS
from blendkv.store.door import Store
from blendkv.tenants import tenant_tag
from blendkv.types import Prompt, RecipeKind

__all__ = ["TOP_K", "RagPipeline", "check_store"]
TOP_K = 6
EngineName = Literal["torch", "vllm"]
_log = logging.getLogger(__name__)


class RagPipeline:
    """Answers questions from a corpus whose passages' KV was computed once.

    Make one with `from_store`, or from parts of your own: an engine, a `Store`, and anything with a ``retrieve``
    method. Threads may share a pipeline. `TorchEngine` runs one request at a time, `VllmEngine` many.

    Attributes
    ----------
    library
        The chunk KVs: looked up, or computed alone and stored.
    gate
        What the quality gate's verdict on the model allows. ``Gate()`` in its place allows every blend: for measuring.
    fallbacks
        How often something else than the blend that was asked for had to be done, by reason; counted as answers end.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        retriever: Retriever,
        *,
        system: str = DEFAULT_SYSTEM,
        recipe: RecipeKind = "system",
        codec: str | None = None,
        mode: str | None = None,
        top_k: int = TOP_K,
        collection: Collection | None = None,
        embedder: Embedder | None = None,
        require_gate: bool = False,
        tenant: str = "",
    ) -> None:
        self.engine, self.store, self.retriever = engine, store, retriever
        self.collection, self.embedder = collection, embedder
        self.prompts = PromptBuilder(engine.tokenizer, system)
        self.library = engine.library(store, recipe, self.prompts.prefix, codec, tenant)
        codec = self.library.recipe.codec
        self.gate = Gate.read(store.path, engine.fingerprint, engine.name, require_gate, codec)
        self.mode = self.gate.mode(mode)
        self.gate.demand(self.mode)
        self.top_k = top_k
        self.fallbacks: dict[str, int] = {}
        self._noting = threading.Lock()
        self._owned = ExitStack()  # what `close` closes, the last one first
        if collection is not None:
            self._owned.callback(collection.close)
        self._owned.callback(store.close)

    @classmethod
    def from_store(
        cls,
        path: str | Path,
        model: str | None = None,
        *,
        mode: str | None = None,
        recipe: RecipeKind | None = None,
        codec: str | None = None,
        system: str | None = None,
        top_k: int = TOP_K,
        embedder: str | None = None,
        memory: str = "2GB",
        disk: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        engine: Engine | EngineName = "torch",
        require_gate: bool = False,
        plan: bool = False,
        tenant: str | None = None,
        encrypt: bool | None = None,
        policy: str | None = None,
    ) -> RagPipeline:
        """Open the store at ``path``, or make one, with ``model`` behind it.

        Parameters
        ----------
        path
            Folder of the store: the corpus, its indexes and its chunk KVs.
        model
            Local folder, hub id, or ``demo``. By default the store's own, ``demo`` for a new one. Not read when
            ``engine`` is an engine.
        mode
            ``full``, ``reuse``, or ``blend:SELECTOR@BUDGET``; the default of every question. None: the mode that the
            quality gate's verdict names, or ``blend:head_query@0.05`` for a model that was not measured.
        recipe, system
            How chunks are computed (``system`` or ``bos``), and the system message; the store's own by default.
        codec
            How chunk KVs are stored: ``raw``, ``fp8``, ``int8``, ``turbo4``, ``turbo3`` or ``turbo2`` (docs/codecs.md);
            by default as the store was ingested; for a new one what ``blendkv calibrate --codec auto`` chose for the
            model, else raw. Those of another codec never match.
        top_k
            Chunks per question.
        embedder
            ``minilm``, or any sentence-transformers model.
        memory, disk
            Limits of the memory tier and of the chunk KVs on disk, such as ``2GB``.
        dtype, device
            For the model; ``device`` is the embedded engine's, vLLM chooses its own.
        engine
            ``torch`` (embedded, over transformers) or ``vllm``, which are closed with the pipeline; or an engine of
            your own, which is not, and makes ``model``, ``dtype`` and ``device`` idle.
        require_gate
            Refuse blends that the quality gate has not passed (``blendkv calibrate``). Otherwise a model that was not
            measured is blended, and one that failed is prefilled in full.
        plan
            Let the loading planner decide which chunks to load and which to compute (docs/planner.md); measures this
            machine for a few seconds now. For the embedded engine.
        tenant
            Name of the tenant whose chunk KVs are used and made, with the salt in ``BLENDKV_TENANT_SALT``; None: those
            of no tenant. The corpus is the store's, whoever asks.
        encrypt
            Whether chunk KVs on disk are encrypted with the key in ``BLENDKV_ENCRYPTION_KEY``; by default as the store
            is, a new one is not. The corpus is not (docs/operations.md).
        policy
            What leaves the store first when it is full (docs/market.md); ``market`` by default. A daemon has its own.

        Raises
        ------
        GateError
            If the gate is required and does not allow ``mode``.
        StoreMismatchError
            If the store was made by another model or a newer version.
        ModelLoadError, MissingDependencyError, InputError
            If an argument cannot be used.
        """
        folder = Path(path).expanduser()
        tag = tenant_tag(tenant)
        if mode is not None:
            parse_mode(mode)
        if codec is not None:
            CODECS.get(codec)
        limits = parse_bytes(memory), None if disk is None else parse_bytes(disk)
        load = partial(load_engine, dtype=dtype, device=device, codec=codec, require_gate=require_gate)
        with ExitStack() as opened:
            running = None if isinstance(engine, str) else engine
            if isinstance(engine, str) and model is not None:  # before a folder is made for a model that does not exist
                running = opened.enter_context(closing(load(engine, model, folder)))
            store = open_store(folder, limits[0], limits[1], encrypt=encrypt, policy=policy)
            opened.callback(store.close)
            collection = opened.enter_context(Collection(folder))
            if running is None:
                assert isinstance(engine, str)
                own = collection.get_meta("model") or "demo"
                running = opened.enter_context(closing(load(engine, own, folder)))
            settings = claim(collection, running, recipe, codec, system)
            if plan:
                start_planner(running, folder)
            encoder = SentenceEmbedder(embedder or MINILM)
            pipeline = cls(
                running, store, HybridRetriever(collection, encoder), **settings, mode=mode, top_k=top_k,
                collection=collection, embedder=encoder, require_gate=require_gate, tenant=tag,
            )  # fmt: skip
            pipeline._owned = opened.pop_all()
        return pipeline

    def for_tenant(self, tenant: str | None) -> RagPipeline:
        """A pipeline like this one over a tenant's chunk KVs, with the salt in ``BLENDKV_TENANT_SALT``; None: nobody's.

        Engine, store and corpus are this one's, and closed with it; what happens is counted together.

        Raises
        ------
        InputError
            If the name cannot be a tenant's, or the salt is missing.
        """
        own, other = self.library, copy.copy(self)
        tag = tenant_tag(tenant)
        other.library = self.engine.library(self.store, own.kind, self.prompts.prefix, own.recipe.codec, tag)
        other.library.counts = own.counts
        other._owned = ExitStack()
        return other

    def close(self) -> None:
        """Write what waits to be written and close the store, and the engine if `from_store` loaded it."""
        self._owned.close()

    def __enter__(self) -> RagPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ingest(
        self,
        sources: Sequence[str | Path],
        *,
        precompute: Precompute = "all",
        precompute_bytes: int | None = None,
        chunk_tokens: int = 384,
        prune: bool = False,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        progress: IngestProgress | None = None,
    ) -> IngestReport:
        """Load, split, embed and index ``sources``, then compute the chunk KVs; see `blendkv.ingest.ingest`.

        The pipeline's codec becomes the store's own.
        """
        if self.collection is None or self.embedder is None:
            raise InputError("this pipeline has a retriever of its own and no collection; ingest with from_store(...)")
        self.collection.set_meta(CODEC, self.library.recipe.codec)
        return ingest(
            self.collection, self.embedder, self.engine, self.library, sources, precompute=precompute,
            precompute_bytes=precompute_bytes, chunk_tokens=chunk_tokens, prune=prune,
            max_document_bytes=max_document_bytes, progress=progress,
        )  # fmt: skip

    @property
    def documents(self) -> int:
        """Documents in the collection; 0 for a retriever of one's own."""
        return 0 if self.collection is None else self.collection.counts().documents

    def ask(self, question: str, **options: Any) -> Answer:
        """Answer a question. Options as for `stream`."""
        return self.stream(question, **options).answer

    def stream(
        self,
        question: str,
        *,
        mode: str | None = None,
        k: int | None = None,
        where: Mapping[str, Any] | None = None,
        options: GenerationOptions | None = None,
        workload: str | None = None,
        session: str | None = None,
    ) -> AnswerStream:
        """Answer a question piece by piece.

        Parameters
        ----------
        question
            Not empty.
        mode
            Overrides the pipeline's mode.
        k
            Number of chunks.
        where
            Metadata that chunks must have, such as ``{"title": "lambda"}``.
        options
            How to decode.
        workload, session
            Whose work this is, for the store's policy (docs/market.md): its class, and what ties it to questions before
            and after; words of 1 to 64 characters. By default what `blendkv.market.context.using` says, else ``rag``
            and no session.

        Raises
        ------
        PromptTooLongError
            If the chunks and the question exceed the model's context.
        InputError
            If an argument cannot be used.
        """
        began = time.perf_counter()
        use = use_of(workload, session, "rag")
        how = self.mode if mode is None else parse_mode(mode)
        sources = self.retriever.retrieve(question, self.top_k if k is None else k, where)
        retrieved = time.perf_counter() - began
        prompt = self.prompts.first([s.chunk.token_ids for s in sources], question)
        with using(use):
            return self.answer(prompt, how, sources, options, began=began, timings={"retrieve": retrieved})

    def answer(
        self,
        prompt: Prompt,
        mode: Mode,
        sources: Sequence[RetrievedChunk] = (),
        options: GenerationOptions | None = None,
        *,
        began: float | None = None,
        timings: dict[str, float] | None = None,
        conversation: Conversation | None = None,
    ) -> AnswerStream:
        """Blend (or prefill) a prompt and decode behind it: what `stream` does once it has its chunks.

        ``conversation`` is the engine's; what it holds of the prompt is not computed again. What the gate does not
        allow is prefilled in full, as a fallback.

        Raises
        ------
        GateError
            If the gate is required and does not allow ``mode``.
        PromptTooLongError
            If the prompt exceeds the model's context; nothing was computed then.
        """
        began = time.perf_counter() if began is None else began
        self.gate.demand(mode)
        refused = self.gate.check(mode)
        allowed = mode if refused is None else parse_mode("full")
        check_room(self.engine, len(prompt), _made_of(prompt))
        generation = self.engine.generate(prompt, allowed, self.library, options or GenerationOptions(), conversation)

        def finish() -> Answer:
            ended = time.perf_counter()
            first = (generation.first_token_at or ended) - began
            done = generation.outcome
            if refused is not None:
                done = replace(done, fallback=refused, incidents=(*done.incidents, REASON))
            times = {**(timings or {}), **done.seconds}
            times.update(question=max(0.0, first - sum(times.values())), ttft=first, total=ended - began)
            self._note(done)
            return Answer(
                generation.text, tuple(sources), done.mode, times, done.report, done.fallback,
                generation.finish_reason, len(prompt), len(generation.tokens), tuple(generation.tokens),
                done.plan,
            )  # fmt: skip

        return AnswerStream(generation, finish)

    def _note(self, done: Outcome) -> None:
        """Count what came between, and log the first fallback of each kind."""
        with self._noting:
            for incident in done.incidents:
                self.fallbacks[incident] = self.fallbacks.get(incident, 0) + 1
            fell_back = done.mode == "full" and done.fallback is not None
            first = fell_back and self.fallbacks[done.incidents[-1]] == 1
        if first:
            _log.warning("a prompt cannot be blended and is prefilled (said once per reason): %s", done.fallback)

    def chat(
        self, *, mode: str | None = None, k: int | None = None, workload: str | None = None, session: str | None = None
    ) -> ChatSession:
        """Start a conversation: later turns keep the blended history and blend only new chunks.

        Its class is ``chat`` and its session its own, unless they are given or current; see `stream`.
        """
        use = use_of(workload, session, "chat")
        use = use if use.session else use._replace(session=uuid.uuid4().hex)
        how, most = self.mode if mode is None else parse_mode(mode), self.top_k if k is None else k
        return ChatSession(self, how, most, use)

    def hint(self, session: str, what: Hint, ttl: float = 0.0) -> bool:
        """Tell the store what a session is about to do; return whether a policy listens to that.

        Parameters
        ----------
        session
            As it was given to `stream` or `chat` (`ChatSession.session`).
        what
            ``tool_started``: it waits for a tool, for ``ttl`` seconds at most; ``tool_finished``; ``session_ended``.
        ttl
            Seconds, above 0, at most a day; only for ``tool_started``.

        Raises
        ------
        InputError
            If one of them cannot be used.
        """
        check_hint(session, what, ttl)
        return self.store.hint(session, what, ttl)

    async def aask(self, question: str, **options: Any) -> Answer:
        """`ask`, without blocking the event loop."""
        stream = await asyncio.to_thread(self.stream, question, **options)
        async for _ in stream:
            pass
        return stream.answer

    async def aingest(self, sources: Sequence[str | Path], **options: Any) -> IngestReport:
        """`ingest`, without blocking the event loop."""
        return await asyncio.to_thread(self.ingest, sources, **options)

    async def astream(self, question: str, **options: Any) -> AsyncIterator[str]:
        """`stream`, without blocking the event loop; yields pieces of text.

        For the whole answer too: ``stream = await asyncio.to_thread(rag.stream, question)``, ``async for piece in
        stream``, ``stream.answer``.
        """
        stream = await asyncio.to_thread(self.stream, question, **options)
        async with aclosing(aiter(stream)) as pieces:
            async for piece in pieces:
                yield piece


def _made_of(prompt: Prompt) -> str:
    """What the tokens of a context are, for an error."""
    chunks = [len(s.token_ids) for s in prompt.segments if s.kind == "chunk"]
    question = len(prompt.segments[-1].token_ids)
    rest = len(prompt) - sum(chunks) - question
    return f" ({sum(chunks)} in {len(chunks)} chunks, {question} in the question, {rest} beside them)"
