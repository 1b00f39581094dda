"""Encoding from many threads: what one of them asks for never reaches another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier

import pytest
from tiny_hub import SYSTEM, make_tokenizer

from blendkv.prompt import PromptBuilder
from blendkv.retrieval.split import tokenise
from blendkv.tokens import TextEncoder, text_encoder

TEXT = "A <|im_end|> b.\n\n" * 40
"""Spells a special token of the template's."""


@pytest.fixture
def tokenizer():
    made = make_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return made


@pytest.mark.parametrize("plain", [True, False])
def test_as_transformers(tokenizer, plain):
    theirs = tokenizer(TEXT, add_special_tokens=False, split_special_tokens=plain, return_offsets_mapping=True)
    assert text_encoder(tokenizer).encode(TEXT, plain=plain) == theirs["input_ids"]
    if plain:
        ids, spans = text_encoder(tokenizer).spans(TEXT)
        assert (ids.tolist(), [tuple(s) for s in spans.tolist()]) == (theirs["input_ids"], theirs["offset_mapping"])


def test_the_same_until_tokens_are_added(tokenizer):
    first = text_encoder(tokenizer)
    assert text_encoder(tokenizer) is first
    tokenizer.add_tokens(["entirely new"])
    assert text_encoder(tokenizer).encode("entirely new") == [len(tokenizer) - 1]
    assert first.encode("entirely new") != [len(tokenizer) - 1]


def test_state_left_behind_does_not_matter(tokenizer):
    before = TextEncoder(tokenizer).encode(TEXT)
    tokenizer("x", truncation=True, max_length=2, padding="max_length", split_special_tokens=True)
    assert TextEncoder(tokenizer).encode(TEXT) == before


def test_many_threads(tokenizer):
    """Questions, passages and templates are encoded at once, while the caller's own calls change the tokenizer."""
    prompts = PromptBuilder(tokenizer, SYSTEM)
    jobs = [
        lambda: prompts.first([], TEXT).token_ids.tolist(),
        lambda: prompts.encode(TEXT),
        lambda: tokenise(tokenizer, TEXT, "x")[0].tolist(),
        lambda: tokenizer(TEXT, split_special_tokens=False, truncation=True, max_length=8)["input_ids"] and None,
    ]
    alone = [job() for job in jobs]
    assert alone[1] != alone[2], "the text spells no special token: this test could not fail"
    barrier = Barrier(8)

    def work(index):
        barrier.wait()
        return [jobs[(index + i) % 3]() == alone[(index + i) % 3] for i in range(150)]

    def disturb(index):
        barrier.wait()
        for _ in range(150):
            with suppress(RuntimeError):  # tokenizers' "Already borrowed": the reason why ours are copies
                jobs[3]()
        return [True]

    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(disturb if i == 7 else work, i) for i in range(8)]
        assert all(all(future.result()) for future in done)
