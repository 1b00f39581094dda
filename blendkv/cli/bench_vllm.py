"""`blendkv bench ttft --engine vllm` and `blendkv bench serve`: inside a vLLM that this command starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendkv.cli.common import Dtype, Json, describe_machine, emit, err, number, out, table
from blendkv.config import format_bytes
from blendkv.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from blendkv.eval.bench.serve import ServeResult, ServeSettings
    from blendkv.eval.bench.vllm_ttft import VllmTtftResult, VllmTtftSettings

MemoryShare = Annotated[
    float | None, typer.Option(help="Share of a GPU's memory that each engine may take (vLLM's own default).")
]


def names(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def count(text: str, what: str) -> int:
    """A whole number of one or more."""
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{what} is {text!r}; whole numbers of 1 or more are allowed, comma-separated")
    return int(text)


def _need_vllm() -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise MissingDependencyError("vLLM is not installed; run: pip install 'blendkv[vllm]', or make setup-vllm")


def _telling(as_json: bool) -> Callable[[str], None]:
    return (lambda line: None) if as_json else (lambda line: err.print(line, markup=False))


def ttft_vllm(
    model: str,
    dtype: str,
    modes: str | None,
    tokens: list[int],
    chunk_tokens: int,
    repeats: int,
    threads: int,
    eager: bool,
    memory_share: float | None,
    as_json: bool,
) -> None:
    """Measure, print, and exit with 1 while an oracle is red."""
    _need_vllm()
    from blendkv.eval.bench.vllm_ttft import MODES, VllmTtftSettings, run_vllm_ttft

    asked = MODES if modes is None else names(modes)
    settings = VllmTtftSettings(tokens, chunk_tokens, repeats, threads, asked, eager, memory_share)
    result = run_vllm_ttft(model, dtype, settings, _telling(as_json))
    if as_json:
        emit(
            "bench ttft", result.rows, model=model, settings=asdict(settings), engine=result.engine,
            correct=not result.failures, failures=result.failures, oracles=[asdict(o) for o in result.oracles],
            connector_cost=[cost.row() for cost in result.costs], scheduler_ms=result.scheduler_ms,
        )  # fmt: skip
    else:
        _show_ttft(result, settings)
    if result.failures:
        raise typer.Exit(1)


def _show_ttft(result: VllmTtftResult, settings: VllmTtftSettings) -> None:
    columns = (
        "tokens", "mode", "budget", "TTFT ms p20/p50/p80", "speed-up", "ideal", "KL",
        "score", "load", "rotate", "recompute", "question", "extra memory",
    )  # fmt: skip
    how = "eager" if settings.eager else "compiled"
    table(f"vLLM {how}, {result.engine['dtype']}", columns, [_ttft_cells(row) for row in result.rows])
    costs = [cost.row() for cost in result.costs]
    cells = [
        [
            row["tokens"], row["request"], *(number(row["ratio"][p], 3) for p in ("p20", "p50", "p80")),
            number(row["cpu_ratio"]["p50"], 3),
            _times(row["ttft_ms"]), _times(row["without_ms"]),
        ]
        for row in costs
    ]  # fmt: skip
    of_costs = ("tokens", "request", "ratio p20", "p50", "p80", "CPU time", "with, ms", "without, ms")
    table("TTFT with the connector over vLLM without it", of_costs, cells)
    for line in result.failures:
        out.print(f"[b]correctness is red, no speed-up is given:[/b] {line}", soft_wrap=True)
    for found in result.oracles:
        out.print(
            f"KL to plain vLLM in nats: budget 1 {found.budget_one:.2g}, chunk in its own place {found.own_place:.2g}, "
            f"garbage KV {found.garbage:.2g}; plain vLLM's own rounding {found.noise:.2g}",
            soft_wrap=True,
        )
    if (spent := result.scheduler_ms) is not None:
        out.print(f"connector in the scheduler, per call: p50 {spent['p50']} ms, longest {spent['max']} ms")
    out.print(f"with {result.engine['threads']} threads: {describe_machine()}", soft_wrap=True)


def _times(times: dict[str, float] | None) -> str | None:
    return "/".join(f"{times[p]:.0f}" for p in ("p20", "p50", "p80")) if times else None


def _ttft_cells(row: dict[str, Any]) -> list[Any]:
    memory = row["peak_extra_bytes"]
    return [
        row["tokens"], row["mode"], number(row["budget_spent"]), _times(row["ttft_ms"]), number(row["speedup_p50"], 2),
        number(row["ideal_speedup"], 1), number(row["kl"], 4), *(number(s, 0) for s in row["stages_ms"].values()),
        None if memory is None else format_bytes(memory),
    ]  # fmt: skip


def bench_serve(
    model: Annotated[str, typer.Option(help="Model folder, hub id, or demo.")] = "demo",
    modes: Annotated[str | None, typer.Option(help="Mode specs, comma-separated; full is the baseline.")] = None,
    clients: Annotated[int, typer.Option(help="Clients; each sends its next request when the last is answered.")] = 16,
    requests: Annotated[int, typer.Option(help="Requests per mode.")] = 64,
    documents: Annotated[int, typer.Option(help="Chunks that requests draw from.")] = 64,
    chunks: Annotated[int, typer.Option(help="Chunks per request.")] = 5,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk.")] = 400,
    zipf: Annotated[float, typer.Option(help="Exponent of the chunks' popularity.")] = 1.0,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 16,
    cold: Annotated[bool, typer.Option("--cold", help="Start from an empty store.")] = False,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads of the engine.")] = 1,
    eager: Annotated[bool, typer.Option("--eager/--compiled", help="vLLM's eager mode, or its compiled one.")] = True,
    memory_share: MemoryShare = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Requests per second and time to first token of many clients, each mode on a fresh vLLM."""
    _need_vllm()
    from blendkv.eval.bench.serve import MODES, ServeSettings, run_serve

    settings = ServeSettings(
        clients, requests, documents, chunks, chunk_tokens, zipf, answer_tokens, cold, seed, threads,
        MODES if modes is None else names(modes), eager, memory_share,
    )  # fmt: skip
    result = run_serve(model, dtype, settings, _telling(as_json))
    if as_json:
        emit("bench serve", result.rows, model=model, settings=asdict(settings), engine=result.engine,
             correct=not result.failures, failures=result.failures)  # fmt: skip
    else:
        _show_serve(result, settings)
    if result.failures:
        raise typer.Exit(1)


