"""The layouts of evaluation data: one function per format, each makes an item of one record."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blendkv.errors import InputError
from blendkv.eval.items import EvalItem
from blendkv.registry import Registry
from blendkv.retrieval.split import normalise

SUMMARY_TOKENS = 128
UUID_TOKENS = 48
"""A UUID has about 31 tokens in small vocabularies."""
RECORDS_PER_CONTEXT = 10
"""Key-value records of a passage, at most."""
FEW_SHOT = 5
"""Example dialogues in front of one that is to be summarised."""

DIALOGUE_INSTRUCTION = "Summarize the last dialogue in a few short sentences, as in the examples above."
NEWS_INSTRUCTION = "Write a summary of all the news passages above."
NEWS_QUESTION = "What do the news passages report?"


class Unanswerable(Exception):
    """A record that asks nothing; it is left out and counted."""


@dataclass(frozen=True)
class Row:
    """One record of the data.

    Attributes
    ----------
    values
        Its fields.
    where
        What errors call it: file, and line or record number.
    id
        Of the item it becomes.
    needs
        Names of the fields of its format.
    others
        Draws so many other records, or fewer where there are not enough: few-shot examples.
    """

    values: Mapping[str, Any]
    where: str
    id: str
    needs: tuple[str, ...]
    others: Callable[[int], Sequence[Mapping[str, Any]]]

    def error(self, what: str) -> InputError:
        """An error that names this record and says what its format needs."""
        return InputError(f"{self.where}: {what}; its format needs the fields {', '.join(self.needs)}: mend the record")

    def get(self, name: str) -> Any:
        """A field that must be there."""
        if name not in self.values:
            raise self.error(f"no field {name!r}, only {', '.join(map(str, self.values)) or 'none'}")
        return self.values[name]

    def text(self, name: str) -> str:
        """A field that must be text, and not blank."""
        return self.checked(self.get(name), repr(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that is a text or a list of texts, one at least."""
        value = self.get(name)
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list | tuple) or not found:
            raise self.error(f"{name!r} is {_shown(value)}, a text or a list of texts is needed")
        return tuple(self.checked(text, f"{name!r}[{i}]") for i, text in enumerate(found))

    def checked(self, value: Any, name: str) -> str:
        """Return ``value`` if it is text with something in it, valid as Unicode."""
        if not isinstance(value, str):
            raise self.error(f"{name} is {_shown(value)}, text is needed")
        if not value.strip():
            raise self.error(f"{name} is empty")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(f"{name} holds a lone surrogate, which no encoding can express") from None
        return value

    def passages(self, name: str) -> tuple[str, ...]:
        """A list of passages: texts, or objects with ``text`` and perhaps ``title``."""
        value = self.get(name)
        if not isinstance(value, list | tuple) or not value:
            raise self.error(f"{name!r} is {_shown(value)}, a list of passages is needed")
        return tuple(self.passage(entry, f"{name!r}[{i}]") for i, entry in enumerate(value))

    def passage(self, entry: Any, name: str) -> str:
        """One passage, its title in front, a blank line behind."""
        if not isinstance(entry, Mapping):
            return normalise(self.checked(entry, name))
        if "text" not in entry:
            raise self.error(f"{name} has no 'text', only {', '.join(map(str, entry)) or 'nothing'}")
        return titled(entry.get("title"), self.checked(entry["text"], f"{name}['text']"))

    def item(self, question: str, answers: Sequence[str], contexts: Sequence[str], **rest: Any) -> EvalItem:
        """The item; ``rest`` are further fields of `EvalItem`."""
        known = next((self.values[k] for k in ("id", "_id") if isinstance(self.values.get(k), str | int)), None)
        meta = {} if known is None else {"id": known}
        return EvalItem(self.id, question, tuple(answers), tuple(contexts), meta=meta, **rest)

    def summary(self, question: str, answers: Sequence[str], contexts: Sequence[str], instruction: str) -> EvalItem:
        """An item whose answer is a summary."""
        return self.item(
            question, answers, contexts, task="summary", max_new_tokens=SUMMARY_TOKENS, instruction=instruction
        )


@dataclass(frozen=True)
class Format:
    """``needs`` are the fields by which records of a format are known; ``read`` makes an item of one."""

    needs: tuple[str, ...]
    read: Callable[[Row], EvalItem]

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Whether a record has the format's fields."""
        return set(self.needs) <= set(values)


FORMATS: Registry[Format] = Registry("format of evaluation data")


