"""`blendkv bench market` and `blendkv bench market-live`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blendkv.cli.bench_vllm import count, names
from blendkv.cli.common import Device, Dtype, Json, describe_machine, emit, err, number, out, table
from blendkv.errors import InputError

if TYPE_CHECKING:
    from blendkv.eval.bench.market import MarketResult
    from blendkv.eval.bench.market_live_rows import LiveResult
    from blendkv.eval.bench.market_live_settings import LiveSettings
    from blendkv.eval.bench.rows import Row
    from blendkv.market.costs import CostModel


def market(
    traces: Annotated[
        str | None, typer.Option(help="Generated traces by name, or files in Mooncake's format, comma-separated.")
    ] = None,
    policies: Annotated[str | None, typer.Option(help="Comma-separated; all by default.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated; the reporting seeds by default.")] = None,
    fractions: Annotated[str, typer.Option(help="Cache sizes, as shares of the distinct KV.")] = "0.02,0.05,0.1,0.2",
    costs: Annotated[
        Literal["given", "measured"], typer.Option(help="An 8B model on one GPU, or --model measured on this machine.")
    ] = "given",
    model: Annotated[str, typer.Option(help="Model folder, hub id, or demo (measured costs).")] = "demo",
    length: Annotated[int | None, typer.Option(help="Requests per trace.", min=1)] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second of generated traces.")] = None,
    overload: Annotated[
        str | None, typer.Option(help="Policies to overload with and without admission control; none to leave it out.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; one per core by default.", min=1)] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Where report.html and market.json go.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Every eviction policy on every trace: seconds saved, against the best classic policy and Belady; TTFT."""
    from blendkv.eval.bench.market import MarketSettings, run_market
    from blendkv.eval.bench.market_door import DoorSettings, door_missed, run_door

    given: dict[str, Any] = {"fractions": [_share(text) for text in names(fractions)], "rate": rate}
    for name, value in (("traces", traces), ("policies", policies)):
        given |= {} if value is None else {name: names(value)}
    given |= {} if seeds is None else {"seeds": [count(text, "seeds") for text in names(seeds)]}
    given |= {name: value for name, value in (("length", length), ("jobs", jobs)) if value is not None}
    settings = MarketSettings(**given)
    door = None if overload == "none" else DoorSettings(names(overload)) if overload else DoorSettings()
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder} is a file; name a folder, which is made if it is not there")
    model_costs = None if costs == "given" else _measured(model, dtype, device)
    tell = (lambda line: None) if as_json else (lambda line: err.print(line, markup=False))
    result = run_market(settings, model_costs, tell)
    rows = [] if door is None else run_door(door, settings, result.costs, tell)
    missed = [*result.missed, *(door_missed(rows) if settings.judged else [])]
    about = {
        "settings": asdict(settings), "costs": asdict(result.costs), "traces": result.traces, "overload": rows,
        "problems": result.problems, "missed": missed,
    }  # fmt: skip
    if folder is not None:
        _write(folder, result, rows, about)
    if as_json:
        emit("bench market", result.rows, **about)
    else:
        _show(result, rows)
        for line in (*(f"refused: {p}" for p in result.problems), *(f"missed: {m}" for m in missed)):
            out.print(line, soft_wrap=True, markup=False)
        out.print(describe_machine(), soft_wrap=True)
    if result.problems:
        raise typer.Exit(1)


