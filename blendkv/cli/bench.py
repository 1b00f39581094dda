"""`blendkv bench`: measured ratios, both sides in one run."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendkv.cli.bench_market import market, market_live
from blendkv.cli.bench_vllm import MemoryShare, bench_serve, count, names, ttft_vllm
from blendkv.cli.common import Device, Dtype, Json, describe_machine, emit, err, number, out, table
from blendkv.config import format_bytes
from blendkv.errors import InputError

if TYPE_CHECKING:
    from blendkv.engines.torch.engine import TorchEngine
    from blendkv.eval.bench.ttft import TtftResult, TtftSettings

app = typer.Typer(help="Measured ratios, in one run, with hardware and versions.")


app.command("serve")(bench_serve)
app.command("market")(market)
app.command("market-live")(market_live)


@app.callback()
def group() -> None:
    """Measured ratios, in one run, with hardware and versions."""


@app.command("ttft")
def ttft(
    model: Annotated[str, typer.Option(help="Model folder, hub id, or demo.")] = "demo",
    modes: Annotated[str | None, typer.Option(help="Mode specs, comma-separated.")] = None,
    engine: Annotated[str, typer.Option(help="torch or vllm.")] = "torch",
    chunks: Annotated[int, typer.Option(help="Chunks in the prompt (torch).")] = 6,
    tokens: Annotated[str, typer.Option(help="Chunk tokens per prompt, comma-separated sizes (vllm).")] = "2000,4000",
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk.")] = 400,
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 5,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    tiers: Annotated[str, typer.Option(help="memory, disk, or both (torch).")] = "memory,disk",
    eager: Annotated[bool, typer.Option("--eager/--compiled", help="vLLM's eager mode, or its compiled one.")] = True,
    memory_share: MemoryShare = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time to first token of every mode, with the ideal beside it; inside vLLM also what the connector costs."""
    if engine == "vllm":
        sizes = [count(text, "tokens") for text in names(tokens)]
        share = memory_share
        ttft_vllm(model, dtype, modes, sizes, chunk_tokens, repeats, threads, eager, share, as_json)
        return
    if engine != "torch":
        raise InputError(f"unknown engine {engine!r}; allowed: torch, vllm")
    from blendkv.engines.torch.engine import TorchEngine
    from blendkv.eval.bench.ttft import MODES, TtftSettings, run_ttft

    asked = MODES if modes is None else names(modes)
    settings = TtftSettings(chunks, chunk_tokens, repeats, threads, asked, names(tiers))
    loaded = TorchEngine.load(model, dtype=dtype, device=device)
    result = run_ttft(
        loaded, settings, (lambda line: None) if as_json else (lambda line: err.print(line, markup=False))
    )
    if as_json:
        emit(
            "bench ttft", result.rows, model=model, dtype=loaded.dtype, settings=asdict(settings),
            correct=result.correct, left_out=result.left_out,
            budget_one_kl=result.budget_one.kl, noise_floor_kl=result.noise.kl,
            ingest={**asdict(result.ingest), "ratio": result.ingest.ratio},
        )  # fmt: skip
    else:
        _show(result, settings, loaded.dtype)
    if not result.correct:
        raise typer.Exit(1)


