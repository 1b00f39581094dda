"""`blendkv calibrate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    stages,
    table,
)
from blendkv.config import home
from blendkv.errors import InputError

if TYPE_CHECKING:
    from blendkv.blend.gate import Verdict
    from blendkv.eval.items import EvalItem
    from blendkv.eval.subject import Subject


def calibrate(
    model: Annotated[str | None, typer.Option(help="Folder, hub id, or demo; the store's own by default.")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Keep the verdict beside this store; by default it is for all of yours.")
    ] = None,
    data: Annotated[str, typer.Option(help="A file, a name on the hub, or a spec of generated data.")] = "mixed",
    form: Annotated[str | None, typer.Option("--format", help="Of the data; guessed by default.")] = None,
    limit: Annotated[int | None, typer.Option(help="Most items.", min=1)] = None,
    modes: Annotated[str | None, typer.Option(help="Candidates, comma-separated, instead of the usual grid.")] = None,
    kl: Annotated[float, typer.Option(help="Most mean KL to full prefill, in nats.")] = 0.05,
    f1: Annotated[float, typer.Option(help="Most that F1 may be below full prefill's.")] = 0.01,
    confidence: Annotated[float, typer.Option(help="Of both bounds.")] = 0.95,
    engine: Annotated[Literal["torch", "vllm"], typer.Option(help="Who runs the model.")] = "torch",
    chunks: Annotated[int, typer.Option(help="Most passages per prompt.", min=1)] = 6,
    codec: Annotated[
        str | None,
        typer.Option(help="Of the chunk KVs, by default the store's; auto: choose the smallest within noise of raw."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of generated data, the order of the items, and the bounds.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure how close blending comes to full prefill, and write the quality gate's verdict; see docs/gate.md."""
    import torch

    from blendkv.blend.gate import Target, write_verdict
    from blendkv.eval.calibrate import calibrate as search
    from blendkv.eval.codec_choice import AUTO
    from blendkv.eval.datasets import load_items
    from blendkv.store.codecs import CODECS, RAW

    if codec not in (None, AUTO):
        CODECS.get(codec)
    if codec == AUTO and engine != "torch":
        raise InputError(f"--codec auto is measured by --engine torch, given {engine}; the choice holds for both")
    target = Target(kl, f1, confidence)
    wanted = None if modes is None else [m.strip() for m in modes.split(",") if m.strip()]
    own = {} if store is None else _of_store(store.expanduser())
    own["codec"] = RAW if codec == AUTO else codec or own.get("codec") or RAW
    name = model or own.get("model") or "demo"
    items = load_items(data, form, seed=seed, limit=limit)
    torch.set_num_threads(threads or torch.get_num_threads())
    told = {"source": data, "format": form}
    say = (lambda line: None) if as_json else (lambda line: err.print(line, soft_wrap=True, markup=False))
    with _subject(engine, name, own, dtype, device) as subject, stages({}, as_json) as progress:
        if own.get("fingerprint") not in (None, subject.fingerprint):
            raise InputError(f"{store} was made with model {own['model']!r}, given {name!r}: use that model")
        how: dict[str, Any] = {
            "target": target, "candidates": wanted, "chunks": chunks, "recipe": own.get("recipe", "system"),
            "seed": seed, "data": told, "tell": say, "progress": progress,
        }  # fmt: skip
        folder = home() if store is None else store.expanduser()
        if codec == AUTO:
            _choose(subject, items, how, folder, as_json)
            return
        verdict = search(subject, items, **how)
        path = write_verdict(folder, subject.fingerprint, verdict)
    if as_json:
        _emit(verdict, path)
    else:
        _show(verdict, path)


