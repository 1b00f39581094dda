"""What is asked in an evaluation, and what is written down about it: items, results, and the folder of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from blendkv.errors import InputError

Task = Literal["qa", "summary"]
"""``qa`` is scored by F1 and exact match, ``summary`` by Rouge-L."""


@dataclass(frozen=True)
class EvalItem:
    """One question with its passages.

    Attributes
    ----------
    id
        Unique within its data.
    question
        As the model gets it, behind the passages.
    answers
        Gold answers, any of which is right; for a summary, the reference texts.
    contexts
        Passages, in the order of the prompt; each becomes a chunk.
    task
        How answers are scored.
    max_new_tokens
        Length of an answer.
    instruction
        Stands before the question instead of the prompt's own; None for that one.
    meta
        What else is known, such as the kind of a generated item.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    contexts: tuple[str, ...]
    task: Task = "qa"
    max_new_tokens: int = 32
    instruction: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ItemRecord:
    """A line of ``items.jsonl``: an item as the model saw it.

    ``chunks`` holds the text of every token of every chunk of the prompt; ``dropped`` counts passages that the model's
    context had no room for; ``ceiling`` says whether a gold answer stands in the passages that were kept.
    """

    item: str
    task: Task
    question: str
    answers: list[str]
    chunks: list[list[str]]
    dropped: int
    ceiling: bool
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """A line of ``results.jsonl``: one item in one mode. What was not measured is None.

    Attributes
    ----------
    item, task, mode, engine, model
        Of what; ``mode`` as it was asked for.
    seed, config, version, hardware
        Of the run: ``config`` is a digest of all that the figures depend on but item and mode.
    prompt_tokens, reusable_tokens
        Of the prompt; of its chunks with stored KV.
    selector, shift, nominal, budget_asked, budget_spent
        Of the blend; ``nominal`` is the ratio (or tokens per chunk) by which a published baseline names itself.
    recomputed_tokens, scored_rows, bytes_loaded
        See `blendkv.blend.BlendSummary`.
    fallback
        Why something else was done than the mode says.
    answer
        The mode's greedy answer.
    f1, em, rouge_l
        Against the gold answers, 0 to 1.
    f1_full
        F1 of the answer against full prefill's own.
    kl, kl_first, top1
        On full prefill's own greedy continuation, teacher-forced: mean KL(full || mode) in nats over its tokens, KL
        of the first token, share of tokens with the same most likely one.
    kl_gold
        Mean KL(full || mode) over the tokens of the first gold answer, teacher-forced.
    ttft_s
        Seconds from the call to the first token, one per repeat.
    stages_s
        Median seconds of ``score``, ``load``, ``rotate``, ``recompute`` and ``question`` (the rest).
    predicted_s
        What the loading planner expected: ``load``, ``recompute``, ``score``, ``total``.
    deviation
        Relative deviation from full prefill by layer: ``k``, ``v`` over the chunks' tokens, ``attention`` over the
        question's rows.
    selected
        By chunk of the prompt: offsets of its recomputed tokens.
    """

    item: str
    task: Task
    mode: str
    engine: str
    model: str
    seed: int
    config: str
    version: str
    hardware: str
    prompt_tokens: int
    answer: str
    ttft_s: list[float]
    stages_s: dict[str, float] = field(default_factory=dict)
    reusable_tokens: int | None = None
    selector: str | None = None
    shift: str | None = None
    nominal: float | None = None
    budget_asked: float | None = None
    budget_spent: float | None = None
    recomputed_tokens: int | None = None
    scored_rows: int | None = None
    bytes_loaded: int | None = None
    fallback: str | None = None
    f1: float | None = None
    em: float | None = None
    rouge_l: float | None = None
    f1_full: float | None = None
    kl: float | None = None
    kl_first: float | None = None
    kl_gold: float | None = None
    top1: float | None = None
    predicted_s: dict[str, float] | None = None
    deviation: dict[str, list[float]] | None = None
    selected: list[list[int]] | None = None


@dataclass(frozen=True)
class Run:
    """A run's folder, read: ``meta`` is ``run.json``; results in the order in which they were measured."""

    folder: Path
    meta: Mapping[str, Any]
    items: Mapping[str, ItemRecord]
    results: Sequence[Result]

    @property
    def modes(self) -> list[str]:
        """Mode specs in the order of their first result."""
        return list(dict.fromkeys(r.mode for r in self.results))


class RunFolder:
    """Where a run is written, line by line: what is written stays, whatever happens next.

    ``run.json`` holds the configuration and its digest, ``items.jsonl`` and ``results.jsonl`` a line each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, meta: Mapping[str, Any]) -> Run:
        """Begin a run, or go on with one of the same configuration; returns what is there already.

        Raises
        ------
        InputError
            If the folder holds a run of another configuration.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        header = self.path / "run.json"
        if header.is_file():
            found = self.read()
            if found.meta["config"] != meta["config"]:
                raise InputError(
                    f"{self.path} holds a run with other settings ({found.meta['config'][:12]}, these are "
                    f"{meta['config'][:12]}); give another --out, or remove the folder"
                )
            for name in ("items.jsonl", "results.jsonl"):
                _cut_torn_line(self.path / name)
            return found
        self._write(meta)
        return Run(self.path, dict(meta), {}, [])

    def note(self, meta: Mapping[str, Any]) -> None:
        """Replace ``run.json``: more is known of the run than at its start."""
        self._write(meta)

    def _write(self, meta: Mapping[str, Any]) -> None:
        temporary = self.path / "run.json.tmp"
        temporary.write_text(json.dumps(meta, indent=2, default=str) + "\n", encoding="utf-8")
        temporary.replace(self.path / "run.json")

    def add(self, record: ItemRecord | Result) -> None:
        """Append a line; it is on disk when this returns."""
        name = "items.jsonl" if isinstance(record, ItemRecord) else "results.jsonl"
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> Run:
        """Read what is there; a line that was cut short by a crash is left out.

        Raises
        ------
        InputError
            If the folder holds no run, or one whose lines are not understood.
        """
        try:
            meta = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            items = {row["item"]: ItemRecord(**row) for row in _lines(self.path / "items.jsonl")}
            results = [Result(**row) for row in _lines(self.path / "results.jsonl")]
        except FileNotFoundError as error:
            raise InputError(
                f"{self.path} holds no run of blendkv eval; make one with: blendkv eval run --out {self.path}"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{self.path} holds a run that is not understood ({error}); run it again elsewhere"
            ) from error
        return Run(self.path, meta, items, results)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _cut_torn_line(path: Path) -> None:
    """Drop what a crash left of a last line, so that the next one does not go on in it."""
    if not path.is_file():
        return
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end != len(whole):
        os.truncate(path, end)
