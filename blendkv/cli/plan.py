"""`blendkv plan`."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendkv.cli.common import (
    Device,
    Dtype,
    Json,
    Threads,
    describe_machine,
    emit,
    err,
    number,
    out,
    set_threads,
    table,
)
from blendkv.cli.market import asked, marginal_line
from blendkv.config import format_bytes
from blendkv.errors import InputError, StoreError

if TYPE_CHECKING:
    from blendkv.store.reports import MarketReport


def plan(
    tokens: Annotated[int, typer.Option(help="Tokens of the corpus, or of one chunk.", min=1)],
    model: Annotated[str, typer.Option(help="Model folder, hub id, or demo.")] = "demo",
    reuse: Annotated[float, typer.Option(help="How often each token is expected to be used again.", min=0.0)] = 1.0,
    folder: Annotated[
        Path | None, typer.Option(help="Where to measure the disk; the temporary folder by default.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="A store whose daemon is asked what one gigabyte of memory more would save.")
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
    market = None if store is None else _market(store)
    set_threads(threads)
    engine = TorchEngine.load(model, dtype=dtype, device=device)
    rates = measure(engine.runner, where)
    rows = plan_rows(engine.runner, tokens, reuse, rates)
    if as_json:
        more = {} if store is None else {"next_gb_saves_s_per_hour": market and market.marginal}
        size = engine.kv_bytes_per_token
        emit("plan", rows, model=model, tokens=tokens, reuse=reuse, kv_bytes_per_token=size, **more)
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
    if market is not None:
        out.print(f"{store}: {marginal_line(market)}", soft_wrap=True, markup=False)
    out.print(describe_machine(), soft_wrap=True)


def _market(path: Path) -> MarketReport | None:
    """What the daemon of the store at ``path`` says of its prices; None if it says nothing, and a line says why."""
    from blendkv.daemon.opening import open_store
    from blendkv.pipeline import check_store

    check_store(path)
    with closing(open_store(path, 0)) as store:
        try:
            return asked(store, 1)
        except (InputError, StoreError) as error:
            err.print(f"nothing of the next gigabyte: {error}", soft_wrap=True, markup=False)
            return None
