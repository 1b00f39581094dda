"""Decoding: the tokens of ``generate``, as text that never shows half a character or part of a stop string."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_ids, seed_of_run
from tiny_hub import CONTEXT, TOPICS, make_tokenizer

from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.decode import StopCutter, TextOutput
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import InputError, PromptTooLongError
from blendkv.types import as_token_ids, to_tensor

TOKENIZER = make_tokenizer()


@pytest.fixture
def prompt():
    seed = seed_of_run()
    print(f"seed {seed}")
    return as_token_ids(random_ids(random.Random(seed), 30, 321))


def decode(engine, prompt, **options):
    decoder = engine.decoder(prompt, None, GenerationOptions(**{"max_new_tokens": 24, **options}))
    return decoder, list(decoder)


def full_text(engine, tokens):
    kept = [t for t in tokens if t not in engine.tokenizer.all_special_ids]
    return engine.tokenizer.decode(kept)


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_greedy_is_generate(request, prompt, name):
    engine = request.getfixturevalue(name)
    decoder, pieces = decode(engine, prompt)
    with torch.inference_mode():
        ids = to_tensor(prompt)[None]
        mask = torch.ones_like(ids)
        expected = engine.model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    assert decoder.tokens == expected.tolist()
    assert "".join(pieces) == decoder.text == full_text(engine, decoder.tokens)
    assert decoder.first_token_at is not None


def test_a_chatty_generation_config_does_not_leak_in(llama, prompt, monkeypatch, caplog, recwarn):
    """Many checkpoints ask for sampling; greedy stays greedy, and transformers has nothing to complain of."""
    expected, _ = decode(llama, prompt)
    own = llama.model.generation_config
    for name, value in {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}.items():
        monkeypatch.setattr(own, name, value)
    decoder, _ = decode(llama, prompt)
    assert decoder.tokens == expected.tokens
    assert not caplog.records
    assert not recwarn.list


def test_length_and_stop(llama, monkeypatch):
    for seed in range(100):  # until an answer of five tokens has a new one among the later ones
        prompt = as_token_ids(random_ids(random.Random(seed), 30, 321))
        decoder, _ = decode(llama, prompt, max_new_tokens=5)
        seen = decoder.tokens
        at = next((i for i in range(1, len(seen)) if seen[i] not in seen[:i]), None)
        if at and len(seen) == 5 and not set(seen) & llama.eos_token_ids:
            break
    assert decoder.finish_reason == "length"
    monkeypatch.setattr(llama.model.generation_config, "eos_token_id", [319, seen[at]])
    assert llama.eos_token_ids == {319, seen[at]}
    stopped, _ = decode(llama, prompt, max_new_tokens=5)
    assert stopped.tokens == seen[: at + 1]
    assert stopped.finish_reason == "stop"
    last, _ = decode(llama, prompt, max_new_tokens=at + 1)
    assert last.finish_reason == "stop"


def test_the_tokenizer_says_what_ends_an_answer_if_the_model_does_not(llama, monkeypatch):
    monkeypatch.setattr(llama.model.generation_config, "eos_token_id", None)
    assert llama.eos_token_ids == {llama.tokenizer.eos_token_id}
    endless = make_tokenizer()
    endless.eos_token = None
    assert TorchEngine(llama.model, endless, fingerprint="x").eos_token_ids == frozenset()


def test_stop_strings(llama, prompt):
    """Every cut of the greedy text: the answer ends before its first occurrence, and decoding ends with it."""
    whole, _ = decode(llama, prompt)
    for at in range(0, len(whole.text) - 3, 3):
        stop = whole.text[at : at + 3]
        if "\N{REPLACEMENT CHARACTER}" in stop:  # half a character, as random models write them: known a token later
            continue
        decoder, pieces = decode(llama, prompt, stop=("never there", stop))
        assert decoder.text == "".join(pieces) == whole.text[: whole.text.index(stop)]
        assert decoder.finish_reason == "stop"
        assert len(decoder.tokens) <= len(whole.tokens)
        before = full_text(llama, decoder.tokens[:-1])
        assert stop not in before, "decoding went on after the stop string"
    unmatched, _ = decode(llama, prompt, stop=("never there",))
    assert unmatched.text == whole.text
    assert unmatched.finish_reason == whole.finish_reason


@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_cutter(pieces, stops):
    text = "".join(pieces)
    found = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    expected = text[: min(found)[1]] if found else text  # the stop string that is complete first
    cutter, shown = StopCutter(tuple(stops)), ""
    for piece in pieces:
        shown += cutter.push(piece)
        assert expected.startswith(shown)
    assert shown + cutter.flush() == expected
    assert cutter.cut == bool(found)


@given(st.text(max_size=30))
@settings(max_examples=60)
def test_text_comes_in_whole_characters(text):
    """Of text that is encoded byte by byte no piece shows a broken character, and nothing is lost."""
    output = TextOutput(TOKENIZER, ())
    tokens = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    shown = ""
    for token in [*tokens, TOKENIZER.eos_token_id]:
        piece = output.push(token)
        shown += piece
        assert "\N{REPLACEMENT CHARACTER}" not in piece or "\N{REPLACEMENT CHARACTER}" in text
        assert text.startswith(shown)
    assert shown + output.flush() == text


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
@settings(max_examples=60)
def test_any_tokens_make_the_text_that_decoding_them_at_once_makes(tokens):
    output = TextOutput(TOKENIZER, ())
    text = "".join(output.push(t) for t in tokens) + output.flush()
    assert text == TOKENIZER.decode([t for t in tokens if t not in TOKENIZER.all_special_ids])


def test_characters_are_split_over_tokens():
    assert len(TOKENIZER(TOPICS["café"])["input_ids"]) > len(TOPICS["café"])


def test_sampling(llama, prompt):
    hot = {"temperature": 1.5, "max_new_tokens": 16}
    first, again = decode(llama, prompt, seed=1, **hot)[0], decode(llama, prompt, seed=1, **hot)[0]
    assert first.tokens == again.tokens
    assert len({tuple(decode(llama, prompt, seed=s, **hot)[0].tokens) for s in range(5)}) > 1
    greedy, _ = decode(llama, prompt, max_new_tokens=16)
    nearly, _ = decode(llama, prompt, seed=3, temperature=1.5, top_p=1e-9, max_new_tokens=16)
    assert nearly.tokens == greedy.tokens


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": 0}, "at least 1"), ({"temperature": -1.0}, "0 (greedy) or more"),
        ({"temperature": float("nan")}, "0 (greedy) or more"), ({"top_p": 0.0}, "at most 1"),
        ({"top_p": 1.1}, "at most 1"), ({"stop": ("a", "")}, "empty stop string"),
    ],
)  # fmt: skip
def test_wrong_options(options, says):
    with pytest.raises(InputError) as caught:
        GenerationOptions(**options)
    assert says in str(caught.value)


def test_room(llama):
    ids = as_token_ids([7] * CONTEXT)
    with pytest.raises(PromptTooLongError, match=rf"{CONTEXT} tokens.* holds {CONTEXT}"):
        llama.decoder(ids, None, GenerationOptions())
    decoder = llama.decoder(ids[:-3], None, GenerationOptions(max_new_tokens=100))
    list(decoder)
    assert len(decoder.tokens) <= 3


def decode_threads():
    return [t for t in threading.enumerate() if t.name == "blendkv-decode"]


@pytest.fixture
def endless(llama, monkeypatch):
    """No token ends an answer."""
    monkeypatch.setattr(llama.model.generation_config, "eos_token_id", [len(llama.tokenizer)])


def test_cancelling_ends_the_thread(llama, prompt, endless):
    decoder = llama.decoder(prompt, None, GenerationOptions(max_new_tokens=1500))
    pieces = iter(decoder)
    next(pieces)
    assert decode_threads()
    pieces.close()
    assert not decode_threads()
    assert decoder.finish_reason == "cancelled"
    assert len(decoder.tokens) < 1500
    assert not llama.lock.locked()


def test_error_in_the_thread_surfaces(llama, prompt, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(llama.model, "generate", fail)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        decode(llama, prompt)
    monkeypatch.undo()
    assert not decode_threads()
    assert decode(llama, prompt)[0].tokens


def test_threads_get_the_answers_that_they_get_alone(llama):
    rng = random.Random(5)
    prompts = [as_token_ids(random_ids(rng, rng.randint(5, 60), 321)) for _ in range(8)]
    alone = [decode(llama, p)[0].tokens for p in prompts]
    sampled = [decode(llama, p, temperature=1.0, seed=9)[0].tokens for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda p: decode(llama, p)[0].tokens, prompts))
        again = list(pool.map(lambda p: decode(llama, p, temperature=1.0, seed=9)[0].tokens, prompts))
    assert together == alone
    assert again == sampled
