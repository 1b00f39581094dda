"""`blendkv ask`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from blendkv.cli.common import (
    Device,
    Disk,
    Dtype,
    Engine,
    Json,
    Memory,
    RequireGate,
    Store,
    Tenant,
    Threads,
    emit,
    err,
    out,
    set_threads,
)
from blendkv.errors import InputError

if TYPE_CHECKING:
    from blendkv.answer import Answer


def ask(
    question: str,
    store: Store,
    mode: Annotated[
        Literal["full", "reuse", "blend"] | None,
        typer.Option(help="How to use chunk KV; without it and the next two: what the gate passed, else head_query."),
    ] = None,
    selector: Annotated[str | None, typer.Option(help="Which tokens are recomputed; head_query by default.")] = None,
    budget: Annotated[float | None, typer.Option(help="Share of reusable tokens to recompute, 0 to 1.")] = None,
    require_gate: RequireGate = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Measure this machine first, then load or recompute each chunk by that.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="The store's own by default.")] = None,
    top_k: Annotated[int, typer.Option(help="Chunks in the prompt.")] = 6,
    where: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE that a chunk's metadata must have; values of one key: either.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    engine: Engine = "torch",
    embedder: Annotated[str | None, typer.Option(help="The one used at ingest; minilm by default.")] = None,
    memory: Memory = "2GB",
    disk: Disk = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    tenant: Tenant = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Answer a question from a store, with sources and stage times."""
    from blendkv.engines.base import GenerationOptions
    from blendkv.pipeline import RagPipeline, check_store

    spec = _spec(mode, selector, budget)
    options = GenerationOptions(max_new_tokens=max_new_tokens, temperature=temperature)
    filters: dict[str, list[object]] = {}
    for name, values in map(_pair, where or []):
        filters.setdefault(name, []).extend(values)
    check_store(store)
    set_threads(threads)
    with RagPipeline.from_store(
        store,
        model,
        mode=spec,
        top_k=top_k,
        embedder=embedder,
        memory=memory,
        disk=disk,
        dtype=dtype,
        device=device,
        engine=engine,
        tenant=tenant,
        require_gate=require_gate,
        plan=plan,
    ) as pipeline:
        stream = pipeline.stream(question, where=filters or None, options=options)
        for piece in stream:
            if not as_json:
                out.print(piece, end="", soft_wrap=True, markup=False)
        answer = stream.answer
    if not answer.sources:
        err.print("warning: no passage was found, the answer is the model's own", markup=False)
    if as_json:
        emit("ask", [_row(question, answer)])
        return
    out.print()
    for found in answer.sources:
        err.print(f"source: {found.chunk.id}  score {found.score:.4f}", soft_wrap=True, markup=False)
    err.print(_times(answer), soft_wrap=True, markup=False)


def _spec(mode: str | None, selector: str | None, budget: float | None) -> str | None:
    from blendkv.blend import BlendSettings, Mode

    if mode is None and selector is None and budget is None:
        return None
    if mode in (None, "blend"):
        return str(Mode("blend", BlendSettings(selector or "head_query", budget)))
    if selector is not None or budget is not None:
        raise InputError(f"--mode is {mode}; --selector and --budget are for --mode blend: drop them")
    return mode


def _pair(text: str) -> tuple[str, list[object]]:
    """The key, and the value as text and as the number, bool or null that it spells."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise InputError(f"--where {text!r} is not KEY=VALUE; give for instance --where title=lambda")
    try:
        typed = json.loads(value)
    except ValueError:
        return name, [value]
    return name, [value, typed] if typed is None or isinstance(typed, int | float) else [value]


def _row(question: str, answer: Answer) -> dict[str, object]:
    report = answer.blend_report
    blend = None
    if report is not None:
        fields = {n: getattr(report, n) for n in ("budget_asked", "budget_spent", "selector", "shift", "total_tokens")}
        fields |= {n: getattr(report, n) for n in ("reusable_tokens", "exact_tokens", "fresh_tokens", "bytes_loaded")}
        blend = {**fields, "recomputed_tokens": report.recomputed_tokens}
    sources = [{"id": s.chunk.id, "score": s.score, "metadata": dict(s.chunk.metadata)} for s in answer.sources]
    skip = ("sources", "blend_report", "token_ids", "plan")
    plain = {name: value for name, value in vars(answer).items() if name not in skip}
    return {
        "question": question,
        **plain,
        "sources": sources,
        "blend": blend,
        "plan": None if answer.plan is None else asdict(answer.plan),
    }


def _times(answer: Answer) -> str:
    times = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in answer.timings.items())
    report = answer.blend_report
    spent = f"; budget spent {report.budget_spent:.4f} of {report.reusable_tokens} tokens" if report else ""
    why = f"; full prefill because {answer.fallback}" if answer.fallback and answer.mode == "full" else ""
    planned = ""
    if answer.plan is not None and answer.plan.predicted is not None:
        computed, predicted = len(answer.plan.recompute), answer.plan.predicted["total"] * 1e3
        planned = f"; planned: {computed} stored chunks computed, budget {answer.plan.budget:.4g}, {predicted:.0f} ms"
    return f"{answer.mode}{spent}; ms: {times}{planned}{why}"
