"""Conversations: blended turns at budget 1 are full prefills of it all, at the price of the new tokens."""

from __future__ import annotations

import pytest
import torch
from tiny_hub import CONTEXT, SYSTEM, TOPICS

from blendkv.engines.base import GenerationOptions
from blendkv.errors import PromptTooLongError
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.adapt import CallableRetriever
from blendkv.store.tiered import KVStore

EVERYTHING = "blend:head_query@1"
TURNS = {"What?": ["lambda", "scope"], "And then?": ["scope", "with"], "Why?": ["with", "lambda"]}
SOME = GenerationOptions(max_new_tokens=20)
END = 4  # the id of <|im_end|>


@pytest.fixture
def make(request):
    made = []

    def pipeline(name: str = "llama") -> RagPipeline:
        engine = request.getfixturevalue(name)
        retriever = CallableRetriever(lambda query, k: [TOPICS[t] for t in TURNS.get(query, [])], engine.tokenizer)
        made.append(RagPipeline(engine, KVStore.open(None, memory_bytes=1 << 30), retriever, system=SYSTEM))
        return made[-1]

    yield pipeline
    for one in made:
        one.close()


@pytest.fixture
def contexts(monkeypatch):
    """What every answer is decoded behind."""
    from blendkv.engines.torch.engine import TorchEngine

    seen: list[list[int]] = []
    own = TorchEngine.decoder

    def spy(self, token_ids, cache, *rest):
        seen.append(token_ids.tolist())
        return own(self, token_ids, cache, *rest)

    monkeypatch.setattr(TorchEngine, "decoder", spy)
    return seen


@pytest.fixture
def ends(monkeypatch, llama):
    """Makes the model end every answer with <|im_end|> after five tokens."""
    monkeypatch.setattr(llama.model.generation_config, "eos_token_id", END)
    steps = [0]

    def hook(module, inputs, logits):
        steps[0] += 1
        logits = logits.clone()
        logits[..., END] = 1e4 if steps[0] % 6 == 0 else -1e4
        return logits

    handle = llama.model.lm_head.register_forward_hook(hook)
    yield
    handle.remove()


def talk(pipeline, mode, options=SOME):
    session = pipeline.chat(mode=mode)
    for question in TURNS:
        session.ask(question, options)
    return session


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_three_turns_equal_full_prefill(make, contexts, name):
    pipeline = make(name)
    full, blended, reuse = (talk(pipeline, mode) for mode in ("full", EVERYTHING, "reuse"))
    assert contexts[:3] == contexts[3:6]
    assert [a.token_ids for a in blended.answers] == [a.token_ids for a in full.answers]
    assert [a.text for a in blended.answers] == [a.text for a in full.answers]
    assert [a.mode for a in blended.answers] == [EVERYTHING] * 3
    # The test could not fail if nothing depended on the blend.
    assert [a.token_ids for a in reuse.answers] != [a.token_ids for a in full.answers]
    # An independent prefill of the whole last context.
    with torch.inference_mode():
        logits = pipeline.engine.model(input_ids=torch.tensor([contexts[5]]), use_cache=False).logits[0, -1]
    assert int(logits.argmax()) == blended.answers[-1].token_ids[0]


def test_only_new_tokens_run(make, contexts, monkeypatch):
    pipeline = make()
    session = pipeline.chat(mode=EVERYTHING)
    rows: list[int] = []
    own = pipeline.engine.model.model.forward
    monkeypatch.setattr(
        pipeline.engine.model.model, "forward", lambda *a, **k: rows.append(k["input_ids"].shape[1]) or own(*a, **k)
    )
    before = 0
    for question in TURNS:
        first_use = pipeline.library.counts.computed_tokens
        rows.clear()
        answer = session.ask(question, SOME)
        computed = pipeline.library.counts.computed_tokens - first_use
        prefix = len(pipeline.prompts.prefix)
        new = len(contexts[-1]) - before
        # Scoring is not needed at budget 1: one pass over new tokens, one row per decoded token; chunk KV beside it.
        spent = sum(rows) - (computed + (prefix if before == 0 else 0))
        assert spent <= new + answer.completion_tokens + 1
        before = len(contexts[-1])