@app.command("kernels")
def kernels(
    shapes: Annotated[str, typer.Option(help="smollm2-135m, llama-8b, llama-70b; comma-separated.")] = (
        "smollm2-135m,llama-8b"
    ),
    tokens: Annotated[str, typer.Option(help="Prompt sizes, comma-separated.")] = "2048,8192,16384",
    selected: Annotated[float, typer.Option(help="Share of the tokens that are queries.")] = 0.1,
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Every kernel backend that works here against plain torch; no ratio of one that is not right."""
    import torch

    from blendkv.eval.bench.kernels import KernelSettings, run_kernels

    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in kinds:
        raise InputError(f"unknown dtype {dtype!r}; allowed: {', '.join(kinds)}")
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    sizes = tuple(count(text, "tokens") for text in names(tokens))
    settings = KernelSettings(tuple(names(shapes)), sizes, selected, kinds[dtype], repeats, threads, place)
    rows = run_kernels(settings, (lambda line: None) if as_json else (lambda line: err.print(line, markup=False)))
    if as_json:
        emit("bench kernels", rows, threads=threads, selected=selected)
    else:
        columns = ("op", "backend", "shape", "us p20/p50/p80", "GFLOP/s", "GB/s", "baseline", "ratio")
        table(f"kernels, {dtype}", columns, [_kernel_cells(r) for r in rows])
        out.print(f"with {threads} threads: {describe_machine()}", soft_wrap=True)
    if any(r["red"] for r in rows):
        raise typer.Exit(1)


@app.command("store")
def store(
    parts: Annotated[
        str | None, typer.Option(help="get, index, read, codecs, ttft, put; comma-separated; all by default.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model folder, hub id, or demo (ttft and put).")] = "demo",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, no model: whether it works.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """The store beside what it is made of: copies, the index, the disk, codecs; no figure of what came back wrong."""
    from blendkv.eval.bench.store import MODEL_PARTS, PARTS, StoreSettings, run_store

    asked = None if parts is None else names(parts)
    settings = StoreSettings.quick(asked) if quick else StoreSettings(PARTS if asked is None else asked)
    settings = replace(settings, threads=threads)

    def load() -> TorchEngine:
        from blendkv.engines.torch.engine import TorchEngine

        return TorchEngine.load(model, dtype=dtype, device=device)

    result = run_store(settings, load, (lambda line: None) if as_json else (lambda line: err.print(line, markup=False)))
    if as_json:
        about = {"model": model} if set(settings.parts) & set(MODEL_PARTS) else {}
        emit(
            "bench store", result.rows, settings=asdict(settings), problems=result.problems, missed=result.missed,
            **about,
        )  # fmt: skip
    else:
        shown = [(r["name"], number(r["value"]), r["unit"], r["baseline"], number(r["ratio"])) for r in result.rows]
        table("store", ("figure", "value", "unit", "baseline", "ratio"), shown)
        for line in (*(f"refused: {p}" for p in result.problems), *(f"missed: {m}" for m in result.missed)):
            out.print(line, soft_wrap=True, markup=False)
        out.print(f"with {threads} threads: {describe_machine()}", soft_wrap=True)
    if result.problems:
        raise typer.Exit(1)


def _kernel_cells(row: dict[str, Any]) -> list[Any]:
    shown = "/".join(f"{row['time_us'][p]:.0f}" for p in ("p20", "p50", "p80"))
    ratio = "[red]red[/red]" if row["red"] else number(row["ratio"])
    return [
        row["op"], row["backend"], row["shape"], shown, number(row["gflops"], 1), number(row["gbps"], 1),
        row["baseline"], ratio,
    ]  # fmt: skip


def _show(result: TtftResult, settings: TtftSettings, dtype: str) -> None:
    columns = (
        "mode", "tier", "budget", "TTFT ms p20/p50/p80", "speed-up", "ideal", "KL",
        "score", "load", "rotate", "recompute", "question", "extra memory",
    )  # fmt: skip
    table(
        f"{settings.chunks} chunks x {settings.chunk_tokens} tokens, {dtype}", columns, [_cells(r) for r in result.rows]
    )
    for line in result.left_out:
        out.print(f"left out: {line}", soft_wrap=True, markup=False)
    out.print(f"budget 1: KL {result.budget_one.kl:.2g}; rounding of full prefill itself: {result.noise.kl:.2g}")
    if not result.correct:
        out.print("[b]correctness is red: budget 1 differs from full prefill, no speed-up is given[/b]")
    rate = result.ingest
    out.print(
        f"ingest {rate.ingest_tokens_per_s:,.0f} tokens/s, plain batched prefill {rate.prefill_tokens_per_s:,.0f}: "
        f"{rate.ratio:.2f}"
    )
    out.print(f"with {settings.threads} threads: {describe_machine()}", soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[Any]:
    times, stages = row["ttft_ms"], row["stages_ms"]
    shown = "/".join(f"{times[p]:.0f}" for p in ("p20", "p50", "p80")) if times else None
    memory = row["peak_extra_bytes"]
    return [
        row["mode"], row["tier"], number(row["budget_spent"]), shown, number(row["speedup_p50"], 1),
        number(row["ideal_speedup"], 1), number(row["kl"], 4), *(number(s, 0) for s in stages.values()),
        None if memory is None else format_bytes(memory),
    ]  # fmt: skip
