"""`blendkv demo`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendkv.cli.common import Json, Threads, describe_machine, emit, err, number, out, set_threads, stages, table
from blendkv.cli.ingest import UNITS
from blendkv.config import format_bytes, home, parse_bytes
from blendkv.errors import InputError

if TYPE_CHECKING:
    from blendkv.eval.demo import DemoResult


def demo(
    store: Annotated[Path | None, typer.Option(help="Folder of the demo's store; kept between runs.")] = None,
    precompute_bytes: Annotated[str, typer.Option(help="KV computed at ingest; the rest at first use.")] = "1GB",
    questions: Annotated[int, typer.Option(help="How many of the demo's questions.")] = 3,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Ingest the Python language reference and answer from it: full prefill, full reuse and blends side by side."""
    from blendkv.blend.gate import Gate
    from blendkv.eval.demo import CORPUS, QUESTIONS, run_demo
    from blendkv.pipeline import RagPipeline

    if not 1 <= questions <= len(QUESTIONS):
        raise InputError(f"--questions is {questions}; 1 to {len(QUESTIONS)} are allowed")
    set_threads(threads)
    limit = parse_bytes(precompute_bytes)
    say = (lambda line: None) if as_json else (lambda line: err.print(line, soft_wrap=True, markup=False))
    with RagPipeline.from_store(store or home() / "demo-store", "demo") as pipeline:
        pipeline.gate = Gate()  # every mode is shown, whatever a verdict on the model says
        say("corpus: the Python language reference; model: SmolLM2-135M-Instruct")
        with stages(UNITS, as_json) as progress:
            report = pipeline.ingest([CORPUS], precompute="lazy", precompute_bytes=limit, prune=True, progress=progress)
        say(
            f"{pipeline.documents} topics, {report.chunks} chunks, {report.tokens:,} tokens "
            f"({format_bytes(report.tokens * pipeline.engine.kv_bytes_per_token)} of KV); KV is computed now for at "
            f"most {format_bytes(limit)}, for the other {report.kv_left_for_first_use} chunks at their first use"
        )
        times = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in report.seconds.items())
        say(f"ingest took: {times}; {report.kv_tokens:,} tokens of KV were computed")
        result = run_demo(pipeline, QUESTIONS[:questions], tell=say)
    if as_json:
        emit("demo", result.rows, items=[asdict(item) for item in result.items])
    else:
        _show(result)


def _show(result: DemoResult) -> None:
    columns = ("mode", "budget", "TTFT ms", "speed-up", "KL to full", "answer to the first question")
    first = result.items[0]
    rows = [
        (
            row["mode"], number(row["budget_spent"]), number(row["ttft_ms"]["p50"], 0), number(row["speedup_p50"], 1),
            number(row["kl"], 4), first.answers[row["mode"]][:60],
        )
        for row in result.rows
    ]  # fmt: skip
    table(f"{len(result.items)} questions; first: {first.question}", columns, rows)
    for n, item in enumerate(result.items, 1):
        line = f"{n}. {item.question} ({item.prompt_tokens} tokens; passages from {', '.join(item.topics)})"
        out.print(line, style="bold", soft_wrap=True, markup=False)
        for mode, answer in item.answers.items():
            out.print(f"  {mode}: {answer}", soft_wrap=True, markup=False)
    out.print(
        "TTFT p50, retrieval included; KL in nats over 16 tokens of full prefill's own answer (full: its rounding)."
    )
    out.print(describe_machine(), soft_wrap=True)