def _choose(subject: Subject, items: Sequence[EvalItem], how: Mapping[str, Any], folder: Path, as_json: bool) -> None:
    """Choose the codec, and write the choice and every verdict that came with it."""
    from blendkv.blend.codec_choice import write_choice
    from blendkv.blend.gate import write_verdict
    from blendkv.eval.codec_choice import choose_codec, codec_sizes
    from blendkv.eval.subject_torch import TorchSubject

    assert isinstance(subject, TorchSubject)
    sizes = codec_sizes(subject.engine.runner)
    choice, verdicts = choose_codec(subject.stored_as, sizes, items, **how)
    paths = {v.codec: write_verdict(folder, subject.fingerprint, v) for v in verdicts}
    path = write_choice(folder, subject.fingerprint, choice)  # last: it counts only with its verdict
    verdict = next(v for v in verdicts if v.codec == choice.codec)
    if as_json:
        _emit(verdict, paths[choice.codec], choice={**asdict(choice), "path": str(path)})
        return
    _show(verdict, paths[choice.codec])
    bound = f"at most ({choice.confidence:.0%})"
    columns = ("codec", "bytes / raw's", "items", "KL", "KL - raw's", bound, "within noise", "why not")
    rows = [
        (
            r.codec, number(r.size), r.n, number(r.kl, 4), number(r.excess, 4), number(r.excess_upper, 4),
            "yes" if r.passed else "no", r.note,
        )
        for r in choice.rows
    ]  # fmt: skip
    table(f"codecs of {choice.model} in {choice.mode}, at most +{choice.margin:g} nats allowed", columns, rows)
    new = "new stores of this model use it" if folder == home() else "ingest with --codec makes the store use it"
    out.print(f"{choice.summary}; {new}; written to {path}", soft_wrap=True, markup=False)


def _emit(verdict: Verdict, path: Path, **more: Any) -> None:
    rows = [asdict(row) for row in verdict.evidence]
    facts = {n: v for n, v in asdict(verdict).items() if n not in ("evidence", "environment", "version")}
    emit("calibrate", rows, **facts, path=str(path), **more)


def _of_store(store: Path) -> dict[str, Any]:
    """What a store was made with: ``fingerprint``, ``model``, ``recipe``, ``codec``, ``system``, as far as it knows."""
    from blendkv.pipeline import check_store
    from blendkv.retrieval.collection import Collection

    check_store(store)
    with Collection(store) as collection:
        found = {n: collection.get_meta(n) for n in ("fingerprint", "model", "recipe", "codec", "system")}
    return {n: v for n, v in found.items() if v is not None}


@contextmanager
def _subject(engine: str, model: str, own: dict[str, Any], dtype: str, device: str) -> Iterator[Subject]:
    """The model, with chunks computed as the store's are."""
    from blendkv.engines.torch.engine import TorchEngine
    from blendkv.eval.opening import MEMORY_BYTES, Opening
    from blendkv.eval.subject_torch import TorchSubject
    from blendkv.prompt import DEFAULT_SYSTEM
    from blendkv.store.tiered import KVStore

    recipe, system = own.get("recipe", "system"), own.get("system", DEFAULT_SYSTEM)
    with ExitStack() as opened:
        if engine == "torch":
            loaded = opened.enter_context(closing(TorchEngine.load(model, dtype=dtype, device=device)))
            kept = KVStore.open(None, memory_bytes=MEMORY_BYTES)
            yield opened.enter_context(closing(TorchSubject(loaded, kept, recipe, system, own["codec"])))
            return
        if (recipe, system) != ("system", DEFAULT_SYSTEM):
            raise InputError("the store has a recipe or a system message of its own; measure it with --engine torch")
        yield Opening(engine, model, dtype=dtype, device=device, codec=own["codec"]).subject(opened)


def _show(verdict: Verdict, path: Path) -> None:
    bound = f"{verdict.target.confidence:.0%}"
    columns = ("mode", "items", "KL", f"at most ({bound})", "F1 - full's", f"at least ({bound})", "budget", "cost",
               "TTFT / full's", "passed", "why not")  # fmt: skip
    rows = [
        (
            r.mode, r.n, number(r.kl, 4), number(r.kl_upper, 4), number(r.f1_difference), number(r.f1_lower),
            number(r.budget_spent), number(r.cost), number(r.ttft_ratio), "yes" if r.passed else "no", r.note,
        )
        for r in verdict.evidence
    ]  # fmt: skip
    table(f"quality gate of {verdict.model}: {'passed' if verdict.passed else 'failed'}", columns, rows)
    for mode, why in verdict.data["left_out"].items():
        out.print(f"left out: {mode}: {why}", soft_wrap=True, markup=False)
    out.print(verdict.summary, soft_wrap=True, markup=False)
    after = "" if verdict.passed else ": prompts of this model are prefilled in full from now on"
    out.print(f"written to {path}{after}", soft_wrap=True, markup=False)
    out.print(describe_machine(), soft_wrap=True)
