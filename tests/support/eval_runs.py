"""Made-up evaluation runs that look like real ones: figures drawn from a seed, modes that differ as modes do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blendkv.eval.items import ItemRecord, Result, Run

MODES = (
    "full", "prefix", "reuse", "cacheblend@0.15", "epic@16", "blend:chunk_head@0.05", "blend:kv_deviation@0.15",
    "blend:strided@0.03", "blend:head_query@0.03", "blend:head_query@0.05", "blend:head_query@0.1",
)  # fmt: skip
KL = {"reuse": 0.8, "cacheblend": 0.2, "epic": 0.35, "chunk_head": 0.3, "kv_deviation": 0.25, "strided": 0.15}
RULES = {"epic": "chunk_head", "cacheblend": "kv_deviation"}
SECONDS = {"full": 1.0, "prefix": 0.85}
WORDS = ("the", "year", "in", "which", "Ada", "wrote", "her", "first", "note", "about", "an", "engine", "patterns")
NASTY = (
    "<script>alert('x')</script>", "</style></title>", "]]>", "a\x00b\x1b[31m", "\u202edetrevni\u202c", "\ud83d",
    "\ufffd", "\"quoted\" & 'single'", "{{ 7 * 7 }}{% for %}", "<!-- --", "$x^2$", "🙂 中文 עברית", "x" * 3000,
    "\r\n\t", "<img src=https://example.invalid/x.png onerror=alert(1)>",
)  # fmt: skip


def fake_run(
    seed: int,
    *,
    modes: Sequence[str] = MODES,
    items: int = 8,
    layers: int = 30,
    tokens: int = 120,
    task: str = "qa",
    nasty: bool = False,
    correct: bool | None = True,
) -> Run:
    """A run in memory: six chunks per item, of at most ``tokens`` tokens."""
    rng = np.random.default_rng(seed)
    records, results = {}, []
    for number in range(items):
        name = f"item {number}" + (NASTY[number % len(NASTY)] if nasty else "")
        records[name] = record = _record(rng, name, task, tokens, nasty)
        hard = float(rng.lognormal(0.0, 0.6))
        results += [_result(rng, record, mode, hard, layers, nasty) for mode in modes]
    return Run(Path("out"), meta(seed, correct), records, results)


def meta(seed: int, correct: bool | None = True) -> dict[str, Any]:
    """What run.json holds."""
    return {
        "engine": "torch", "dtype": "float32", "data": "made_up.json", "format": "jsonl", "threads": 1, "model": "demo",
        "settings": {"chunks": 6, "repeats": 2, "deviation_items": 4, "seed": seed}, "version": "0.1.0", "layers": 30,
        "seed": seed, "config": f"{seed:032x}", "correct": correct, "noise_kl": 2e-7, "left_out": {},
        "budget_one_kl": 0.4 if correct is False else 3e-6,
        "environment": {"date": "2026-01-31", "cpu": "A CPU <of> ours", "cpu_isa": "AVX512", "cores": 2, "threads": 1,
                        "gpu": None, "memory_bytes": 8 << 30, "python": "3.12.1", "torch": "2.13", "vllm": None},
    }  # fmt: skip


def _record(rng: np.random.Generator, name: str, task: str, tokens: int, nasty: bool) -> ItemRecord:
    pool = [f" {w}" for w in WORDS] + (list(NASTY) if nasty else [])
    sizes = rng.integers(max(1, tokens // 2), tokens + 1, 6)
    return ItemRecord(
        item=name, task=task, question=_say(rng, 12, nasty) + "?", answers=[_say(rng, 2, nasty), _say(rng, 3, nasty)],
        chunks=[[pool[i] for i in rng.integers(0, len(pool), n)] for n in sizes], dropped=int(rng.integers(0, 3)),
        ceiling=bool(rng.random() < 0.8),
    )  # fmt: skip


def _say(rng: np.random.Generator, words: int, nasty: bool) -> str:
    said = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), words))
    return f"{said} {NASTY[rng.integers(0, len(NASTY))]}" if nasty else said


def _result(rng: np.random.Generator, record: ItemRecord, mode: str, hard: float, layers: int, nasty: bool) -> Result:
    kind = mode.split(":")[-1].split("@")[0]
    exact, blended = kind in ("full", "prefix"), "@" in mode
    figure = float(mode.split("@")[1].split("+")[0]) if blended else None
    nominal = figure if kind in RULES else None
    budget = 0.2 if nominal else figure
    scale = 1e-7 if exact else KL.get(kind, 0.08 * math.sqrt(0.05 / (budget or 0.05))) * hard
    kl = float(scale * rng.lognormal(0.0, 0.3))
    ttft = [float(SECONDS.get(kind, 0.12 + 1.2 * (budget or 0.0)) * rng.lognormal(0.0, 0.05)) for _ in range(2)]
    parts = {} if exact else {"score": 0.02, "load": 0.03, "rotate": 0.01, "recompute": 0.9 * (budget or 0.0)}
    sizes = [len(c) for c in record.chunks]
    qa = record.task == "qa"
    return Result(
        item=record.item, task=record.task, mode=mode, engine="torch", model="demo", seed=0, config="0" * 32,
        version="0.1.0", hardware="a CPU", prompt_tokens=sum(sizes), answer=_say(rng, 4, nasty), ttft_s=ttft,
        stages_s={**parts, "question": max(0.01, min(ttft) - sum(parts.values()))},
        reusable_tokens=None if exact else sum(sizes), selector=RULES.get(kind, kind) if blended else None,
        nominal=nominal, budget_asked=budget, budget_spent=budget,
        bytes_loaded=None if exact else 23040 * sum(sizes), f1=float(rng.beta(1, 3)) if qa else None,
        em=float(rng.random() < 0.2) if qa else None, rouge_l=None if qa else float(rng.beta(2, 4)),
        f1_full=1.0 if exact else float(rng.beta(4, 2)), kl=kl, kl_first=kl / 2, kl_gold=kl * 1.5,
        top1=1.0 if exact else float(rng.beta(9, 1)),
        predicted_s={"total": sum(parts.values()) * float(rng.lognormal(0, 0.2))} if blended else None,
        deviation=None if exact else {k: list(scale * np.linspace(0.1, 1, layers)) for k in ("k", "v", "attention")},
        selected=[_choose(rng, n, budget) for n in sizes] if budget is not None else None,
    )  # fmt: skip


def _choose(rng: np.random.Generator, tokens: int, budget: float) -> list[int]:
    return sorted(rng.choice(tokens, min(tokens, max(1, round(budget * tokens))), replace=False).tolist())


def unmeasured(run: Run) -> list[dict[str, Any]]:
    """Summary rows of a run in which nothing was measured."""
    none = (
        "selector", "budget_asked", "budget_spent", "f1", "em", "rouge_l", "f1_full", "kl", "kl_se", "kl_first",
        "kl_gold", "top1", "ttft_ms", "speedup_p50", "speedup", "bytes_loaded", "engine", "nominal", "ceiling",
        "stages_ms", "prediction_error", "load",
    )  # fmt: skip
    return [{"mode": m, "n": 0, **dict.fromkeys(none), "against": {}, "fallbacks": {}} for m in run.modes]