def test_chunks_that_were_seen_are_not_repeated(make, contexts):
    pipeline = make()
    talk(pipeline, "blend")
    text = pipeline.engine.tokenizer.decode(contexts[-1])
    for topic in ("lambda", "scope", "with"):
        assert text.count(TOPICS[topic]) == 1
    sources = [[s.chunk.text.strip() for s in a.sources] for a in talk(pipeline, "blend").answers]
    assert sources == [[TOPICS[t] for t in topics] for topics in TURNS.values()]


@pytest.mark.parametrize("mode", ["full", EVERYTHING])
def test_ends_of_turns_are_not_doubled(make, contexts, ends, mode):
    pipeline = make()
    session = talk(pipeline, mode)
    assert [a.token_ids[-1] for a in session.answers] == [END] * 3
    assert [a.finish_reason for a in session.answers] == ["stop"] * 3
    text = pipeline.engine.tokenizer.decode(contexts[-1])
    answers = [pipeline.engine.tokenizer.decode(a.token_ids[:-1]) for a in session.answers]
    for said in answers[:2]:
        assert f"<|im_start|>assistant\n{said}<|im_end|>\n<|im_start|>user\n" in text
    assert "<|im_end|><|im_end|>" not in text
    assert text.count("<|im_end|>") == 6  # system, three questions, two answers


def test_a_turn_that_does_not_fit_leaves_the_session_as_it_was(make, contexts):
    pipeline = make()
    session, other = pipeline.chat(mode=EVERYTHING), pipeline.chat(mode=EVERYTHING)
    for one in (session, other):
        one.ask("What?", SOME)
    with pytest.raises(PromptTooLongError, match=rf"holds {CONTEXT}"):
        session.ask("x" * 3 * CONTEXT)
    for one in (session, other):
        one.ask("And then?", SOME)
    assert session.answers[-1].token_ids == other.answers[-1].token_ids
    assert len(session.answers) == 2


def test_an_unsupported_model_chats_by_full_prefill(make, contexts):
    pipeline = make("gpt2")
    full, blended = talk(pipeline, "full"), talk(pipeline, "blend")
    assert [a.token_ids for a in blended.answers] == [a.token_ids for a in full.answers]
    assert all("known rotation" in a.fallback for a in blended.answers)


def test_stop_strings_do_not_leak_into_the_history(make, contexts):
    """The text up to a stop string is what was said."""
    pipeline = make()
    whole = pipeline.chat(mode=EVERYTHING).ask("What?", SOME)
    text = whole.text.replace("\N{REPLACEMENT CHARACTER}", "\0")
    stop = next(text[i : i + 2] for i in range(3, len(text)) if "\0" not in text[i : i + 2])
    session = pipeline.chat(mode=EVERYTHING)
    first = session.ask("What?", GenerationOptions(max_new_tokens=20, stop=(stop,)))
    assert first.finish_reason == "stop"
    session.ask("And then?", SOME)
    context = pipeline.engine.tokenizer.decode(contexts[-1])
    assert f"assistant\n{first.text}<|im_end|>" in context


def test_kv_of_tokens_that_were_taken_back_is_not_used(make, contexts):
    """A stop string that spans tokens: what stands behind the text before it is other tokens than were decoded."""
    pipeline = make()
    text = pipeline.chat(mode="full").ask("What?", SOME).text.replace("\N{REPLACEMENT CHARACTER}", "\0")
    stop = next(text[i : i + 3] for i in range(2, len(text)) if "\0" not in text[i : i + 3])
    options = GenerationOptions(max_new_tokens=20, stop=(stop,))
    turns = {}
    for mode in ("full", EVERYTHING):
        session = pipeline.chat(mode=mode)
        turns[mode] = [session.ask("What?", options), session.ask("And then?", SOME)]
    first = turns[EVERYTHING][0]
    assert len(pipeline.engine.tokenizer.decode(first.token_ids[:-1])) > len(first.text), "the stop string is one token"
    assert contexts[2] == contexts[4]
    assert [a.token_ids for a in turns[EVERYTHING]] == [a.token_ids for a in turns["full"]]
