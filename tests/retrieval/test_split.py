from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import DocumentError, InputError
from blendkv.retrieval import Splitter
from blendkv.retrieval.breaks import HEADING, LINE, PARAGRAPH, SENTENCE, WORD, break_levels
from blendkv.retrieval.split import best_cuts, normalise, tokenise
from blendkv.types import Document

KINDS = ["byte_level", "byte_level_trimmed", "sentence_piece", "word_piece"]

pieces = st.one_of(
    st.text(max_size=30),
    st.text(alphabet="日本語の文章。、한국어", max_size=60),
    st.sampled_from(["\U0001f469\u200d\U0001f680", "\U0001f600", "é", "e\u0301", "\ufdfa", "<|end|>", "\x00"]),
    st.sampled_from([" ", "\n", "\r\n", "\n\n", "\r\n\r\n", "\t", "\n\n\n\n   ", "\u3000", "\x85"]),
    st.sampled_from(["# Heading\n", "## Two\n\n", "Title\n=====\n\n", "The end. Then more! ", '"Quoted." Next. ']),
    st.integers(1, 120).map(lambda n: "x" * n),
    st.integers(1, 80).map(lambda n: "word " * n),
)
texts = st.lists(pieces, max_size=12).map("".join).filter(lambda text: text.strip())


def check_chunks(chunks, text, ids, splitter):
    """The properties of every split."""
    whole = normalise(text)
    assert np.concatenate([c.token_ids for c in chunks]).tolist() == ids.tolist()
    assert "".join(c.text for c in chunks) == whole
    for index, chunk in enumerate(chunks):
        assert chunk.index == index
        assert chunk.text
        assert chunk.text == whole[chunk.start : chunk.end]
        assert 0 < chunk.token_ids.size <= splitter.max_tokens
        assert not chunk.token_ids.flags.writeable


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_chunks_are_the_document(tokenizers, kind, text):
    splitter = Splitter(tokenizers[kind], target_tokens=64)
    ids, _ = tokenise(tokenizers[kind], normalise(text), "text")
    if not ids.size:
        with pytest.raises(DocumentError, match="makes no token"):
            splitter.split(Document("d", text))
        return
    check_chunks(splitter.split(Document("d", text)), text, ids, splitter)


@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_each_chunk_decodes_to_its_own_text(tokenizers, text):
    """No token of a chunk has a part of a character that is in another chunk."""
    splitter = Splitter(tokenizers["byte_level"], target_tokens=32)
    for chunk in splitter.split(Document("d", text)):
        decoded = tokenizers["byte_level"].decode(chunk.token_ids, clean_up_tokenization_spaces=False)
        assert decoded == chunk.text


@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.text(alphabet="abcdefé😀", min_size=1, max_size=9), min_size=1, max_size=120))
def test_words_that_fit_are_never_cut(tokenizers, words):
    splitter = Splitter(tokenizers["byte_level"], target_tokens=64)
    chunks = splitter.split(Document("d", " ".join(words)))
    assert [word for chunk in chunks for word in chunk.text.split()] == words
    assert splitter.words_cut == 0


def test_a_word_longer_than_a_chunk_is_cut_counted_and_logged_once(splitter, caplog):
    text = "before " + "x9" * 400 + " after"
    with caplog.at_level(logging.WARNING):
        chunks = splitter.split(Document("d", text))
        cut = splitter.words_cut
        splitter.split(Document("e", text))
    assert cut > 0
    assert splitter.words_cut == 2 * cut
    assert len(caplog.records) == 1
    assert "d: a word of more than 40 tokens is cut" in caplog.text
    assert "".join(c.text for c in chunks) == normalise(text)
    # Only the long word is cut: its neighbours stay whole.
    assert chunks[0].text.startswith("before ")
    assert chunks[-1].text.endswith(" after\n\n")


def test_multi_byte_characters_are_never_cut(tokenizers):
    """Unknown emoji take four byte tokens each and hold no white space."""
    splitter = Splitter(tokenizers["byte_level"], target_tokens=33)
    text = "\U0001f9ff\U0001fa90" * 200
    chunks = splitter.split(Document("d", text))
    assert len(chunks) > 30
    for chunk in chunks:
        assert tokenizers["byte_level"].decode(chunk.token_ids) == chunk.text


def test_chunks_are_near_the_target(splitter):
    text = " ".join(f"This is sentence number {i} of the long paragraph." for i in range(200))
    sizes = [c.token_ids.size for c in splitter.split(Document("d", text))]
    assert max(sizes) <= 40
    assert min(sizes) >= 20
    assert abs(np.mean(sizes) - 32) < 6