def guess(values: Mapping[str, Any], where: str) -> str:
    """Name of the first format whose fields a record has.

    Raises
    ------
    InputError
        If there is none; the message lists the formats with their fields.
    """
    for name in FORMATS.names():
        if FORMATS.get(name).fits(values):
            return name
    known = "; ".join(f"{name} ({', '.join(FORMATS.get(name).needs)})" for name in FORMATS.names())
    raise InputError(f"{where}: fields {', '.join(map(str, values)) or 'none'} fit no format; formats: {known}")


def titled(title: Any, text: str) -> str:
    """A passage: its title, if there is one, a line break, the text, a blank line."""
    return normalise(f"{title.strip()}\n{text.lstrip()}" if isinstance(title, str) and title.strip() else text)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"


def _reader(name: str, *needs: str) -> Callable[[Callable[[Row], EvalItem]], Callable[[Row], EvalItem]]:
    def register(read: Callable[[Row], EvalItem]) -> Callable[[Row], EvalItem]:
        FORMATS.add(name)(Format(needs, read))
        return read

    return register


@_reader("musique", "ctxs", "question", "answers")
def _cacheblend(row: Row) -> EvalItem:
    """The JSON of CacheBlend's authors, or MuSiQue's own; few-shot dialogues of theirs are asked for a summary."""
    if "ctxs" not in row.values and "paragraphs" in row.values:
        return _musique(row)
    question, answers, contexts = row.text("question"), row.texts("answers"), row.passages("ctxs")
    if question.lstrip().startswith("Dialogue:"):
        return row.summary(_dialogue_question(question), answers, contexts, DIALOGUE_INSTRUCTION)
    return row.item(question, answers, contexts)


@_reader("musique-paragraphs", "paragraphs", "question", "answer")
def _musique(row: Row) -> EvalItem:
    """MuSiQue as published: paragraphs with titles; what has no answer in them is left out."""
    if row.values.get("answerable") is False:
        raise Unanswerable
    paragraphs = row.get("paragraphs")
    if not isinstance(paragraphs, list) or not paragraphs or not all(isinstance(p, Mapping) for p in paragraphs):
        raise row.error(f"'paragraphs' is {_shown(paragraphs)}, a list of objects is needed")
    contexts = [
        titled(p.get("title"), row.checked(p.get("paragraph_text"), f"'paragraphs'[{i}]['paragraph_text']"))
        for i, p in enumerate(paragraphs)
    ]
    others = row.texts("answer_aliases") if row.values.get("answer_aliases") else ()
    answers = list(dict.fromkeys((row.text("answer"), *others)))
    return row.item(row.text("question"), answers, contexts)


