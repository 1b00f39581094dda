"""How good an answer is: F1 and exact match as SQuAD has them, Rouge-L, and what the passages allow at all."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from blendkv.errors import InputError, MissingDependencyError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Return ``text`` in lower case, without ASCII punctuation and the articles a, an, the; words one space apart.

    The normalisation of SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250), which CacheBlend's evaluation uses, too.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """What counts of an answer that rambles on: its first line that is not blank, "" if there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Token F1, 0 to 1, best over ``answers``.

    ``F1 = 2 P R / (P + R)`` over the bags of normalised words; two empty texts agree (1), one empty text does not (0).
    CacheBlend's script counts the model's tokens instead of words.

    Raises
    ------
    InputError
        If there is no answer to compare with.
    """
    found = normalise(prediction).split()
    return max(_f1(found, normalise(answer).split()) for answer in _some(answers))


def _f1(found: list[str], gold: list[str]) -> float:
    if not found or not gold:
        return float(found == gold)
    shared = sum((Counter(found) & Counter(gold)).values())
    return 2 * shared / (len(found) + len(gold))


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the normalised prediction equals a normalised answer, else 0.

    Raises
    ------
    InputError
        If there is no answer to compare with.
    """
    found = normalise(prediction)
    return float(any(found == normalise(answer) for answer in _some(answers)))


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of stemmed words, 0 to 1, best over ``references``.

    Computed by the package rouge-score (Lin 2004), whose words are runs of ASCII letters and digits.

    Raises
    ------
    InputError
        If there is no reference to compare with.
    MissingDependencyError
        If rouge-score is not installed.
    """
    scorer = _rouge()
    return max(float(scorer.score(reference, prediction)["rougeL"].fmeasure) for reference in _some(references))


@cache
def _rouge() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise MissingDependencyError(
            "Rouge-L needs the package rouge-score, which is not installed; install it: pip install 'blendkv[eval]'"
        ) from error
    return rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)


def ceiling(answers: Sequence[str], contexts: Sequence[str], parts: Sequence[str] = ()) -> bool:
    """Whether the passages hold an answer, as whole words of one passage, both normalised.

    Parameters
    ----------
    answers, contexts
        Gold answers and passages.
    parts
        What an answer is put together from, where its parts stand in several passages: all of them must be there.
        They replace ``answers``.

    Raises
    ------
    InputError
        If there is neither an answer nor a part.
    """
    passages = [f" {normalise(text)} " for text in contexts]

    def found(words: str) -> bool:
        wanted = normalise(words)
        return bool(wanted) and any(f" {wanted} " in passage for passage in passages)

    return all(map(found, parts)) if parts else any(map(found, _some(answers)))


def _some(answers: Sequence[str]) -> Sequence[str]:
    if isinstance(answers, str) or not answers:
        raise InputError(f"gold answers are {answers!r}; a sequence of one text or more is needed")
    return answers
