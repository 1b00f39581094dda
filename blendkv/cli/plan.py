"""`blendkv plan`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from blendkv.cli.common import Device, Dtype, Json, Threads, describe_machine, emit, number, out, set_threads, table
from blendkv.config import format_bytes
from blendkv.errors import InputError


def plan(
    tokens: Annotated[int, typer.Option(help="Tokens of the corpus, or of one chunk.", min=1)],
    model: Annotated[str, typer.Option(help="Model folder, hub id, or demo.")] = "demo",
    reuse: Annotated[float, typer.Option(help="How often each token is expected to be used again.", min=0.0)] = 1.0,
    folder: Annotated[
        Path | None, typer.Option(help="Where to measure the disk; the temporary folder by default.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Bytes per tier, load against recompute times, and what a gigabyte of KV is worth, measured here."""
    from blendkv.blend.plan import measure, plan_rows
    from blendkv.engines.torch.engine import TorchEngine

    where = folder or Path(tempfile.gettempdir())
    if not where.is_dir():
        raise InputError(f"--folder {where} is no folder; name one on the disk that is to be measured")
    set_threads(threads)
    engine = TorchEngine.load(model, dtype=dtype, device=device)
    rates = measure(engine.runner, where)
    rows = plan_rows(engine.runner, tokens, reuse, rates)
    if as_json:
        emit("plan", rows, model=model, tokens=tokens, reuse=reuse, kv_bytes_per_token=engine.kv_bytes_per_token)
        return
    shown = [
        (
            r["tier"], format_bytes(float(r["bytes"])), f"{format_bytes(float(r['bytes_per_s']))}/s",
            number(float(r["load_s"])), number(float(r["recompute_s"])), number(float(r["break_even_budget"]), 4),
            number(float(r["seconds_saved_per_gb"]), 1), r["decision"],
        )
        for r in rows
    ]  # fmt: skip
    columns = ("tier", "bytes", "bandwidth", "load s", "recompute s", "break-even budget", "s saved per GB", "decision")
    table(f"{tokens:,} tokens, {engine.kv_bytes_per_token:,} bytes each, used {reuse:g} times", columns, shown)
    out.print(describe_machine(), soft_wrap=True)