@_reader("kv-retrieval", "ordered_kv_records", "key", "value")
def _kv_retrieval(row: Row) -> EvalItem:
    """Look-up of a UUID among others (Liu et al. 2023, arXiv 2307.03172), the records cut into even passages."""
    records, key, value = row.get("ordered_kv_records"), row.text("key"), row.text("value")
    if not isinstance(records, list) or not all(isinstance(r, list | tuple) and len(r) == 2 for r in records):
        raise row.error("'ordered_kv_records' is no list of [key, value] pairs")
    if [key, value] not in [list(record) for record in records]:
        raise row.error("key and value are not among 'ordered_kv_records'")
    lines = [f"{json.dumps(k, ensure_ascii=False)}: {json.dumps(v, ensure_ascii=False)}\n" for k, v in records]
    parts = -(-len(lines) // RECORDS_PER_CONTEXT)
    cuts = [round(i * len(lines) / parts) for i in range(parts + 1)]
    contexts = [normalise("".join(lines[a:b])) for a, b in itertools.pairwise(cuts)]
    return row.item(f'What is the value of the key "{key}"?', [value], contexts, max_new_tokens=UUID_TOKENS)


@_reader("jsonl", "question", "answers", "contexts")
def _plain(row: Row) -> EvalItem:
    """The plain form; ``task``, ``instruction`` and ``max_new_tokens`` are optional."""
    task = row.values.get("task", "qa")
    if task not in ("qa", "summary"):
        raise row.error(f"'task' is {task!r}, qa or summary is needed")
    tokens = row.values.get("max_new_tokens", SUMMARY_TOKENS if task == "summary" else 32)
    if not isinstance(tokens, int) or tokens < 1:
        raise row.error(f"'max_new_tokens' is {tokens!r}, a whole number above 0 is needed")
    instruction = row.text("instruction") if row.values.get("instruction") is not None else None
    return row.item(
        row.text("question"), row.texts("answers"), row.passages("contexts"),
        task=task, max_new_tokens=tokens, instruction=instruction,
    )  # fmt: skip


@_reader("longbench", "input", "context", "answers", "dataset")
def _longbench(row: Row) -> EvalItem:
    """LongBench (Bai et al. 2023, arXiv 2308.14508): one text, cut where its passages or dialogues begin."""
    name, text, answers = row.text("dataset"), row.text("context"), row.texts("answers")
    name = name.removesuffix("_e")
    if name == "samsum":
        examples = [normalise(part) for part in _cut(text, r"(?m)^(?=Dialogue:)")]
        return row.summary(_dialogue_question(row.text("input")), answers, examples, DIALOGUE_INSTRUCTION)
    passages = [normalise(part) for part in _cut(text, r"(?m)^Passage \d+:[ \t]*\n?")]
    if name == "multi_news":
        return row.summary(NEWS_QUESTION, answers, passages, NEWS_INSTRUCTION)
    if name not in ("2wikimqa", "hotpotqa", "musique"):
        allowed = "2wikimqa, hotpotqa, musique, samsum, multi_news"
        raise InputError(f"{row.where}: LongBench's {name} is not one of {allowed}; give one of these")
    return row.item(row.text("input"), answers, passages)


def _cut(text: str, marks: str) -> Iterator[str]:
    return (part.strip() for part in re.split(marks, text) if part.strip())


def _pages(row: Row) -> EvalItem:
    """HotpotQA and 2WikiMultihopQA: titles with sentences, as columns, objects, pairs, or any of these as JSON text."""
    context = row.get("context")
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except ValueError as error:
            raise row.error(f"'context' is text, but no JSON ({error})") from None
    pairs: Any = context
    if isinstance(context, Mapping):
        pairs = list(zip(context.get("title", ()), context.get("sentences", ()), strict=False))
    elif isinstance(context, list) and all(isinstance(page, Mapping) for page in context):
        pairs = [(page.get("title"), page.get("sentences")) for page in context]
    if not isinstance(pairs, list) or not pairs or not all(_is_page(pair) for pair in pairs):
        raise row.error(f"'context' is {_shown(context)}, pages of a title and a list of sentences are needed")
    contexts = [titled(title, _joined(sentences)) for title, sentences in pairs]
    return row.item(row.text("question"), [row.text("answer")], contexts)


def _is_page(pair: Any) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], list | tuple)
        and all(isinstance(s, str) for s in pair[1])
        and bool(f"{pair[0]}{''.join(pair[1])}".strip())
    )


def _joined(sentences: Sequence[str]) -> str:
    """The sentences as one text: some sets keep the space between them, some do not."""
    return " ".join(s.strip() for s in sentences if s.strip())


# 2WikiMultihopQA has HotpotQA's layout and its evidence triples, so it is looked for first.
FORMATS.add("2wikimqa")(Format(("context", "question", "answer", "evidences"), _pages))
FORMATS.add("hotpotqa")(Format(("context", "question", "answer"), _pages))


@_reader("samsum", "dialogue", "summary")
def _samsum(row: Row) -> EvalItem:
    """SAMSum: other dialogues with their summaries are the passages, as in LongBench and CacheBlend's evaluation."""
    examples = row.others(FEW_SHOT)
    if not examples:
        raise row.error("the only record, but other dialogues are its examples")
    if not all(isinstance(e.get(k), str) and e[k].strip() for e in examples for k in ("dialogue", "summary")):
        raise row.error("one of its examples, another record, has no dialogue or no summary")
    contexts = [normalise(f"Dialogue: {_lines(e['dialogue'])}\nSummary: {e['summary'].strip()}") for e in examples]
    question = _dialogue_question(f"Dialogue: {_lines(row.text('dialogue'))}")
    return row.summary(question, [row.text("summary")], contexts, DIALOGUE_INSTRUCTION)


def _lines(dialogue: str) -> str:
    return dialogue.replace("\r\n", "\n").strip()


def _dialogue_question(text: str) -> str:
    """The dialogue as a question: what is wanted first, then the dialogue without an empty "Summary:" behind."""
    return f"What is the summary of this dialogue?\n{text.strip().removesuffix('Summary:').rstrip()}"


@_reader("multi_news", "document", "summary")
def _multi_news(row: Row) -> EvalItem:
    """MultiNews: articles with ``|||||`` between them."""
    articles = [normalise(part) for part in _cut(row.text("document"), r"\|{5}")]
    if not articles:
        raise row.error("'document' holds no article")
    # Every summary of the set begins with a dash.
    summary = row.checked(row.text("summary").lstrip("– "), "'summary' behind its dash")
    return row.summary(NEWS_QUESTION, [summary], articles, NEWS_INSTRUCTION)
