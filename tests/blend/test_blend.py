"""The blend around its exactness: budgets, reports, odd prompts, refusals, continued contexts."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import build, random_ids, seed_of_run
from worlds import ListSource, World

from blendkv.blend import SELECTORS, BlendSettings, Mode, blend, collect, parse_mode
from blendkv.engines.torch.runner import TorchRunner
from blendkv.errors import InputError, PromptTooLongError, UnsupportedModelError
from blendkv.types import Prompt, Recipe, Segment, as_token_ids, to_tensor


@pytest.fixture(scope="module")
def runner():
    return TorchRunner(build("llama", num_hidden_layers=6))


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("budget", [0.0, 0.03, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("name", SELECTORS.names())
def test_the_budget_spent_is_at_most_the_budget_asked(runner, rng, name, budget):
    world = World.make(runner, rng, chunks=4)
    candidates = sum(len(c.token_ids) for c in world.chunks[1:])
    floor = 2 * candidates / (6 * (candidates + len(world.chunks[0].token_ids)))
    if name.startswith("kv_deviation") and budget < floor:
        with pytest.raises(InputError, match=r"below what kv_deviation\w* spends on selecting alone"):
            world.blend(BlendSettings(name, budget))
        return
    report, _ = world.blend(BlendSettings(name, budget))
    assert report.budget_spent <= budget + 1e-9
    assert report.total_tokens == len(world.prompt)
    assert report.reusable_tokens == sum(len(c.token_ids) for c in world.chunks)
    assert set(report.stages) == {"score", "load", "rotate", "recompute"}
    assert min(report.stages.values()) >= 0.0
    some = 0 < report.recomputed_tokens < report.reusable_tokens - len(world.chunks[0].token_ids)
    assert (report.scored_rows > 0) == (some and SELECTORS.get(name).needs in ("max", "mean"))


def test_deviation_is_charged_for_its_first_layers(runner, rng):
    """(c n + (L - c) r) / (L N) with c = 2 of 6 layers."""
    world = World.make(runner, rng, chunks=4)
    report, _ = world.blend(BlendSettings("kv_deviation", 0.6))
    candidates = report.reusable_tokens - len(world.chunks[0].token_ids)
    assert report.budget_spent == pytest.approx(
        (2 * candidates + 4 * report.recomputed_tokens) / (6 * report.reusable_tokens)
    )


def test_deviation_scores_are_the_deviations(runner, rng):
    """The rule picks the tokens whose V differs most between full prefill and the stored V at layer 1."""
    world = World.make(runner, rng, chunks=3)
    full = {}

    class Record:
        def attend(self, layer, q, k, v, params):
            from blendkv.kernels import selected_attention

            full[layer] = v.clone()
            return selected_attention(q, k, v, torch.arange(len(q)), params).out

    with torch.inference_mode():
        runner.forward(to_tensor(world.prompt.token_ids), torch.arange(len(world.prompt)), Record())
    report, _ = world.blend(BlendSettings("kv_deviation", 0.6))
    at, scores = len(world.system.token_ids), {}
    for number, chunk in enumerate(world.chunks):
        span = range(at, at + len(chunk.token_ids))
        deviation = (full[1][span.start : span.stop] - chunk.v[1]).square().sum((-1, -2))
        if number:
            scores |= dict(zip(span, deviation.tolist(), strict=True))
        at = span.stop
    best = sorted(scores, key=scores.__getitem__, reverse=True)[: report.recomputed_tokens]
    assert sorted(best) == report.selected.tolist()


def test_more_budget_comes_closer(runner, rng):
    gaps = {b: [] for b in (0.0, 0.3, 1.0)}
    for _ in range(5):
        world = World.make(runner, rng, chunks=4)
        for budget, found in gaps.items():
            found.append(world.blend(BlendSettings("head_query", budget, "off"))[1])
    means = [sum(g) / len(g) for g in gaps.values()]
    assert means[0] > means[2]
    assert means[1] > means[2]
    assert means[2] < 1e-3


def test_odd_prompts(runner, rng):
    """Duplicate chunks, no chunk, one token of question, everything missing: all ordinary and exact at budget 1."""
    world = World.make(runner, rng, chunks=2)
    system, one, two, query = world.prompt.segments
    for segments, readers in (
        (
            (system, one, one, two, one, query),
            [world.system, world.chunks[0], world.chunks[0], world.chunks[1], world.chunks[0], None],
        ),
        ((system, query), [world.system, None]),
        ((system, one, two, query), [None, None, None, None]),
        ((query,), [None]),
        ((system, one, Segment("query", query.token_ids[:1])), [world.system, world.chunks[0], None]),
        ((one, system, two, query), [world.chunks[0], None, world.chunks[1], None]),
    ):
        odd = World(runner, Prompt(segments), world.system, world.chunks)
        report, gap = odd.blend(BlendSettings("head_query", 1.0), ListSource(readers))
        assert gap < 1e-3
        assert math.isfinite(report.budget_spent)
        odd.blend(BlendSettings("head_query", 0.05), ListSource(readers))


def test_a_sink_that_holds_tokens_is_continued(runner, rng):
    """A second blend behind the first equals full prefill of both, at budget 1."""
    world = World.make(runner, rng, chunks=2)
    sink = world.sink()
    world.blend(BlendSettings("head_query", 1.0), sink=sink)
    chunk = as_token_ids(random_ids(rng, 13))
    kv = collect(runner, "tiny", world.chunks[0].recipe, [chunk], world.system)[0]
    more = Prompt(
        (Segment("history", as_token_ids([7, 8])), Segment("chunk", chunk), Segment("query", as_token_ids([9, 10, 11])))
    )
    report = blend(runner, more, ListSource([None, kv, None]), sink, BlendSettings("strided", 1.0), 3)
    whole = torch.cat((to_tensor(world.prompt.token_ids), to_tensor(more.token_ids)))
    with torch.inference_mode():
        truth = runner.model(input_ids=whole[None], use_cache=False).logits[0, -3:]
    assert (report.logits - truth).abs().max() < 1e-3
    assert sink.length == len(whole)
    assert report.exact_tokens == 0


def test_refusals(runner, rng):
    world = World.make(runner, rng, chunks=1)
    for budget in (-0.1, 1.5, math.nan, math.inf):
        with pytest.raises(InputError, match=r"budget .* is outside \[0, 1\]"):
            BlendSettings("strided", budget)
    with pytest.raises(InputError, match="unknown shift 'big'; allowed: off, mean, js, eb, trend"):
        BlendSettings("strided", 0.1, "big")
    with pytest.raises(InputError, match="the last one must be the 'query'"):
        blend(runner, Prompt(world.prompt.segments[:-1]), ListSource([world.system, world.chunks[0]]), world.sink())
    long = Prompt((Segment("query", as_token_ids(random_ids(rng, 513))),))
    with pytest.raises(PromptTooLongError, match="prompt has 513 tokens; the model's context holds 512"):
        blend(runner, long, ListSource([None]), world.sink())
    with pytest.raises(PromptTooLongError, match="chunk of 520 tokens"):
        collect(runner, "tiny", Recipe("system", (), "float32"), [as_token_ids(random_ids(rng, 520))], None)
    with pytest.raises(InputError, match="recipe names a prefix of 2 tokens, given KV of 0"):
        collect(runner, "tiny", Recipe("bos", (1, 2), "float32"), [as_token_ids([5])], None)
    with pytest.raises(InputError, match="at least one token"):
        Prompt((Segment("chunk", as_token_ids([])),))
    assert collect(runner, "tiny", Recipe("system", (), "float32"), [], None) == []


@pytest.mark.parametrize(
    ("family", "overrides", "cause"),
    [
        ("gpt2", {}, "moves its keys by no known rotation"),
        ("opt", {"word_embed_proj_dim": 48}, "moves its keys by no known rotation"),
        ("bloom", {}, "never called the attention interface"),
        ("deepseek_v3", {}, "multi-head latent attention"),
        ("mamba", {}, "linear_attention"),
        ("qwen3_next", {"linear_num_value_heads": 4, "linear_num_key_heads": 2}, "linear_attention"),
        ("llama4_text", {}, "chunked_attention"),
    ],
)
def test_unsupported_models_are_refused_with_the_cause(family, overrides, cause):
    from transformers import AutoConfig, AutoModelForCausalLM

    base = {
        "vocab_size": 131, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**base, **overrides})).eval()
    with pytest.raises(UnsupportedModelError, match=cause) as caught:
        TorchRunner(model)
    assert "use full prefill" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_whose_attention_does_more_is_refused():
    """Attention that is not softmax(q k) v of the known kinds shows in the comparison at load."""
    model = build("llama")
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def odd(module, query, key, value, mask, **kwargs):
        out, weights = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return out * 1.5, weights

    AttentionInterface.register("odd-for-test", odd)
    model.config._attn_implementation = "odd-for-test"
    with pytest.raises(UnsupportedModelError, match="differs from softmax attention"):
        TorchRunner(model)


@given(
    st.sampled_from(SELECTORS.names()),
    st.one_of(st.none(), st.floats(1e-4, 1)),
    st.sampled_from([None, "off", "js", "mean", "eb", "trend"]),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_mode_specs_round_trip(name, budget, shift, probes):
    mode = Mode("blend", BlendSettings(name, budget, shift, probes))
    again = parse_mode(str(mode))
    assert again.blend.selector == name
    assert again.blend.asked == pytest.approx(mode.blend.asked)
    assert again.blend.shift_kind == mode.blend.shift_kind
    assert again.blend.probes == probes
    assert str(again) == str(mode)


def test_mode_specs():
    assert parse_mode("full").settings is None
    assert parse_mode("reuse").settings == BlendSettings("strided", 0.0, "off")
    assert parse_mode("blend").settings == BlendSettings()
    assert parse_mode("blend:kv_deviation@0.2+shift").settings == BlendSettings("kv_deviation", 0.2, "js")
    assert parse_mode("blend:strided-shift").settings == BlendSettings("strided", None, "off")
    assert parse_mode("blend@0.2+mean").settings == BlendSettings("head_query", 0.2, "mean")
    assert parse_mode("blend:random@0.1+js+p8").settings == BlendSettings("random", 0.1, "js", 8)
    assert parse_mode("blend+p8-shift").settings == BlendSettings("head_query", None, "off", 8)
    for bad in (
        "",
        "fast",
        "blend:strided+p8+p9",
        "blend:strided+js+mean",
        "blend:strided-p8",
        "blend:strided+more",
        "blend:strided@0.1@0.2",
        "blend:strided@lots",
        "blending:strided",
        "blend:strided@nan",
    ):
        with pytest.raises(InputError, match="unknown mode"):
            parse_mode(bad)
    with pytest.raises(InputError, match="outside"):
        parse_mode("blend:strided@1.5")
    with pytest.raises(InputError, match="unknown selector"):
        parse_mode("blend:best@0.5")
