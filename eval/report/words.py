"""What a run says, in sentences made of its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blendkv.eval.report.data import Report, Row, name, published, short, speedup
from blendkv.eval.report.text import clean, figure, fixed, listed, measured, percent, size


def verdict(report: Report) -> list[str]:
    """A paragraph on answers, one on closeness to full prefill, speed and the published rule, one on what to doubt."""
    close = [*_closest(report), *_published(report), *_slow(report)]
    return [" ".join(said) for said in (_answers(report), close, _doubts(report)) if said]


def _answers(report: Report) -> list[str]:
    full = report.full
    key, what = ("f1", "F1") if measured(full, "f1") is not None else ("rouge_l", "Rouge-L")
    score = measured(full, key)
    if score is None:
        return ["The quality of answers was not measured against full prefill."]
    error = measured(full, f"{key}_se")
    said = [
        f"Full prefill reaches {what} {fixed(score)}{'' if error is None else f' ± {fixed(error)} (standard error)'} "
        f"on {_items(full)}."
    ]
    compared = [(r, c) for r in report.approximate if (c := (r.get("against") or {}).get("full", {}).get(key))]
    known = [(r, c) for r, c in compared if measured(c, "low") is not None and measured(c, "high") is not None]
    equal = [r for r, c in known if c.get("ties") == c.get("n")]
    if equal:
        said.append(f"In {what}, {_names(equal)} {_are(equal)} equal to full prefill in every item.")
    within = [r for r, c in known if c.get("within_noise") and r not in equal]
    if within:
        bound = max(max(abs(c["low"]), abs(c["high"])) for r, c in known if r in within)
        said.append(
            f"In {what}, {_names(within)} {_are(within)} within noise of full prefill; "
            f"{_items(full)} cannot rule out a difference of up to {fixed(bound, 2)}."
        )
    for word, sign in (("below", -1), ("above", 1)):
        other = [(r, c) for r, c in known if not c.get("within_noise") and sign * c["estimate"] > 0]
        if other:
            each = [f"{short(r['mode'])} ({c['estimate']:+.3f})" for r, c in other]
            said.append(f"In {what}, {listed(each)} {_are(each)} {word} it by more than noise.")
    if len(known) < len(compared):
        said.append("Too few items were measured to tell a difference in answers from noise.")
    return said


def _closest(report: Report) -> list[str]:
    best = report.closest
    if best is None:
        return ["No blend has a KL from full prefill, so none can be called closest."]
    said = f"Closest to full prefill is {short(best['mode'])}, with a KL of {_kl(best)} nats"
    if (spent := measured(best, "budget_spent")) is not None:
        said += f" for {percent(spent)} of the tokens computed afresh"
    said += f", at a speed-up of {_fast(best)}." if report.correct and speedup(best) else "."
    rest = [r for r in report.approximate if r is not best]
    against = [(r, (best.get("against") or {}).get(r["mode"], {}).get("kl")) for r in rest]
    level = [r for r, c in against if c and c.get("within_noise")]
    if level:
        said += f" Its KL is within noise of that of {_names(level)}."
    return [said]


def _published(report: Report) -> list[str]:
    """The rule of CacheBlend beside the closest blend."""
    best = report.closest
    said = []
    for row in report.blends:
        if best is None or not published(row) or row is best or measured(row, "kl") is None:
            continue
        words = (best.get("against") or {}).get(row["mode"], {}).get("kl", {}).get("words")
        rule = "CacheBlend as published" if name(row) == "cacheblend" else "CacheBlend's rule"
        text = f"{rule} ({short(row['mode'])}, {percent(measured(row, 'budget_spent'))} spent) has a KL of {_kl(row)}"
        if report.correct and speedup(row):
            text += f" at {_fast(row)}"
        if words:
            text += f"; item by item, the KL of {short(best['mode'])} against it is {words}"
        said.append(f"{text}.")
    return said


def _slow(report: Report) -> list[str]:
    if not report.correct:
        return []
    slow = [r for r in report.rows if name(r) != "full" and (s := speedup(r)) and s[0] < 1]
    return [f"Slower than full prefill here: {_names(slow)}."] if slow else []


def _doubts(report: Report) -> list[str]:
    said = []
    ceiling = measured(report.full, "ceiling")
    if ceiling is not None and ceiling < 1:
        share = percent(ceiling, 0)
        said.append(f"A gold answer stands in the passages of {share} of the items; no mode can read off the rest.")
    for row in report.rows:
        for reason, count in (row.get("fallbacks") or {}).items():
            said.append(f"In {count} of {row.get('n')} items, {short(row['mode'])} fell back: {clean(str(reason))}.")
    missing = len(report.run.items) * len(report.rows) - len(report.run.results)
    if missing > 0:
        said.append(f"The run is not complete: {missing} results of its items and modes are missing.")
    for mode, reason in (report.meta.get("left_out") or {}).items():
        said.append(f"{short(str(mode))} was left out: {clean(str(reason))}.")
    return said


def _names(rows: list[Row]) -> str:
    return listed([short(r["mode"]) for r in rows])


def _are(subjects: Sequence[object]) -> str:
    return "is" if len(subjects) == 1 else "are"


def _items(row: Row | None) -> str:
    n = row.get("n") if row else None
    return "1 item" if n == 1 else f"{n} items"


def _kl(row: Row) -> str:
    error = measured(row, "kl_se")
    return figure(measured(row, "kl")) + ("" if error is None else f" ± {figure(error, 2)}")


def _fast(row: Row) -> str:
    found = speedup(row)
    assert found is not None
    interval = f" (95 % interval {found[1]:.2f} to {found[2]:.2f})" if found[1] < found[2] else ""
    return f"{found[0]:.2f}x{interval}"


def check(report: Report) -> str:
    """What came of the check that budget 1 is full prefill."""
    budget, noise = measured(report.meta, "budget_one_kl"), measured(report.meta, "noise_kl")
    figures = f"KL {figure(budget)} with every token recomputed, {figure(noise)} of full prefill against itself"
    if report.correct:
        return f"Correctness: passed ({figures})."
    if report.meta.get("correct") is False:
        return (
            f"Correctness: FAILED ({figures}). A blend that recomputes every token is not full prefill on this model "
            "and engine, so its figures are not to be trusted and no speed-up is shown."
        )
    return "Correctness: NOT CHECKED. Without the check that budget 1 is full prefill, no speed-up is shown."


def subtitle(report: Report) -> str:
    """What was run, in a line."""
    meta, where = report.meta, report.meta.get("environment") or {}
    parts = [
        f"{len(report.run.items)} items, {len(report.rows)} modes",
        f"{meta.get('engine')}, {meta.get('dtype')}",
        where.get("gpu") or where.get("cpu"),
        f"BlendKV {meta.get('version')}",
        where.get("date"),
        f"seed {meta.get('seed')}",
        f"configuration {str(meta.get('config'))[:12]}",
    ]
    return clean(" · ".join(p for p in parts if p))


def facts(report: Report) -> list[tuple[str, str]]:
    """What was run, on what."""
    meta, where = report.meta, report.meta.get("environment") or {}
    threads = meta.get("threads") or where.get("threads")
    cpu = f"{where.get('cpu')} ({where.get('cpu_isa')}), {where.get('cores')} cores, {threads} threads"
    hardware = [where.get("gpu"), cpu, f"{size(measured(where, 'memory_bytes'))} of memory"]
    known = {"date", "cpu", "cpu_isa", "cores", "threads", "gpu", "memory_bytes"}
    versions = [f"{key} {value}" for key, value in where.items() if key not in known and value is not None]
    settings = [f"{key} {value}" for key, value in (meta.get("settings") or {}).items() if key != "seed"]
    found: list[tuple[str, Any]] = [
        ("Model", meta.get("model")),
        ("Data", f"{meta.get('data')} ({meta.get('format')})" if meta.get("format") else meta.get("data")),
        ("Items and modes", f"{len(report.run.items)} and {len(report.rows)}"),
        ("Engine", f"{meta.get('engine')}, {meta.get('dtype')}"),
        ("Hardware", "; ".join(h for h in hardware if h) if where else None),
        ("Versions", ", ".join(versions)),
        ("Settings", ", ".join(settings)),
        ("Seed", meta.get("seed")),
        ("Date", where.get("date")),
        ("Configuration", meta.get("config")),
    ]
    return [(key, clean(str(value))) for key, value in found if value not in (None, "")]
