"""The kinds of generated items: chains of facts, several values of one key, look-ups, and updates."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from blendkv.errors import InputError
from blendkv.eval.synth_words import Names, Prose
from blendkv.registry import Registry

_BOUNDS = {"hops": (1, 4), "distractors": (0, 200), "filler": (55, 280), "documents": (1, 200), "values": (1, 4)}


@dataclass(frozen=True)
class Difficulty:
    """Knobs of generated items; None is the kind's own default.

    Attributes
    ----------
    hops
        Facts that a question chains, 1 to 4.
    distractors
        Documents with a fact of the same form about something else.
    filler
        Words of a document that state nothing, 55 to 280: documents of about 60 to 400 tokens.
    documents
        Documents of an item; what facts and distractors leave over is filler alone. None for no more than these.
    values
        Values of a key (needles, updates), or entries of a document (lookup), 1 to 4.

    Raises
    ------
    InputError
        If a knob is outside of its range.
    """

    hops: int | None = None
    distractors: int | None = None
    filler: int | None = None
    documents: int | None = None
    values: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not low <= value <= high):
                raise InputError(
                    f"{name}={value!r} for generated items; a whole number from {low} to {high} is allowed"
                )

    def given(self) -> set[str]:
        """Names of the knobs that are set."""
        return {f.name for f in fields(self) if getattr(self, f.name) is not None}


@dataclass(frozen=True)
class Draft:
    """An item before it has an id. ``support`` are the indices of the documents that the answer needs."""

    question: str
    answers: tuple[str, ...]
    contexts: tuple[str, ...]
    support: tuple[int, ...]
    max_new_tokens: int = 32
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """How items of one kind are made, and the defaults of the knobs that it has."""

    build: Callable[[_Writer, Mapping[str, int]], Draft]
    defaults: Mapping[str, int]

    def draft(self, rng: random.Random, difficulty: Difficulty) -> Draft:
        """Make one item.

        Raises
        ------
        InputError
            If fewer documents are asked for than the facts and distractors need.
        """
        knobs = {**self.defaults, **{name: int(getattr(difficulty, name)) for name in difficulty.given()}}
        return self.build(_Writer(rng, knobs.get("documents"), knobs["filler"]), knobs)


KINDS: Registry[Kind] = Registry("kind of generated items")
GENERAL_KNOBS = frozenset({"distractors", "filler", "documents"})


@dataclass
class _Document:
    """A title, the facts, and whether the answer needs them."""

    title: str
    facts: Sequence[str]
    needed: bool = False


class _Writer:
    """Writes the documents of one item: names, facts amid prose, order."""

    def __init__(self, rng: random.Random, documents: int | None, filler: int) -> None:
        self.rng = rng
        self.names = Names(rng)
        self._prose = Prose(rng)
        self._documents = documents
        self._filler = filler

    def write(self, facts: Sequence[_Document]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The texts, in the given order with filler documents in between, and the indices of the needed ones."""
        wanted = len(facts) if self._documents is None else self._documents
        if wanted < len(facts):
            raise InputError(
                f"documents={wanted} for generated items, but their facts and distractors need {len(facts)}; "
                "give more documents, or fewer distractors"
            )
        order = list(facts)
        for _ in range(wanted - len(facts)):
            order.insert(self.rng.randint(0, len(order)), _Document(self.names.word(), ()))
        return tuple(map(self._text, order)), tuple(i for i, d in enumerate(order) if d.needed)

    def _text(self, document: _Document) -> str:
        sentences = self._prose.sentences(self._filler)
        for fact in document.facts:
            sentences.insert(self.rng.randint(0, len(sentences)), fact)
        return f"{document.title}\n{' '.join(sentences)}\n\n"


@dataclass(frozen=True)
class _Step:
    """A fact from ``{a}`` to ``{b}``, the phrase that stands for ``{b}``, and the question that asks for it."""

    fact: str
    phrase: str
    question: str
    names: Callable[[Names], str]


_CHAINS = (
    (
        _Step("{b} wrote the book {a}.", "the writer of the book {a}", "Who wrote the book {a}?", Names.person),
        _Step("{a} was born in {b}.", "the birthplace of {a}", "Where was {a} born?", Names.place),
        _Step("{b} discovered {a}.", "the discoverer of {a}", "Who discovered {a}?", Names.person),
        _Step("{a} died in {b}.", "the place where {a} died", "Where did {a} die?", Names.place),
    ),
    (
        _Step("{b} built the clock {a}.", "the builder of the clock {a}", "Who built the clock {a}?", Names.person),
        _Step("{a} studied in {b}.", "the place where {a} studied", "Where did {a} study?", Names.place),
        _Step("{b} founded {a}.", "the founder of {a}", "Who founded {a}?", Names.person),
        _Step("{a} is buried in {b}.", "the grave of {a}", "Where is {a} buried?", Names.place),
    ),
    (
        _Step("{b} owns the ship {a}.", "the owner of the ship {a}", "Who owns the ship {a}?", Names.person),
        _Step("{a} lives in {b}.", "the home of {a}", "Where does {a} live?", Names.place),
        _Step("{b} governs {a}.", "the governor of {a}", "Who governs {a}?", Names.person),
        _Step("{a} comes from {b}.", "the home town of {a}", "Where does {a} come from?", Names.place),
    ),
)


