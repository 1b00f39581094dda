"""The live load: a generated trace as chats over HTTP, whose passages are chunks of a collection.

What the simulator calls blocks are passages here, because chunk KV is what a store keeps: an agent's manual, its task
and all results of its tools so far; the document that a chat is about; the passages of a question over a corpus; what
a single shot brings along. A request names its passages (``where``), as a client does that knows them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from blendkv.errors import BlendKVError
from blendkv.market.base import Use
from blendkv.market.generate import Recipe, draw
from blendkv.market.hints import Hint
from blendkv.market.trace import Request
from blendkv.market.workloads import Agents, Chats, Corpora, Singles, Workload
from blendkv.retrieval.load import PYTHON_REFERENCE, load_corpus

NAME = "name"
"""The metadata field by which requests ask for passages."""
PER_QUESTION = 5
PER_CHAT = 3
PER_SINGLE = 4
TYPES = 3
"""Agent types, each with a manual that all its agents share."""
_REMEMBERED = 2


@dataclass(frozen=True)
class Ask:
    """One request: what it asks for, for whom, and when.

    Attributes
    ----------
    at
        Seconds after the start.
    use
        Workload class and session.
    turn
        Of its session, from 0.
    passages
        Names of the passages in its prompt.
    messages
        The conversation; earlier answers are written, so that all servers get the same.
    hint, ttl
        What its session says once it has the answer; see `blendkv.market.hints`.
    """

    at: float
    use: Use
    turn: int
    passages: tuple[str, ...]
    messages: tuple[Mapping[str, str], ...]
    hint: Hint | None
    ttl: float


@dataclass(frozen=True)
class Load:
    """The requests by arrival, and the text of every passage by name."""

    asks: tuple[Ask, ...]
    passages: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write the passages as rows that `blendkv ingest` takes."""
        rows = ({"id": name, "text": text, "metadata": {NAME: name}} for name, text in self.passages.items())
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class _LiveRecipe(Recipe):
    """The mixed trace over one corpus of a size that is ingested in seconds."""

    corpus: int = 150

    def workloads(self) -> dict[str, Workload]:
        corpora = Corpora(corpora=1, chunks=self.corpus, per_request=PER_QUESTION)
        return {"agent": Agents(), "chat": Chats(), "rag": corpora, "single": Singles()}


def make_load(seed: int, requests: int, rate: float, speed: float, corpus: int, words: int) -> Load:
    """The mixed trace (`blendkv.market.generate`) with its times divided by ``speed``, as requests over HTTP.

    Parameters
    ----------
    seed
        Of the trace and of the questions.
    requests
        How many.
    rate
        Requests per second as they are sent.
    speed
        All gaps, time-outs and think times are this much shorter than in the trace.
    corpus
        Passages that questions are drawn over, by Zipf's law.
    words
        Of each passage.
    """
    trace = draw(_LiveRecipe(corpus=corpus), seed, requests, rate / speed)
    turns, singles = Counter[str](), 0
    asks: list[Ask] = []
    for request in trace:
        session = request.use.session
        turn = turns[session] if session else 0
        turns[session] += 1
        names = _passages(request, turn, singles)
        singles += request.use.workload == "single"
        messages = _messages(f"{seed} {session or len(asks)}", request.use, turn, names)
        at, ttl = request.arrival / speed, request.ttl / speed
        asks.append(Ask(at, request.use, turn, names, messages, request.hint, ttl))
    wanted = dict.fromkeys(name for ask in asks for name in ask.passages)
    texts = cycle(_texts(words))
    return Load(tuple(asks), {name: f"Passage {name}. {next(texts)}" for name in wanted})


def _passages(request: Request, turn: int, singles: int) -> tuple[str, ...]:
    """The names of what stands in a prompt, in the order of need; ``singles`` numbers single shots."""
    kind, session = request.use
    if kind == "agent":
        manual = int(session.rpartition("-")[2]) % TYPES
        results = [f"{session}/result-{n}" for n in range(turn)]
        return (f"manual-{manual}", f"{session}/task", *results)
    if kind == "chat":
        return tuple(f"{session}/page-{n}" for n in range(PER_CHAT))
    if kind == "rag":
        return tuple(block.key for block in request.chunks)
    return tuple(f"single-{singles}/part-{n}" for n in range(PER_SINGLE))


def _messages(seed: str, use: Use, turn: int, names: Sequence[str]) -> tuple[dict[str, str], ...]:
    def question(number: int) -> dict[str, str]:
        about = Random(f"{seed} {number}").choice(names)
        words = f"Question {number + 1}: what does passage {about} say about names and values?"
        return {"role": "user", "content": words}

    if use.workload != "chat":
        return (question(turn),)
    said = []
    for number in range(max(0, turn - _REMEMBERED), turn):
        said += [question(number), {"role": "assistant", "content": "It says how they are bound and looked up."}]
    return (*said, question(turn))


def _texts(length: int) -> Iterator[str]:
    """Runs of ``length`` words of the Python reference."""
    for document in load_corpus([PYTHON_REFERENCE], on_skip=_refuse):
        words = document.text.split()
        for first in range(0, len(words) - length + 1, length):
            yield " ".join(words[first : first + length])


def _refuse(error: BlendKVError) -> None:
    raise error


def ask_body(ask: Ask, model: str, mode: str, answer_tokens: int) -> dict[str, Any]:
    """The body of ``POST /v1/chat/completions``, streamed."""
    search = {"collection": True, "k": len(ask.passages), "where": {NAME: list(ask.passages)}, "mode": mode}
    return {
        "model": model, "messages": list(ask.messages), "max_tokens": answer_tokens, "stream": True, "blendkv": search,
    }  # fmt: skip
