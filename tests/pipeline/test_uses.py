"""Whose work a question is, as the store's tiers see it: given, current, or what a pipeline says by itself."""

from __future__ import annotations

import asyncio

import pytest
from tiny_hub import open_pipeline, write_corpus

from blendkv.errors import InputError
from blendkv.market.base import Use
from blendkv.market.context import current_use, using

QUESTION = "What is a lambda expression?"
MODE = "blend:strided@0.3"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory, llama):
    folder = tmp_path_factory.mktemp("uses")
    with open_pipeline(folder / "s", llama, mode=MODE) as opened:
        opened.ingest([write_corpus(folder / "corpus")], chunk_tokens=48)
        yield opened


@pytest.fixture
def seen(pipeline, monkeypatch) -> set[Use]:
    """Who looked chunks up."""
    found: set[Use] = set()
    get = pipeline.store.get

    def noting(key, token_ids):
        found.add(current_use())
        return get(key, token_ids)

    monkeypatch.setattr(pipeline.store, "get", noting)
    return found


@pytest.mark.parametrize(
    ("given", "current", "expected"),
    [
        ({}, None, Use("rag")),
        ({"workload": "agent", "session": "loop-1"}, None, Use("agent", "loop-1")),
        ({"workload": "night/batch"}, Use("agent", "s"), Use("night/batch", "s")),
        ({"session": "t"}, Use("agent", "s"), Use("agent", "t")),
        ({}, Use("agent", "s"), Use("agent", "s")),
    ],
)
def test_what_is_given_goes_before_what_is_current(pipeline, seen, given, current, expected):
    if current is None:
        assert pipeline.ask(QUESTION, **given).mode == MODE
    else:
        with using(current):
            assert pipeline.ask(QUESTION, **given).mode == MODE
    assert seen == {expected}
    assert current_use() == Use()


def test_async_questions_too(pipeline, seen):
    async def ask() -> None:
        with using(Use("agent", "s")):
            await asyncio.gather(pipeline.aask(QUESTION), pipeline.aask(QUESTION, session="other"))

    asyncio.run(ask())
    assert seen == {Use("agent", "s"), Use("agent", "other")}


def test_a_chat_is_a_session_of_its_own(pipeline, seen):
    one, two = pipeline.chat(), pipeline.chat()
    for chat in (one, two, one):
        chat.ask(QUESTION)
    assert seen == {Use("chat", one.session), Use("chat", two.session)}
    assert one.session != two.session
    seen.clear()
    pipeline.chat(workload="agent", session="mine").ask(QUESTION)
    with using(Use("agent", "current")):
        chat = pipeline.chat()
    chat.ask(QUESTION)
    assert seen == {Use("agent", "mine"), Use("agent", "current")}


@pytest.mark.parametrize("word", ["", "two words", "x" * 65, "näh", "a\n", 3])
@pytest.mark.parametrize("name", ["workload", "session"])
def test_what_is_no_word_is_refused(pipeline, seen, name, word):
    for ask in (pipeline.ask, lambda question, **given: pipeline.chat(**given)):
        with pytest.raises(InputError, match=f"{name} is .*; 1 to 64 letters"):
            ask(QUESTION, **{name: word})
    assert not seen


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (("a b", "tool_started", 1.0), "session is 'a b'"),
        (("s", "started", 1.0), "what is 'started'; allowed: tool_started, tool_finished, session_ended"),
        (("s", "tool_started"), "ttl is 0.0; for tool_started give seconds above 0, 86400 at most"),
        (("s", "tool_started", 1e6), "ttl is 1000000.0"),
        (("s", "tool_started", float("nan")), "ttl is nan"),
        (("s", "tool_started", "3"), "ttl is '3'"),
        (("s", "session_ended", 3.0), "ttl is 3.0; only tool_started takes one"),
    ],
)
def test_a_hint_that_makes_no_sense_is_refused(pipeline, hint, message):
    with pytest.raises(InputError, match=message):
        pipeline.hint(*hint)


@pytest.mark.parametrize(("policy", "listens"), [("market", True), ("lru", False)])
def test_a_hint_says_whether_a_policy_listens(tmp_path, llama, policy, listens):
    with open_pipeline(tmp_path / "s", llama, policy=policy) as pipeline:
        assert pipeline.hint("s", "tool_started", 30.0) is listens
        assert pipeline.hint("s", "tool_finished") is listens
        assert pipeline.hint("s", "session_ended") is listens