def _chain(writer: _Writer, knobs: Mapping[str, int]) -> Draft:
    """Facts that follow from one another, each in a document of its own; distractors are other chains of this form."""
    rng, hops = writer.rng, knobs["hops"]
    all_steps = rng.choice(_CHAINS)
    first = rng.randint(0, len(all_steps) - hops)
    steps = all_steps[first : first + hops]

    def path() -> list[str]:
        return [writer.names.word(), *(step.names(writer.names) for step in steps)]

    chain = path()
    documents = [_Document(a, [s.fact.format(a=a, b=b)], True) for s, a, b in _links(steps, chain)]
    while len(documents) < hops + knobs["distractors"]:
        documents += [_Document(a, [s.fact.format(a=a, b=b)]) for s, a, b in _links(steps, path())]
    documents = documents[: hops + knobs["distractors"]]
    rng.shuffle(documents)
    asked = chain[0]
    for step in steps[:-1]:
        asked = step.phrase.format(a=asked)
    contexts, support = writer.write(documents)
    meta = {"hops": hops, "chain": chain}
    return Draft(steps[-1].question.format(a=asked), (chain[-1],), contexts, support, meta=meta)


def _links(steps: Sequence[_Step], path: Sequence[str]) -> Iterable[tuple[_Step, str, str]]:
    return zip(steps, path[:-1], path[1:], strict=True)


_NEEDLES = (
    ("{b} founded {a}.", "Which {n} people founded {a}?"),
    ("{b} painted {a}.", "Which {n} people painted {a}?"),
    ("{b} visited {a}.", "Which {n} people visited {a}?"),
)
_NUMBERS = {1: "only", 2: "two", 3: "three", 4: "four"}


def _needles(writer: _Writer, knobs: Mapping[str, int]) -> Draft:
    """Several values of one key, each in a document of its own; the answer is all of them, in any order."""
    fact, question = writer.rng.choice(_NEEDLES)
    key, count = writer.names.word(), knobs["values"]
    people = [writer.names.person() for _ in range(count)]
    documents = [_Document(b, [fact.format(a=key, b=b)], True) for b in people]
    for _ in range(knobs["distractors"]):
        person = writer.names.person()
        documents.append(_Document(person, [fact.format(a=writer.names.word(), b=person)]))
    writer.rng.shuffle(documents)
    contexts, support = writer.write(documents)
    answers = tuple(
        dict.fromkeys(
            text
            for order in itertools.permutations(people)
            for text in (" and ".join(filter(None, (", ".join(order[:-1]), order[-1]))), ", ".join(order))
        )
    )
    meta = {"key": key, "parts": people}
    asked = question.format(a=key, n=_NUMBERS[count])
    return Draft(asked, answers, contexts, support, max_new_tokens=16 + 12 * count, meta=meta)


_LOOKUPS = (
    ("The motto of {a} is {b}.", "What is the motto of {a}?"),
    ("The password of {a} is {b}.", "What is the password of {a}?"),
    ("The sign of {a} shows {b}.", "What does the sign of {a} show?"),
)


def _lookup(writer: _Writer, knobs: Mapping[str, int]) -> Draft:
    """One entry out of registers with ``values`` entries each; distractors are further registers."""
    rng, names = writer.rng, writer.names
    fact, question = rng.choice(_LOOKUPS)
    key, value = names.word(), names.motto()

    def others(count: int) -> list[str]:
        return [fact.format(a=names.word(), b=names.motto()) for _ in range(count)]

    entries = [fact.format(a=key, b=value), *others(knobs["values"] - 1)]
    documents = [_Document(f"Register of {names.word()}", entries, True)]
    documents += [
        _Document(f"Register of {names.word()}", others(knobs["values"])) for _ in range(knobs["distractors"])
    ]
    rng.shuffle(documents)
    contexts, support = writer.write(documents)
    return Draft(question.format(a=key), (value,), contexts, support, meta={"key": key})


_UPDATES = (
    ("the keeper of {a}", "Who is the keeper of {a} now?"),
    ("the mayor of {a}", "Who is the mayor of {a} now?"),
    ("the owner of {a}", "Who is the owner of {a} now?"),
)


def _updates(writer: _Writer, knobs: Mapping[str, int]) -> Draft:
    """A value that later documents change: they bear no dates, so only their order in the prompt says which is last.

    Distractors are first values and changes of other keys.
    """
    rng, names = writer.rng, writer.names
    subject, question = rng.choice(_UPDATES)
    key = names.word()
    values = [names.person() for _ in range(knobs["values"])]
    tracks = [_history(subject.format(a=key), values, needed=True)]
    missing = knobs["distractors"]
    while missing:
        count = min(missing, knobs["values"])
        tracks.append(_history(subject.format(a=names.word()), [names.person() for _ in range(count)], needed=False))
        missing -= count
    # Each key's documents keep their order; which key comes next is drawn.
    turns = [i for i, track in enumerate(tracks) for _ in track]
    rng.shuffle(turns)
    queues = [iter(track) for track in tracks]
    contexts, support = writer.write([next(queues[i]) for i in turns])
    asked = f"The passages are in the order of time. {question.format(a=key)}"
    return Draft(asked, (values[-1],), contexts, support, meta={"key": key, "values": values})


def _history(subject: str, values: Sequence[str], needed: bool) -> list[_Document]:
    facts = [
        f"{subject[0].upper()}{subject[1:]} was {values[0]}.",
        *(f"Later this was changed: {subject} is now {value}." for value in values[1:]),
    ]
    return [_Document("Chronicle", [fact], needed) for fact in facts]


# What SmolLM2-135M-Instruct solves in part: with more distractors it is soon lost (docs/eval-data.md).
KINDS.add("chain")(Kind(_chain, {"hops": 2, "distractors": 1, "filler": 55}))
KINDS.add("needles")(Kind(_needles, {"values": 2, "distractors": 2, "filler": 55}))
KINDS.add("lookup")(Kind(_lookup, {"values": 1, "distractors": 3, "filler": 55}))
KINDS.add("updates")(Kind(_updates, {"values": 3, "distractors": 1, "filler": 55}))
