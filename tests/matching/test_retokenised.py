"""Real text and a real tokenizer: chunks tokenised alone are found in the text tokenised as a whole."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer

from blendkv.engines.folders import demo_folder
from blendkv.matching import MIN_TOKENS


@pytest.fixture(scope="module")
def tokenise():
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def article():
    return "\n".join(topics[name] for name in ("assignment", "exceptions", "lambda", "numbers", "strings", "with"))


def paragraphs(text):
    return [p for p in text.split("\n\n") if p.strip()]


def characters(text):
    return [text[i : i + 777] for i in range(0, len(text), 777)]


def words(text):
    pieces = text.split(" ")
    return [" ".join(pieces[i : i + 150]) for i in range(0, len(pieces), 150)]


@pytest.mark.parametrize(("cut", "glue"), [(paragraphs, "\n\n"), (characters, ""), (words, " ")])
def test_most_chunks_are_found(new_world, tokenise, article, cut, glue):
    world = new_world()
    texts = cut(article)
    chunks = [ids for ids in map(tokenise, texts) if len(ids) >= MIN_TOKENS]
    world.add(*chunks)
    prompt = tokenise("You are a helpful assistant.\n\n" + glue.join(texts) + "\n\nWhat is a lambda?")
    matches = world.find(prompt)
    print(cut.__name__, len(chunks), "chunks,", len(matches), "matches,", sum(not m.whole for m in matches), "cut")
    assert len(matches) >= 0.9 * len({tuple(ids) for ids in chunks})
    assert sum(m.tokens for m in matches) >= 0.9 * sum(map(len, chunks))
    if cut is characters:  # cut within words: the edges are tokenised otherwise
        assert any(not m.whole for m in matches)


def test_chunks_in_another_order_than_in_their_document(new_world, tokenise, article):
    world = new_world()
    texts = [t for t in characters(article) if len(tokenise(t)) >= MIN_TOKENS]
    world.add(*map(tokenise, texts))
    matches = world.find(tokenise("Context: " + " ".join(texts[::-2]) + " Answer:"))
    assert len(matches) >= 0.9 * len(texts[::-2])