def _show_serve(result: ServeResult, settings: ServeSettings) -> None:
    columns = (
        "mode", "requests/s", "over full", "CPU s/request", "TTFT ms p20/p50/p80", "whole answer ms", "errors",
        "prefix hits", "chunk hits", "outcomes",
    )  # fmt: skip
    cells = [
        [
            row["mode"], number(row["requests_per_s"], 2), number(row["throughput_ratio"], 2),
            number(row["cpu_s_per_request"], 2), _times(row["ttft_ms"]), _times(row["latency_ms"]), row["errors"],
            number(row["prefix_hit_rate"]), number(row["chunk_hit_rate"]),
            ", ".join(f"{name} {n}" for name, n in row["outcomes"].items()),
        ]
        for row in result.rows
    ]  # fmt: skip
    drawn = (
        f"{settings.chunks} of {settings.documents} chunks of {settings.chunk_tokens} tokens, Zipf {settings.zipf:g}"
    )
    store = "empty" if settings.cold else "filled"
    table(f"{settings.clients} clients, {settings.requests} requests, {drawn}, {store} store", columns, cells)
    for line in result.failures:
        out.print(f"[b]correctness is red, no ratio is given:[/b] {line}", soft_wrap=True)
    out.print(f"engine with {settings.threads} threads: {describe_machine()}", soft_wrap=True)
