"""The endpoints of retrieval: ingest, query, list and delete documents."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from blendkv.errors import BlendKVError, InputError
from blendkv.pipeline import RagPipeline
from blendkv.serve.errors import ApiError
from blendkv.serve.openai import IngestRequest, PostedDocument, QueryRequest, Retrieval, read
from blendkv.serve.prompting import Question, ask, mode_of
from blendkv.serve.replies import Telemetry, finish_reason, usage
from blendkv.serve.service import Service, json_body
from blendkv.serve.tags import tag_of

POSTED = "posted.jsonl"
"""Documents sent over HTTP are rows of this source: their ids are ``posted.jsonl:ID``."""


class IngestStoppedError(BlendKVError):
    """The server shuts down; what was ingested is kept."""


def rag_routes(service: Service) -> APIRouter:
    """``/v1/rag/ingest``, ``/v1/rag/query`` and ``/v1/rag/documents``."""
    router = APIRouter(prefix="/v1/rag")
    ingesting = {name: asyncio.Lock() for name in service.backends.stores}

    @router.post("/ingest")
    async def ingest(request: Request) -> JSONResponse:
        backends = service.backends_of(request)
        asked = read(IngestRequest, await json_body(request))
        name = backends.store(asked.collection)
        async with ingesting[name]:
            report = await service.thread(partial(_ingest, backends.stores[name], asked, service.stopping))
        return JSONResponse({"collection": name, **report})

    @router.post("/query")
    async def query(request: Request) -> JSONResponse:
        backends, body = service.backends_of(request), await json_body(request)
        asked = read(QueryRequest, body)
        if asked.stream:
            raise ApiError(400, "a query is not streamed; use /v1/chat/completions with stream", param="stream")
        name = backends.store(asked.collection)
        pipeline = backends.stores[name]
        mode = mode_of(pipeline, asked.mode, "mode")
        retrieval = Retrieval(k=asked.k, where=asked.where)
        options = asked.options(service.settings.max_tokens)
        telemetry = Telemetry(name, str(mode), tag_of(request.headers, body, True, request.state.client.tenant))
        start = partial(ask, pipeline, Question(asked.question), mode, retrieval, options)
        running = await service.answer(request, start, telemetry)
        answer = running.answer
        assert answer is not None
        found = {"answer": answer.text, "finish_reason": finish_reason(answer)}
        counted = {"usage": usage(answer, telemetry.reuse(answer))}
        return JSONResponse(
            {**found, **counted, **telemetry.body(running, texts=True)}, headers=telemetry.headers(running)
        )

    @router.get("/documents")
    async def documents(request: Request, collection: str | None = None) -> JSONResponse:
        backends = service.backends_of(request)
        name = backends.store(collection or True)
        return JSONResponse({"collection": name, **await service.thread(partial(_list, backends.stores[name]))})

    @router.delete("/documents/{document:path}")
    async def delete(request: Request, document: str, collection: str | None = None) -> JSONResponse:
        name = service.backends_of(request).store(collection or True)
        async with ingesting[name]:
            removed = await service.thread(partial(_delete, service.everybodys(name), document))
        return JSONResponse({"collection": name, "id": document, "deleted": True, "chunk_kv_removed": removed})

    return router


def _ingest(pipeline: RagPipeline, asked: IngestRequest, stopping: threading.Event) -> dict[str, Any]:
    """Ingest posted documents through a file of rows, so that they are checked as any others."""

    def progress(stage: str, done: int, total: int | None) -> None:
        if stopping.is_set():
            raise IngestStoppedError("the server shuts down; what was ingested is kept: send the rest again")

    with tempfile.TemporaryDirectory(prefix="blendkv-") as folder:
        rows = Path(folder) / POSTED
        rows.write_text("".join(map(_row, asked.documents)), encoding="utf-8")
        report = pipeline.ingest(
            [rows], precompute=asked.precompute, chunk_tokens=asked.chunk_tokens, progress=progress
        )  # fmt: skip
    result = asdict(report)
    result["skipped"] = [line.replace(f"{folder}/", "") for line in report.skipped]
    return result


def _row(document: PostedDocument) -> str:
    try:
        return json.dumps(document.model_dump(), allow_nan=False) + "\n"
    except ValueError as error:
        raise ApiError(400, f"document {document.id!r:.80}: {error}", param="documents") from None


def _list(pipeline: RagPipeline) -> dict[str, Any]:
    collection = pipeline.collection
    if collection is None:
        raise InputError("this store has a retriever of its own and no documents to list")
    chunks: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for chunk in collection.chunks():
        chunks[chunk.document_id] += 1
        tokens[chunk.document_id] += len(chunk.token_ids)
    data = [{"id": i, "chunks": chunks[i], "tokens": tokens[i]} for i in collection.document_ids()]
    return {"object": "list", "data": data}


def _delete(pipelines: Sequence[RagPipeline], document: str) -> int:
    """Remove a document from a store, and the KV of its chunks that no other has; return how many KVs went.

    ``pipelines`` are all tenants' over that store: each has KV of its own.
    """
    collection = pipelines[0].collection
    if collection is None:
        raise InputError("this store has a retriever of its own and no documents to delete")
    if document not in set(collection.document_ids()):
        raise ApiError(404, f"there is no document {document!r:.200}; GET /v1/rag/documents lists them",
                       param="document", code="document_not_found")  # fmt: skip
    libraries = [pipeline.library for pipeline in pipelines]
    gone = {library.key(chunk.token_ids) for chunk in collection.chunks(document) for library in libraries}
    collection.remove_document(document)
    kept = {library.key(chunk.token_ids) for chunk in collection.chunks() for library in libraries}
    return sum(pipelines[0].store.remove(key) for key in gone - kept)
