"""`blendkv eval`: quality against speed, for a model and a data set."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from blendkv.cli.common import Codec, Device, Dtype, Json, Threads, describe_machine, emit, number, out, stages, table

app = typer.Typer(help="Quality against speed, for a model and a data set.")
DEFAULT_MODES = (
    "full,prefix,reuse,blend:chunk_head@0.05,blend:kv_deviation@0.15,blend:strided@0.03,blend:head_query@0.05"
)
_Formats = "musique, jsonl, kv-retrieval, longbench, synth, ...; guessed by default."


@app.callback()
def group() -> None:
    """Quality against speed, for a model and a data set."""


@app.command("run")
def run(
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the run; the same command goes on with it.")],
    data: Annotated[str, typer.Option(help="A file, a name on the hub, or a spec of generated data.")] = "mixed",
    form: Annotated[str | None, typer.Option("--format", help=_Formats)] = None,
    model: Annotated[str, typer.Option(help="Model folder, hub id, or demo.")] = "demo",
    modes: Annotated[str, typer.Option(help="Mode specs, comma-separated; see docs/eval.md.")] = DEFAULT_MODES,
    limit: Annotated[int | None, typer.Option(help="Most items.", min=1)] = None,
    engine: Annotated[Literal["torch", "vllm"], typer.Option(help="Who runs the model.")] = "torch",
    chunks: Annotated[int, typer.Option(help="Most passages per prompt.")] = 6,
    repeats: Annotated[int, typer.Option(help="Timed requests per item and mode.")] = 2,
    deviation_items: Annotated[int, typer.Option(help="Items whose KV is compared layer by layer (torch).")] = 4,
    load_requests: Annotated[int, typer.Option(help="Requests per mode under Poisson load; 0: none.", min=0)] = 0,
    load_rate: Annotated[float | None, typer.Option(help="Its requests per second; what full prefill bears.")] = None,
    seed: Annotated[int, typer.Option(help="Of generated data and of the bootstrap.")] = 0,
    store: Annotated[Path | None, typer.Option(help="Folder that keeps the chunk KVs; by default none does.")] = None,
    codec: Codec = "raw",
    plan: Annotated[bool, typer.Option("--plan", help="Let the loading planner decide (torch).")] = False,
    memory_share: Annotated[float | None, typer.Option(help="vLLM's share of a GPU's memory.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure every mode on every item; write results.jsonl, summary.json and report.html."""
    import torch

    from blendkv.eval.datasets import load_items
    from blendkv.eval.items import RunFolder
    from blendkv.eval.load import write_load
    from blendkv.eval.modes import parse_eval_modes
    from blendkv.eval.opening import Opening, measure_load
    from blendkv.eval.report.svg import require_matplotlib
    from blendkv.eval.run import EvalSettings, describe, run_eval
    from blendkv.eval.summary import write_summary
    from blendkv.store.codecs import CODECS, RAW

    stored_as = codec or RAW
    CODECS.get(stored_as)
    require_matplotlib()  # what the report needs is missed now, not after an hour
    wanted = parse_eval_modes(modes)
    settings = EvalSettings(chunks, repeats, deviation_items, seed, plan)
    items = load_items(data, form, seed=seed, limit=limit)
    torch.set_num_threads(threads or torch.get_num_threads())
    opening = Opening(engine, model, store, dtype, device, torch.get_num_threads(), memory_share, plan, stored_as)
    with ExitStack() as opened, stages({"measuring": "answers"}, as_json) as progress:
        subject = opening.subject(opened)
        meta = describe(subject, settings, data, form, opening.threads)
        done = run_eval(subject, items, wanted, settings, RunFolder(out_dir), meta, progress)
        if load_requests:
            rows = measure_load(opening, subject, done, items, wanted, settings, load_requests, load_rate)
            write_load(out_dir, rows)
    _show(out_dir, write_summary(out_dir), "eval run", as_json)
    if not done.meta["correct"]:
        raise typer.Exit(1)


@app.command("report")
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    as_json: Json = False,
) -> None:
    """Write summary.json and report.html again from a run's results."""
    from blendkv.eval.summary import write_summary

    _show(folder, write_summary(folder), "eval report", as_json)


@app.command("compare")
def compare(
    one: Annotated[Path, typer.Argument(help="Folder of a run.")],
    other: Annotated[Path, typer.Argument(help="Folder of the run it is compared with.")],
    as_json: Json = False,
) -> None:
    """Compare two runs mode by mode on the items that both have."""
    from blendkv.eval.compare import compare as compared
    from blendkv.eval.compare import describe, differing
    from blendkv.eval.items import RunFolder

    runs = RunFolder(one).read(), RunFolder(other).read()
    rows, changed = compared(*runs), differing(*runs)
    if as_json:
        emit("eval compare", rows, differing=changed)
        return
    columns, cells = describe(rows)
    table(f"{one} against {other}", columns, cells)
    for setting in changed:
        line = f"{setting['setting']}: {setting['a']} against {setting['b']}"
        out.print(line, soft_wrap=True, markup=False)


def _show(folder: Path, rows: list[dict[str, Any]], command: str, as_json: bool) -> None:
    from blendkv.eval.items import RunFolder

    meta = RunFolder(folder).read().meta
    if as_json:
        emit(command, rows, folder=str(folder), correct=meta["correct"], left_out=meta["left_out"])
        return
    columns = ("mode", "n", "budget", "F1", "Rouge-L", "KL to full", "top-1", "TTFT ms p50", "speed-up")
    shown = [
        (
            r["mode"], r["n"], number(r["budget_spent"]), _with_error(r, "f1", 3), _with_error(r, "rouge_l", 3),
            _with_error(r, "kl", 4), number(r["top1"]), number(r["ttft_ms"]["p50"], 0), number(r["speedup_p50"], 1),
        )
        for r in rows
    ]  # fmt: skip
    table(f"{meta['model']} ({meta['engine']}) on {meta['data']}", columns, shown)
    for mode, why in meta["left_out"].items():
        out.print(f"left out: {mode}: {why}", soft_wrap=True, markup=False)
    if not meta["correct"]:
        kl = number(meta["budget_one_kl"], 4)
        out.print(f"[b]correctness is red: budget 1 is {kl} nats from full prefill, no speed-up is given[/b]")
    out.print(f"{folder / 'report.html'}; {describe_machine()}", soft_wrap=True, markup=False)


def _with_error(row: dict[str, Any], name: str, digits: int) -> str | None:
    value, error = number(row[name], digits), number(row[f"{name}_se"], digits)
    return value if error is None else f"{value} ± {error}"
