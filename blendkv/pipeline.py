"""RAG with blended chunk KV, top to bottom: ingest -> chunk KV -> store; retrieve -> prompt -> blend -> decode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from blendkv.answer import Answer, AnswerStream
from blendkv.blend import BlendReport, Mode, parse_mode
from blendkv.chat import ChatSession
from blendkv.config import parse_bytes
from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.cache import ContiguousCache
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import DamagedChunkError, InputError, StoreMismatchError
from blendkv.ingest import IngestProgress, IngestReport, Precompute, ingest
from blendkv.library import ChunkLibrary
from blendkv.prompt import DEFAULT_SYSTEM, PromptBuilder
from blendkv.retrieval.collection import Collection
from blendkv.retrieval.embed import MINILM, Embedder, SentenceEmbedder
from blendkv.retrieval.load import MAX_DOCUMENT_BYTES
from blendkv.retrieval.retriever import HybridRetriever, RetrievedChunk, Retriever
from blendkv.store.tiered import KVStore
from blendkv.types import Prompt, RecipeKind, TokenIds, as_token_ids

DEFAULT_MODE = "blend:head_query@0.05"
TOP_K = 6
_log = logging.getLogger(__name__)


class RagPipeline:
    """Answers questions from a corpus whose passages' KV was computed once.

    Make one with `from_store`, or from parts of your own: an engine, a `KVStore`, and anything with a ``retrieve``
    method. Threads may share a pipeline; the model runs one request at a time.

    Attributes
    ----------
    library
        The chunk KVs: looked up, or computed alone and stored.
    fallbacks
        How often something else than the blend that was asked for had to be done, by reason.
    """

    def __init__(
        self,
        engine: TorchEngine,
        store: KVStore,
        retriever: Retriever,
        *,
        system: str = DEFAULT_SYSTEM,
        recipe: RecipeKind = "system",
        mode: str = DEFAULT_MODE,
        top_k: int = TOP_K,
        collection: Collection | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        self.engine, self.store, self.retriever = engine, store, retriever
        self.collection, self.embedder = collection, embedder
        self.prompts = PromptBuilder(engine.tokenizer, system)
        self.library = ChunkLibrary(engine, store, recipe, self.prompts.prefix)
        self.mode = parse_mode(mode)
        self.top_k = top_k
        self.fallbacks: dict[str, int] = {}

    @classmethod
    def from_store(
        cls,
        path: str | Path,
        model: str | None = None,
        *,
        mode: str = DEFAULT_MODE,
        recipe: RecipeKind | None = None,
        system: str | None = None,
        top_k: int = TOP_K,
        embedder: str | None = None,
        memory: str = "2GB",
        disk: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        engine: TorchEngine | None = None,
    ) -> RagPipeline:
        """Open the store at ``path``, or make one, with ``model`` behind it.

        Parameters
        ----------
        path
            Folder of the store: the corpus, its indexes and its chunk KVs.
        model
            Local folder, hub id, or ``demo``. By default the store's own, ``demo`` for a new one. Not read when an
            ``engine`` is given.
        mode
            ``full``, ``reuse``, or ``blend:SELECTOR@BUDGET``; the default of every question.
        recipe, system
            How chunks are computed (``system`` or ``bos``), and the system message; the store's own by default.
        top_k
            Chunks per question.
        embedder
            ``minilm``, or any sentence-transformers model.
        memory, disk
            Limits of the memory tier and of the chunk KVs on disk, such as ``2GB``.
        dtype, device
            For the model.

        Raises
        ------
        StoreMismatchError
            If the store was made by another model or a newer version.
        ModelLoadError, InputError
            If an argument cannot be used.
        """
        folder = Path(path).expanduser()
        default_mode = parse_mode(mode)
        limits = parse_bytes(memory), None if disk is None else parse_bytes(disk)
        if engine is None and model is not None:  # before a folder is made for a model that does not exist
            engine = TorchEngine.load(model, dtype=dtype, device=device)
        with ExitStack() as opened:
            store = opened.enter_context(KVStore.open(folder, memory_bytes=limits[0], disk_bytes=limits[1]))
            collection = opened.enter_context(Collection(folder))
            engine = engine or TorchEngine.load(collection.get_meta("model") or "demo", dtype=dtype, device=device)
            settings = _claim(collection, engine, recipe, system)
            encoder = SentenceEmbedder(embedder or MINILM)
            retriever = HybridRetriever(collection, encoder)
            pipeline = cls(
                engine, store, retriever, system=settings["system"], recipe=settings["recipe"],
                mode=str(default_mode), top_k=top_k, collection=collection, embedder=encoder,
            )  # fmt: skip
            opened.pop_all()
        return pipeline

    def close(self) -> None:
        """Write what waits to be written and close the store."""
        self.store.close()
        if self.collection is not None:
            self.collection.close()

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
        """Load, split, embed and index ``sources``, then compute the chunk KVs; see `blendkv.ingest.ingest`."""
        if self.collection is None or self.embedder is None:
            raise InputError("this pipeline has a retriever of its own and no collection; ingest with from_store(...)")
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

        Raises
        ------
        PromptTooLongError
            If the chunks and the question exceed the model's context.
        InputError
            If an argument cannot be used.
        """
        began = time.perf_counter()
        how = self.mode if mode is None else parse_mode(mode)
        sources = self.retriever.retrieve(question, self.top_k if k is None else k, where)
        retrieved = time.perf_counter() - began
        prompt = self.prompts.first([s.chunk.token_ids for s in sources], question)
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
        history: TokenIds | None = None,
        cache: ContiguousCache | None = None,
    ) -> AnswerStream:
        """Blend (or prefill) a prompt and decode behind it: what `stream` does once it has its chunks.

        ``history`` and ``cache`` hold the tokens, and their KV, that the prompt continues.

        Raises
        ------
        PromptTooLongError
            If history and prompt exceed the model's context; nothing was computed then.
        """
        began = time.perf_counter() if began is None else began
        started = time.perf_counter()
        times = dict(timings or {})
        context = prompt.token_ids if history is None else _joined(history, prompt.token_ids)
        self.engine.check_room(len(context), _made_of(prompt, history))
        settings, reason = mode.settings, None
        if settings is not None and self.engine.unsupported is not None:
            settings, reason = None, self._fall_back(str(self.engine.unsupported))
        report: BlendReport | None = None
        if settings is not None:
            cache = cache if cache is not None else self.engine.new_cache(len(context) + 64)
            report = self._blend(prompt, cache, mode)
            if report is None:
                reason = "chunk KVs are damaged again and again while they are read: check the disk of the store"
            else:
                times |= report.stages
        times["prepare"] = time.perf_counter() - started - (sum(report.stages.values()) if report else 0.0)
        ready = time.perf_counter()
        decoder = self.engine.decoder(
            context, cache if report else None, options or GenerationOptions(), report.logits if report else None
        )

        def finish() -> Answer:
            first = decoder.first_token_at or time.perf_counter()
            times.update(question=first - ready, ttft=first - began, total=time.perf_counter() - began)
            return Answer(
                decoder.text, tuple(sources), "full" if report is None else str(mode), times, report, reason,
                decoder.finish_reason, len(context), len(decoder.tokens), tuple(decoder.tokens),
            )  # fmt: skip

        return AnswerStream(iter(decoder), finish)

    def _blend(self, prompt: Prompt, cache: ContiguousCache, mode: Mode) -> BlendReport | None:
        """Blend; a chunk that turns out damaged is dropped, computed again, and the blend starts over.

        Returns None when there is no end to the damage.
        """
        settings = mode.settings
        assert settings is not None
        for _ in range(len(prompt.segments) + 1):
            try:
                with self.library.source(prompt) as source:
                    return self.engine.blend(prompt, source, cache, settings, logits_to_keep=1)
            except DamagedChunkError as error:
                self.store.discard(error.key, error.reason)
                self._count("damaged chunk recomputed")
        if self._count("damaged again and again") == 1:
            _log.warning("chunk KVs are damaged again and again, such prompts are prefilled in full: check the disk")
        return None

    def _fall_back(self, reason: str) -> str:
        """Count a fallback to full prefill and log its first time."""
        if self._count("unsupported model") == 1:
            _log.warning("%s cannot be blended; every prompt is prefilled in full: %s", self.engine.name, reason)
        return reason

    def _count(self, what: str) -> int:
        self.fallbacks[what] = self.fallbacks.get(what, 0) + 1
        return self.fallbacks[what]

    def chat(self, *, mode: str | None = None, k: int | None = None) -> ChatSession:
        """Start a conversation: later turns keep the blended history and blend only new chunks."""
        return ChatSession(self, self.mode if mode is None else parse_mode(mode), self.top_k if k is None else k)

    async def aask(self, question: str, **options: Any) -> Answer:
        """`ask`, without blocking the event loop."""
        return await asyncio.to_thread(self.ask, question, **options)

    async def aingest(self, sources: Sequence[str | Path], **options: Any) -> IngestReport:
        """`ingest`, without blocking the event loop."""
        return await asyncio.to_thread(self.ingest, sources, **options)

    async def astream(self, question: str, **options: Any) -> AsyncIterator[str]:
        """`stream`, without blocking the event loop; yields pieces of text."""
        pieces: Iterator[str] = iter(await asyncio.to_thread(self.stream, question, **options))
        end = object()
        while (piece := await asyncio.to_thread(next, pieces, end)) is not end:
            yield str(piece)


