"""`blendkv ingest`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from blendkv.cli.common import (
    Codec,
    Device,
    Disk,
    Dtype,
    Encrypt,
    Engine,
    Json,
    Memory,
    Store,
    Tenant,
    Threads,
    emit,
    err,
    out,
    set_threads,
    stages,
)
from blendkv.config import parse_bytes

if TYPE_CHECKING:
    from blendkv.ingest import IngestReport

UNITS = {"documents": "documents", "embed": "chunks", "kv": "tokens"}


def ingest(
    corpus: Annotated[list[str], typer.Argument(help="Files, folders, hf:NAME[@SPLIT][#COLUMN], python-reference.")],
    store: Store,
    model: Annotated[str | None, typer.Option(help="Model folder, hub id, or demo.")] = None,
    precompute: Annotated[Literal["all", "lazy"], typer.Option(help="all: compute every chunk's KV now.")] = "all",
    precompute_bytes: Annotated[str | None, typer.Option(help="At most so much KV now, such as 10GB.")] = None,
    recipe: Annotated[Literal["system", "bos"] | None, typer.Option(help="What stands before a chunk.")] = None,
    codec: Codec = None,
    system: Annotated[str | None, typer.Option(help="The system message of the prompts.")] = None,
    chunk_tokens: Annotated[int, typer.Option(help="Target size of a chunk.")] = 384,
    embedder: Annotated[str | None, typer.Option(help="minilm (default), or a sentence-transformers model.")] = None,
    engine: Engine = "torch",
    prune: Annotated[bool, typer.Option("--prune", help="Remove documents that the corpus no longer holds.")] = False,
    max_document_bytes: Annotated[str, typer.Option(help="Larger files and rows are refused.")] = "32MiB",
    memory: Memory = "2GB",
    disk: Disk = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    tenant: Tenant = None,
    encrypt: Encrypt = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Load, split, embed and index a corpus, and compute its chunk KVs. Run it again to go on or to update.

    Exits with 2 if a document could not be read; all others are in the store then.
    """
    from blendkv.pipeline import RagPipeline

    set_threads(threads)
    limit = None if precompute_bytes is None else parse_bytes(precompute_bytes)
    with RagPipeline.from_store(
        store,
        model,
        recipe=recipe,
        codec=codec,
        system=system,
        embedder=embedder,
        memory=memory,
        disk=disk,
        dtype=dtype,
        device=device,
        engine=engine,
        tenant=tenant,
        encrypt=encrypt or None,
    ) as pipeline:
        with stages(UNITS, as_json) as progress:
            report = pipeline.ingest(
                corpus, precompute=precompute, precompute_bytes=limit, chunk_tokens=chunk_tokens, prune=prune,
                max_document_bytes=parse_bytes(max_document_bytes),
                progress=progress,
            )  # fmt: skip
        _show(report, pipeline.engine.unsupported, as_json)
        for line in report.skipped:
            err.print(f"skipped: {line}", soft_wrap=True, markup=False)
    if report.skipped:
        raise typer.Exit(2)


def _show(report: IngestReport, unsupported: Exception | None, as_json: bool) -> None:
    if as_json:
        rate = report.kv_tokens_per_second
        emit(
            "ingest",
            [{**asdict(report), "kv_tokens_per_second": rate, "unsupported": unsupported and str(unsupported)}],
        )
        return
    d = report.documents
    out.print(
        f"documents: {d.added} added, {d.changed} changed, {d.unchanged} unchanged, {d.removed} removed; "
        f"{report.chunks} chunks, {report.tokens:,} tokens in the store"
    )
    rate = report.kv_tokens_per_second
    speed = f" at {rate:,.0f} tokens/s" if rate else ""
    out.print(f"chunk KV: {report.kv_computed} computed ({report.kv_tokens:,} tokens{speed})", soft_wrap=True)
    if report.kv_left_for_first_use:
        out.print(f"          {report.kv_left_for_first_use} chunks are left for their first use")
    if unsupported is not None:
        out.print(f"this model is not blended: {unsupported}", soft_wrap=True, markup=False)