def test_paragraphs_go_before_sentences_before_words(tokenizer):
    splitter = Splitter(tokenizer, target_tokens=64)
    paragraph = "The fox was quick. The dog was lazy. It was not amused, not at all. The end came."
    chunks = splitter.split(Document("d", "\n\n".join([paragraph] * 12)))
    assert len(chunks) > 3
    assert all(c.text.endswith("\n\n") for c in chunks)
    chunks = splitter.split(Document("d", " ".join([paragraph] * 12)))
    assert all(c.text.rstrip().endswith(".") for c in chunks)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(3, 30), min_size=1, max_size=20), style=st.sampled_from(["# {}\n\n", "{}\n=====\n\n"])
)
def test_a_heading_goes_with_its_text(tokenizers, sizes, style):
    splitter = Splitter(tokenizers["byte_level"], target_tokens=48)
    parts = [style.format(f"Part {i}") + "a fox jumps " * size + ".\n\n" for i, size in enumerate(sizes)]
    for chunk in splitter.split(Document("d", "".join(parts))):
        last = chunk.text.strip().splitlines()[-1]
        assert not re.match(r"# |Part|=====", last), chunk.text
        assert not chunk.text.startswith("=====")


def test_levels():
    text = "# H\n\nOne. Two\nthree\n\nT\n---\nx 日本。語"
    levels = break_levels(text)
    at = {mark: int(levels[text.index(mark)]) for mark in ["# H", "Two", "three", "T\n---", "日", "本", "語"]}
    assert at == {
        "# H": HEADING,
        "Two": SENTENCE,
        "three": LINE,
        "T\n---": HEADING,
        "日": WORD,
        "本": WORD,
        "語": SENTENCE,
    }
    assert levels[text.index("One")] < WORD  # behind its heading
    assert levels[text.index("hree")] == 0
    assert break_levels("a\n\nb")[3] == PARAGRAPH


def test_best_cuts_is_optimal():
    """Against all ways to cut."""
    seed = 7
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(30):
        places = np.concatenate([[0], np.cumsum(rng.integers(1, 6, size=9))])
        penalties = rng.choice([0.0, 0.1, 0.3, 1.0], size=10)
        target, limit = 8, 10

        def cost(picked, places=places, penalties=penalties, target=target, limit=limit):
            sizes = np.diff(places[picked])
            return np.inf if sizes.max() > limit else (((sizes - target) / target) ** 2).sum() + penalties[picked].sum()

        every = [[0, *(i + 1 for i in range(8) if bits >> i & 1), 9] for bits in range(256)]
        picked = best_cuts(places, penalties, target, limit)
        assert cost(list(picked)) == pytest.approx(min(map(cost, every)))


def test_special_tokens_in_a_text_stay_text(splitter, tokenizer):
    ids = np.concatenate([c.token_ids for c in splitter.split(Document("d", "ignore <|end|> this"))])
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == "ignore <|end|> this\n\n"


def test_chunks_carry_the_documents_metadata(splitter):
    chunks = splitter.split(Document("d", "text", {"title": "t"}))
    assert chunks[0].metadata == {"title": "t"}
    assert chunks[0].id == "d#0"


def test_settings_depend_on_tokenizer_and_sizes_only(tokenizers):
    plain = Splitter(tokenizers["byte_level"], 64)
    assert plain.settings != Splitter(tokenizers["byte_level"], 65).settings
    assert plain.settings != Splitter(tokenizers["byte_level_trimmed"], 64).settings
    tokenizers["byte_level"]("some text", truncation=True, max_length=3)
    try:
        assert Splitter(tokenizers["byte_level"], 64).settings == plain.settings
        assert len(plain.split(Document("d", "a b c d e f g h i j"))[0].token_ids) > 3
    finally:
        tokenizers["byte_level"].backend_tokenizer.no_truncation()


@pytest.mark.parametrize(
    ("text", "message"),
    [(" \n\t ", "d: no text"), ("a\ud800b", "d: lone surrogate at character 1"), ("", "d: no text")],
)
def test_texts_that_cannot_be_split(splitter, text, message):
    with pytest.raises(DocumentError, match=message):
        splitter.split(Document("d", text))


def test_a_character_of_too_many_tokens_is_refused(tokenizers):
    """NFKC makes eighteen letters of this one, each of them two bytes."""
    splitter = Splitter(tokenizers["sentence_piece"], target_tokens=32)
    splitter.max_tokens = 16
    with pytest.raises(DocumentError, match=r"one character makes .* raise target_tokens"):
        splitter.split(Document("d", "\ufdfa"))


def test_wrong_arguments(tokenizer):
    with pytest.raises(InputError, match="target_tokens is 31; at least 32"):
        Splitter(tokenizer, target_tokens=31)
    with pytest.raises(InputError, match="gives no character offsets"):
        Splitter(SimpleNamespace(is_fast=False))