def check_store(path: str | Path) -> None:
    """Refuse a path that holds no store, so that commands that only read do not make one.

    Raises
    ------
    InputError
        If there is none.
    """
    if not any((Path(path) / name).is_file() for name in ("index.sqlite", "collection.sqlite")):
        raise InputError(f"{path} holds no store; make one with: blendkv ingest CORPUS --store {path}")


def _made_of(prompt: Prompt, history: TokenIds | None) -> str:
    """What the tokens of a context are, for an error."""
    chunks = [len(s.token_ids) for s in prompt.segments if s.kind == "chunk"]
    rest = len(prompt) - sum(chunks) - len(prompt.segments[-1].token_ids) + (0 if history is None else len(history))
    question = len(prompt.segments[-1].token_ids)
    return f" ({sum(chunks)} in {len(chunks)} chunks, {question} in the question, {rest} before them)"


def _joined(history: TokenIds, more: TokenIds) -> TokenIds:
    return as_token_ids([*history.tolist(), *more.tolist()])


def _claim(
    collection: Collection, engine: TorchEngine, recipe: RecipeKind | None, system: str | None
) -> dict[str, Any]:
    """Tie the collection to the model that makes its token ids, and return its recipe and system message."""
    made_by = collection.get_meta("fingerprint")
    if made_by is not None and made_by != engine.fingerprint:
        raise StoreMismatchError(
            f"{collection.path} was made with model {collection.get_meta('model')!r} (fingerprint {made_by[:12]}), "
            f"given {engine.name!r} ({engine.fingerprint[:12]}): use that model, or ingest into another store"
        )
    if recipe not in (None, "system", "bos"):
        raise InputError(f"unknown recipe {recipe!r}; allowed: system, bos")
    settings = {
        "recipe": recipe or collection.get_meta("recipe") or "system",
        "system": system if system is not None else collection.get_meta("system", DEFAULT_SYSTEM),
    }
    if made_by is None:
        values = {"fingerprint": engine.fingerprint, "model": engine.name, **settings}
        for name, value in values.items():
            collection.set_meta(name, value)
    return settings