def market_live(
    model: Annotated[str, typer.Option(help="Model folder, hub id, or demo.")] = "demo",
    policies: Annotated[str | None, typer.Option(help="Comma-separated; ratios are to the first.")] = None,
    seeds: Annotated[str | None, typer.Option(help="A round each; the reporting seeds by default.")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests of a round.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    speed: Annotated[float | None, typer.Option(help="Gaps and think times are divided by it.")] = None,
    share: Annotated[float | None, typer.Option(help="Limit of memory and of disk, of the KV of all passages.")] = None,
    mode: Annotated[str | None, typer.Option(help="Mode spec of every request.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the server.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One short round: whether it works.")] = False,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """The same mixed load on `blendkv serve` under each policy: TTFT by class, side by side."""
    from blendkv.eval.bench.market_live import run_market_live
    from blendkv.eval.bench.market_live_settings import LiveSettings

    given: dict[str, Any] = {
        "policies": None if policies is None else names(policies),
        "seeds": None if seeds is None else [count(text, "seeds") for text in names(seeds)],
        "requests": requests, "rate": rate, "speed": speed, "share": share, "mode": mode, "threads": threads,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    settings = LiveSettings.quick(**given) if quick else LiveSettings(**given)
    tell = (lambda line: None) if as_json else (lambda line: err.print(line, markup=False))
    result = run_market_live(model, settings, dtype, tell)
    if as_json:
        more = {"model": model, "settings": asdict(settings), "rounds": result.rounds}
        emit("bench market-live", result.rows, **more, problems=result.problems, notes=result.notes)
    else:
        _show_live(result, settings)
    if result.problems:
        raise typer.Exit(1)


def _show_live(result: LiveResult, settings: LiveSettings) -> None:
    columns = (
        "class", "policy", "requests", "p50 TTFT ms", "p99 TTFT ms", "look-up and computing s", "found whole",
        "p50 ratio", "p99 ratio",
    )  # fmt: skip
    cells = [
        (
            r["class"], r["policy"], r["requests"], number(r["p50_ttft_ms"], 0), number(r["p99_ttft_ms"], 0),
            number(r["prepare_s"], 1), number(r["found_whole"], 2), number(r["p50_speedup"], 2),
            number(r["p99_speedup"], 2),
        )
        for r in result.rows
    ]  # fmt: skip
    table(f"{settings.mode}, seeds {', '.join(map(str, settings.seeds))}", columns, cells)
    heads = ("seed", "policy", "hits", "computed", "hit rate", "evicted from memory", "from disk", "refused by price")
    counted = ("hits", "computed", "hit_rate", "memory_evictions", "disk_evictions", "refused_by_price")
    table(
        "what the servers counted", heads, [(r["seed"], r["policy"], *(r[c] for c in counted)) for r in result.rounds]
    )
    for line in (*(f"refused: {p}" for p in result.problems), *result.notes):
        out.print(line, soft_wrap=True, markup=False)
    out.print(f"with {settings.threads} threads: {describe_machine()}", soft_wrap=True)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"fraction {text!r}; shares above 0, to 1, are allowed, comma-separated") from None


def _measured(model: str, dtype: str, device: str) -> CostModel:
    from blendkv.engines.torch.engine import TorchEngine
    from blendkv.eval.bench.market_costs import measured_costs

    return measured_costs(TorchEngine.load(model, dtype=dtype, device=device).runner)


def _write(folder: Path, result: MarketResult, door: list[Row], about: dict[str, Any]) -> None:
    """``market.json`` has all that ``--json`` prints."""
    from blendkv.eval.bench.market_report import write_market_report
    from blendkv.eval.environment import environment

    machine = environment()
    folder.mkdir(parents=True, exist_ok=True)
    write_market_report(result, door, machine, folder / "report.html")
    told = {"command": "bench market", "environment": machine, "rows": result.rows, **about}
    (folder / "market.json").write_text(json.dumps(told, indent=2, default=str) + "\n", encoding="utf-8")


def _show(result: MarketResult, door: list[Row]) -> None:
    columns = (
        "trace", "seed", "cache", "policy", "s saved", "hits", "to classic", "to Belady", "p99 TTFT ms", "us/event",
    )  # fmt: skip
    shown = [
        (
            r["trace"], r["seed"], f"{r['cache_fraction']:.0%}", r["policy"], number(r["seconds_saved"], 1),
            number(r["hit_rate"]), number(r["ratio_to_best_classic"]), number(r["ratio_to_belady"]),
            number(r["p99_ttft_ms"], 0), number(r["policy_us"], 1),
        )
        for r in result.rows
    ]  # fmt: skip
    table("seconds of prefill saved", columns, shown)
    if door:
        heads = (
            "policy", "loop", "admission", "seed", "agent, chat p99 s", "all p99 s", "per s", "tokens/s", "starved",
            "longest wait s",
        )  # fmt: skip
        cells = [
            (
                r["policy"], r["loop"], r["admission"], r["seed"],
                number(r["by_class"]["interactive"]["p99_ttft_ms"] / 1e3, 2), number(r["p99_ttft_ms"] / 1e3, 2),
                number(r["throughput"], 2), number(r["tokens_per_s"], 0), r["starved"], number(r["longest_wait_s"], 1),
            )
            for r in door
        ]  # fmt: skip
        table("overload", heads, cells)
