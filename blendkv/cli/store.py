"""`blendkv store`: inspect and mend a store."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from blendkv.cli.common import Disk, Json, Store, emit, out, table
from blendkv.config import format_bytes, parse_bytes
from blendkv.errors import InputError

if TYPE_CHECKING:
    from blendkv.store.door import Store as OpenStore

app = typer.Typer(help="Inspect and mend a store.")
Keys = Annotated[list[str], typer.Argument(help="Chunk keys, or their first digits (at least 8).")]


@contextmanager
def _open(path: str, disk: str | None = None) -> Iterator[OpenStore]:
    from blendkv.daemon.opening import open_store
    from blendkv.pipeline import check_store

    check_store(path)
    limit = None if disk is None else parse_bytes(disk)
    with closing(open_store(path, 0, limit)) as store:
        yield store


def _full_keys(store: OpenStore, prefixes: list[str]) -> list[str]:
    """Complete shortened keys; each must name one chunk."""
    known = [row.key for row in store.ls()]
    found = []
    for prefix in prefixes:
        if len(prefix) < 8:
            raise InputError(f"key {prefix!r} is too short; give at least 8 digits (blendkv store ls)")
        matches = [k for k in known if k.startswith(prefix)]
        if len(matches) != 1:
            raise InputError(f"key {prefix!r} names {len(matches)} chunks; it must name one (blendkv store ls)")
        found.append(matches[0])
    return found


@app.command("ls")
def ls(store: Store, as_json: Json = False) -> None:
    """List the chunk KVs, least recently used first."""
    with _open(store) as opened:
        rows = opened.ls()
    if as_json:
        emit("store ls", [asdict(r) for r in rows])
        return
    shown = [
        (
            r.key[:16],
            r.fingerprint[:8],
            r.recipe.kind,
            r.recipe.codec,
            r.tokens,
            format_bytes(r.nbytes),
            _day(r.last_used),
            r.pinned,
        )
        for r in rows
    ]
    table(
        f"{len(rows)} chunk KVs", ("key", "model", "recipe", "codec", "tokens", "bytes", "last used", "pinned"), shown
    )


def _day(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


@app.command("stat")
def stat(
    store: Store,
    every: Annotated[
        float | None,
        typer.Option(
            "--watch",
            metavar="SECONDS",
            min=0.1,
            help="Show it again and again, until Ctrl-C; with --json, a line each time.",
        ),
    ] = None,
    market: Annotated[
        bool,
        typer.Option("--market", help="Show what would leave the daemon's memory first, and what more would save."),
    ] = False,
    count: Annotated[int, typer.Option(help="Chunks of the price list.", min=1, max=1000)] = 20,
    as_json: Json = False,
) -> None:
    """What a store holds by tier and model, and what it did since its daemon was started, if one runs."""
    from blendkv.cli.watch import sample, tables, watch, whole

    prices = count if market else 0
    with _open(store) as opened:
        if every is not None:
            watch(opened, every, as_json, prices)
            return
        found, rows = sample(opened, prices), opened.ls()
    models: dict[str, list[int]] = {}
    for row in rows:
        entry = models.setdefault(row.fingerprint, [0, 0])
        entry[0] += 1
        entry[1] += row.nbytes
    if as_json:
        by_model = [{"fingerprint": f, "chunks": n, "bytes": b} for f, (n, b) in models.items()]
        emit("store stat", **whole(found), models=by_model)
        return
    out.print(tables(found))
    table(
        "models",
        ("fingerprint", "chunks", "bytes of KV"),
        [(f[:16], n, format_bytes(b)) for f, (n, b) in models.items()],
    )


@app.command("verify")
def verify(store: Store, as_json: Json = False) -> None:
    """Read every file and check it; damaged chunks are dropped and computed again at their next use."""
    with _open(store) as opened:
        report = opened.verify()
    if as_json:
        emit("store verify", [asdict(report)])
    else:
        out.print(
            f"{report.checked} chunk KVs are whole ({format_bytes(report.bytes)}), {len(report.damaged)} were damaged"
        )
        for key, reason in report.damaged:
            out.print(f"dropped {key[:16]}: {reason}", soft_wrap=True, markup=False)
    if report.damaged:
        raise typer.Exit(1)


@app.command("gc")
def gc(store: Store, disk: Disk = None, as_json: Json = False) -> None:
    """Evict down to --disk and sweep up what crashes left behind."""
    with _open(store, disk) as opened:
        report = opened.gc()
    if as_json:
        emit("store gc", [asdict(report)])
    else:
        out.print(
            f"evicted {report.evicted} chunk KVs ({format_bytes(report.evicted_bytes)}); {report.repair}",
            soft_wrap=True,
        )


@app.command("pin")
def pin(store: Store, keys: Keys, as_json: Json = False) -> None:
    """Keep chunks from eviction."""
    with _open(store) as opened:
        found = _full_keys(opened, keys)
        opened.pin(found)
    _done("pin", "pinned", found, as_json)


@app.command("unpin")
def unpin(store: Store, keys: Keys, as_json: Json = False) -> None:
    """Let chunks be evicted again."""
    with _open(store) as opened:
        found = _full_keys(opened, keys)
        opened.unpin(found)
    _done("unpin", "unpinned", found, as_json)


@app.command("rm")
def rm(store: Store, keys: Keys, as_json: Json = False) -> None:
    """Remove chunk KVs; they are computed again at their next use."""
    with _open(store) as opened:
        found = _full_keys(opened, keys)
        for key in found:
            opened.remove(key)
    _done("rm", "removed", found, as_json)


def _done(command: str, what: str, keys: list[str], as_json: bool) -> None:
    if as_json:
        emit(f"store {command}", [{"key": key, "did": what} for key in keys])
    else:
        out.print(f"{what} {len(keys)} chunk KVs")
