"""vLLM answers from blended chunk KV: exact at budget 1, the embedded engine's blend below, else full prefill."""

from __future__ import annotations

from dataclasses import replace

import pytest
from blending import blending as start
from blending import close
from worlds import garbage

from blendkv.blend import parse_mode

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def blending(tmp_path_factory):
    with start(tmp_path_factory.mktemp("model")) as running:
        yield running


def test_budget_one_is_plain_vllm(blending):
    plain = blending.ask()
    assert blending.told is None
    assert close(blending.ask(mode="blend:head_query@1", salt="exact-1"), plain)
    assert blending.told["outcome"] == "blended"
    first = len(blending.world.chunks[0].token_ids)  # exact where it stands: it is not computed again
    assert blending.told["recomputed_tokens"] == blending.told["reusable_tokens"] - first


@pytest.mark.parametrize("mode", ["reuse", "blend:strided@0.3", "blend:head_query@0.4", "blend:kv_deviation@0.7"])
def test_below_it_is_the_embedded_engines_blend(blending, mode):
    tokens, log_probs = blending.ask(mode=mode, salt=mode)
    token, log_prob = blending.embedded(parse_mode(mode).settings)
    assert tokens[0] == token
    assert abs(log_probs[0] - log_prob) < 1e-3


def test_one_token_is_told_of_too(blending):
    """A request that ends in its first step still says what was done."""
    blending.ask(mode="blend:strided@0.3", salt="one", tokens=1)
    assert blending.told["outcome"] == "blended"
    assert blending.told["reusable_tokens"] == sum(len(c.token_ids) for c in blending.world.chunks)
    assert set(blending.told["stages"]) == {"score", "load", "rotate", "recompute"}


def test_exact_and_blended_kv_never_mix(blending):
    """Both directions, with prefix caching on: a plain request after a blend, and a blend after a plain request."""
    plain = blending.ask()
    first = blending.ask(mode="reuse", salt="mix")
    assert blending.ask() == plain
    assert close(blending.ask(mode="reuse", salt="mix"), first)


def test_several_requests_in_one_step(blending):
    """Plain and blended ones together answer as they do alone."""
    options = [{}, {"mode": "reuse", "salt": "m1"}, {"mode": "blend:strided@0.3", "salt": "m2"}, {}]
    alone = [blending.ask(**o) for o in options]
    together = blending.ask(*(blending.request(**{**o, "salt": o["salt"] + "x"} if o else o) for o in options))
    assert all(close(one, other) for one, other in zip(alone, together, strict=True))


def test_several_samples_of_one_request(blending):
    """``n`` answers: every one of them decodes behind the same blend."""
    one = blending.ask(mode="reuse", salt="n1")
    prompt, params = blending.request(mode="reuse", salt="n2", sampling={"n": 3, "temperature": 1.0, "seed": 5})
    outputs = blending.llm.generate([prompt], [params], use_tqdm=False)[0].outputs
    assert len(outputs) == 3
    first = {o.token_ids[0]: o.logprobs[0][o.token_ids[0]].logprob for o in outputs}
    prompt, params = blending.request(mode="reuse", salt="n3", sampling={"logprobs": 20}, tokens=1)
    known = blending.llm.generate([prompt], [params], use_tqdm=False)[0].outputs[0].logprobs[0]
    assert one[0][0] in known
    for token, log_prob in first.items():
        assert token not in known or abs(known[token].logprob - log_prob) < 1e-4


def test_a_missing_chunk_is_computed_and_stored(blending):
    before = blending.ask(mode="reuse", salt="h1")
    gone = blending.library.key(blending.world.chunks[-1].token_ids)
    assert blending.store.remove(gone)
    again = blending.ask(mode="reuse", salt="h2")
    assert close(again, before)
    assert blending.told["outcome"] == "blended"
    blending.store.flush()
    assert gone in [row.key for row in blending.store.ls()]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "blend:strided@0.3"}, "cache_salt"),
        ({"mode": "blend:strided@0.3", "salt": "blend:strided@0.5|a", "named": False}, "cache_salt"),
        ({"mode": "blend:best@0.3", "salt": "a"}, "parameters"),
        ({"mode": "full", "salt": "a"}, "mode"),
        ({"mode": "reuse", "salt": "a", "workload": "no word"}, "parameters"),
        ({"mode": "reuse", "salt": "a", "session": "s" * 65}, "parameters"),
        ({"mode": "reuse", "salt": "a", "recipe": "none"}, "parameters"),
        ({"mode": "reuse", "salt": "a", "chunks": []}, "parameters"),
        ({"mode": "reuse", "salt": "a", "segments": [["chunk", "many"]]}, "parameters"),
        ({"mode": "reuse", "salt": "b", "segments": [["chunk", 3], ["query", 2]]}, "segments"),
        ({"mode": "reuse", "salt": "p", "sampling": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_blended_is_prefilled_in_full(blending, options, reason):
    plain = blending.ask()
    before = blending.scheduler.outcomes[reason]
    assert close(blending.ask(**options), plain)
    assert blending.told["outcome"] == "full"
    assert blending.told["reason"] == reason
    assert blending.scheduler.outcomes[reason] == before + 1


@pytest.mark.parametrize("kinds", [("query", "chunk"), ("chunk", "system"), ("chunk", "text"), ("chunk", "chunk")])
def test_segments_that_make_no_sense(blending, kinds):
    total = len(blending.ids)
    cut = [[kinds[0], total - 2], [kinds[1], 2]]
    blending.ask(mode="reuse", salt="bad-cut", segments=cut)
    assert blending.told["reason"] == "segments"


def test_stored_kv_is_what_is_blended(blending):
    """The control: garbage in the store changes the answer, so the pages really hold stored KV."""
    good = blending.ask(mode="reuse", salt="good")
    library, store = blending.library, blending.store
    for chunk in blending.world.chunks:
        kv = replace(garbage(chunk), fingerprint=blending.worker.blender().fingerprint, recipe=library.recipe)
        store.remove(kv.key)
        store.put(kv)
    bad = blending.ask(mode="reuse", salt="bad")
    assert abs(bad[1][0] - good[1][0]) > 1e-3
    for chunk in blending.world.chunks:
        store.remove(library.key(chunk.token_ids))
    assert abs(blending.ask(mode="reuse", salt="again")[1][0] - good[1][0]) < 1e-4
