"""What the sides of a live run are worth: rows by class, and whether any ratio may be given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from blendkv.eval.bench.market_live_drive import Seen
from blendkv.eval.bench.market_live_load import Load
from blendkv.eval.bench.market_live_settings import LiveSettings
from blendkv.eval.bench.rows import Row

CLASSES = ("agent", "chat", "rag", "single")
EVEN = 0.15
"""Times of two policies are compared if computing a passage took so much longer or shorter at most."""
SAME = ("text", "sources", "tokens of the prompt", "budget spent")


@dataclass
class Side:
    """One policy in one round: what clients saw of the requests, and what the server counted."""

    policy: str
    seed: int
    load: Load
    seen: list[Seen]
    counted: dict[str, float]
    limit: int
    first: int
    """The first request that is in the figures."""

    def of(self, kind: str) -> list[Seen]:
        """Of a class, those that are in the figures and were answered."""
        pairs = list(zip(self.load.asks, self.seen, strict=True))[self.first :]
        return [seen for ask, seen in pairs if not seen.error and kind in ("all", ask.use.workload)]


@dataclass
class LiveResult:
    """Rows by class and policy over all rounds, rows by round, and what is wrong or must be said."""

    rows: list[Row]
    rounds: list[Row]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def live_result(sides: Sequence[Side], settings: LiveSettings) -> LiveResult:
    """Rows over all rounds, with ratios to the first policy if every answer is right."""
    problems = [line for side in sides for line in _failures(side)]
    base = settings.policies[0]
    for side in sides:
        if side.policy != base:
            (other,) = (s for s in sides if s.seed == side.seed and s.policy == base)
            problems += _differences(other, side)
    by_policy = {policy: [side for side in sides if side.policy == policy] for policy in settings.policies}
    uneven = _uneven(by_policy, base)
    rows = []
    for kind in (*CLASSES, "all"):
        first = _row(by_policy[base], kind)
        for policy, found in by_policy.items():
            row = _row(found, kind)
            red = bool(problems) or policy in uneven
            rows.append({"policy": policy, "class": kind, **row, **_ratios(first, row, red)})
    notes = [*_notes(sides), *uneven.values()]
    return LiveResult(rows, [_round(side) for side in sides], problems, notes)


def _uneven(by_policy: Mapping[str, Sequence[Side]], base: str) -> dict[str, str]:
    """Policies whose servers ran on a machine that was busier or idler than for the first one's, and how it shows."""
    first, found = _passage_seconds(by_policy[base]), {}
    for policy, sides in by_policy.items():
        own = _passage_seconds(sides)
        if abs(own - first) > EVEN * first:
            found[policy] = (
                f"computing one passage took {first * 1e3:.0f} ms under {base} and {own * 1e3:.0f} ms under {policy}: "
                "the machine was not equally busy, and no ratio of times is given"
            )
    return found


def _failures(side: Side) -> list[str]:
    """Requests without an answer, or with one that was not blended."""
    whose = f"{side.policy}, seed {side.seed}"
    errors = Counter(seen.error for seen in side.seen if seen.error)
    other = Counter(str(seen.told["outcome"]) for seen in side.seen if seen.told and seen.told["outcome"] != "blended")
    return [
        *(f"{whose}: {count} requests were not answered: {error}" for error, count in errors.items()),
        *(f"{whose}: {count} answers are {outcome}, not blended" for outcome, count in other.items()),
    ]


def _differences(one: Side, other: Side) -> list[str]:
    """In what the answers of two sides differ: both had the same requests, so in nothing."""
    found = []
    pairs = [(a, b) for a, b in zip(one.seen, other.seen, strict=True) if not a.error and not b.error]
    for what in SAME:
        count = sum(_facts(a)[what] != _facts(b)[what] for a, b in pairs)
        if count:
            whose = f"seed {one.seed}, {one.policy} and {other.policy}"
            found.append(f"{whose}: {count} of {len(pairs)} answers differ in {what}")
    return found


def _facts(seen: Seen) -> dict[str, object]:
    assert seen.told is not None
    sources = [source["id"] for source in seen.told["sources"]]
    facts = (seen.text, sources, sum(seen.told["tokens"].values()), seen.told["budget_spent"])
    return dict(zip(SAME, facts, strict=True))


def _row(sides: Sequence[Side], kind: str) -> Row:
    """Figures of a class over all rounds of a policy."""
    seen = [seen for side in sides for seen in side.of(kind)]
    told = [s.told for s in seen if s.told is not None]
    times = np.asarray([s.ttft for s in seen]) * 1e3
    prepared = np.asarray([t["seconds"]["prepare"] for t in told])
    return {
        "requests": len(seen),
        "p50_ttft_ms": round(float(np.percentile(times, 50)), 1) if len(seen) else None,
        "p99_ttft_ms": round(float(np.percentile(times, 99)), 1) if len(seen) else None,
        "prepare_s": round(float(prepared.sum()), 3),
        "found_whole": round(float((prepared < _passage_seconds(sides) / 2.0).mean()), 4) if len(seen) else None,
        "queue_s": round(float(sum(t["seconds"]["queue"] for t in told)), 3),
    }


def _passage_seconds(sides: Sequence[Side]) -> float:
    """Seconds that one missing passage takes, look-ups included."""
    told = [seen.told for side in sides for seen in side.seen if seen.told is not None]
    computed = sum(side.counted["computed"] for side in sides)
    return float(sum(t["seconds"]["prepare"] for t in told)) / max(1.0, computed)


def _ratios(first: Row, row: Row, red: bool) -> Row:
    """How much shorter times are than under the first policy; none while something is wrong."""
    names = {"p50_speedup": "p50_ttft_ms", "p99_speedup": "p99_ttft_ms", "prepare_speedup": "prepare_s"}
    return {
        name: None if red or not row[of] or first[of] is None else round(first[of] / row[of], 3)
        for name, of in names.items()
    }


def _round(side: Side) -> Row:
    """One side of one round: what the server counted, and each class by itself."""
    hits, computed = side.counted["hits"], side.counted["computed"]
    return {
        "policy": side.policy, "seed": side.seed, "requests": len(side.load.asks), "limit_bytes": side.limit,
        "passages": len(side.load.passages), **side.counted, "hit_rate": round(hits / max(1.0, hits + computed), 4),
        "hints": dict(Counter(seen.hint for seen in side.seen if seen.hint)),
        "by_class": {kind: _row([side], kind) for kind in (*CLASSES, "all")},
    }  # fmt: skip


def _notes(sides: Sequence[Side]) -> list[str]:
    """What is no fault and should be known."""
    return [
        f"{side.policy}, seed {side.seed}: {late} hints came after the session's next turn was sent and were left out"
        for side in sides
        if (late := sum(seen.hint == "late" for seen in side.seen))
    ]
