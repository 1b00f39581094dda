"""What a prompt becomes for vLLM, what vLLM's words become for us, and the loop between; without vLLM."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from tiny_hub import save_model

from blendkv.blend import BlendSummary, parse_mode
from blendkv.engines.base import GenerationOptions, Outcome
from blendkv.engines.vllm import arguments, extension
from blendkv.engines.vllm.arguments import engine_arguments, own_dtype, require_vllm, transfer_config
from blendkv.engines.vllm.generation import VllmGeneration
from blendkv.engines.vllm.loop import EngineLoop
from blendkv.engines.vllm.requests import cache_salt, outcome_of, plain_params, sampling_arguments, transfer_params
from blendkv.errors import EngineError, InputError, MissingDependencyError, StoreFullError, UnsupportedModelError
from blendkv.market.base import Use
from blendkv.market.context import using
from blendkv.types import Prompt, Recipe, Segment, as_token_ids

BLEND = parse_mode("blend:strided@0.3")
SAID = {
    "outcome": "blended", "reason": None, "mode": "blend:strided@0.3", "selector": "strided", "shift": "js",
    "budget_asked": 0.3, "budget_spent": 0.29, "total_tokens": 9, "reusable_tokens": 4, "exact_tokens": 1,
    "fresh_tokens": 4, "recomputed_tokens": 1, "scored_rows": 0, "bytes_loaded": 128,
    "stages": {"score": 0.1, "load": 0.2, "rotate": 0.3, "recompute": 0.4},
}  # fmt: skip


def prompt_of(*segments: tuple[str, list[int]]) -> Prompt:
    return Prompt(tuple(Segment(kind, as_token_ids(ids)) for kind, ids in segments))


PROMPT = prompt_of(("system", [1, 2]), ("chunk", [3, 4, 5]), ("query", [6, 7]))
SYSTEM = Recipe("system", (1, 2), "float32")


def test_sampling():
    options = GenerationOptions(max_new_tokens=9, temperature=0.5, top_p=0.9, stop=("a", "b"), seed=3)
    expected = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stop": ["a", "b"], "seed": 3}
    assert sampling_arguments(options, 100) == expected
    assert sampling_arguments(options, 4)["max_tokens"] == 4
    greedy = sampling_arguments(GenerationOptions(top_p=0.2), 1000)
    assert (greedy["temperature"], greedy["top_p"], greedy["stop"]) == (0.0, 1.0, [])


@pytest.mark.parametrize(("conversation", "workload"), [(False, "rag"), (True, "chat")])
def test_what_the_connector_is_told(conversation, workload):
    told = transfer_params(PROMPT, BLEND, SYSTEM, conversation)["blendkv"]
    assert told["segments"] == [["system", 2], ["chunk", 3], ["query", 2]]
    assert parse_mode(told["mode"]) == BLEND
    assert (told["recipe"], told["workload"]) == ("system", workload)


@pytest.mark.parametrize("conversation", [False, True])
def test_whose_work_it_is_goes_with_the_request(conversation):
    usual = "chat" if conversation else "rag"
    assert plain_params(conversation)["blendkv"] == {"mode": "full", "workload": usual}
    with using(Use("agent", "loop:1")):
        told = transfer_params(PROMPT, BLEND, SYSTEM, conversation)["blendkv"]
        assert (told["workload"], told["session"]) == ("agent", "loop:1")
        assert plain_params(conversation)["blendkv"] == {"mode": "full", "workload": "agent", "session": "loop:1"}
    with using(Use("agent", "two words")), pytest.raises(InputError, match="session is 'two words'"):
        plain_params(conversation)  # the connector would refuse to blend


def test_how_long_the_scheduler_held_it_is_reported():
    outcome = outcome_of(BLEND, {"blendkv": {**SAID, "held_seconds": 1.5, "held_for": "expected"}}, 0.5)
    assert (outcome.seconds["held"], outcome.seconds["prepare"]) == (1.5, 0.5)


def test_salts_keep_blends_apart():
    """The same prompt finds its KV again; another question, cut, recipe or mode does not."""
    salt = cache_salt(PROMPT, BLEND, SYSTEM, None)
    assert salt.startswith("blend:strided@0.3|")
    assert cache_salt(PROMPT, BLEND, SYSTEM, None) == salt
    others = [
        cache_salt(prompt_of(("system", [1, 2]), ("chunk", [3, 4, 5]), ("query", [6, 8])), BLEND, SYSTEM, None),
        cache_salt(prompt_of(("system", [1, 2]), ("chunk", [3, 4]), ("query", [5, 6, 7])), BLEND, SYSTEM, None),
        cache_salt(prompt_of(("system", [1, 2]), ("history", [3, 4, 5]), ("query", [6, 7])), BLEND, SYSTEM, None),
        cache_salt(PROMPT, parse_mode("blend:strided@0.35"), SYSTEM, None),
        cache_salt(PROMPT, BLEND, Recipe("bos", (1,), "float32"), None),
        cache_salt(PROMPT, BLEND, SYSTEM, "a"),
        cache_salt(PROMPT, BLEND, SYSTEM, "b"),
    ]
    assert len({salt, *others}) == 8
    longer = prompt_of(("system", [1, 2]), ("chunk", [3, 4, 5]), ("history", [6, 7, 9]), ("query", [8, 7]))
    assert cache_salt(longer, BLEND, SYSTEM, "a") == cache_salt(PROMPT, BLEND, SYSTEM, "a")


def test_a_tenant_is_told_and_salted():
    tag = "ab" * 16
    recipe = Recipe("system", (1, 2), "float32", tenant=tag)
    assert transfer_params(PROMPT, BLEND, recipe, False)["blendkv"]["tenant"] == tag
    for conversation in (None, "c"):
        salt = cache_salt(PROMPT, BLEND, recipe, conversation)
        assert salt.startswith(f"blend:strided@0.3|{tag}|")
        assert salt != cache_salt(PROMPT, BLEND, SYSTEM, conversation)


def test_a_blend_is_reported():
    outcome = outcome_of(BLEND, {"blendkv": SAID}, 0.5)
    assert (outcome.mode, outcome.fallback, outcome.incidents) == ("blend:strided@0.3", None, ())
    assert isinstance(outcome.report, BlendSummary)
    assert (outcome.report.recomputed_tokens, outcome.report.budget_spent) == (1, 0.29)
    assert outcome.seconds == {"prepare": 0.5, **SAID["stages"]}


@pytest.mark.parametrize("missing", ["selector", "stages", "recomputed_tokens"])
def test_half_a_report_is_none(missing):
    outcome = outcome_of(BLEND, {"blendkv": {k: v for k, v in SAID.items() if k != missing}}, 0.5)
    assert (outcome.mode, outcome.report, outcome.fallback) == ("blend:strided@0.3", None, None)


@pytest.mark.parametrize(
    ("said", "mode", "reason"),
    [
        ({"outcome": "full", "reason": "nothing_stored", "mode": None}, "full", "nothing_stored"),
        ({"outcome": "prefix", "reason": "prefix"}, "prefix", "prefix"),
        ({"outcome": "full"}, "full", "full"),
    ],
)
def test_fallbacks_have_their_reason(said, mode, reason):
    outcome = outcome_of(BLEND, {"blendkv": said}, 0.0)
    assert (outcome.mode, outcome.report, outcome.fallback, outcome.incidents) == (mode, None, reason, (reason,))


@pytest.mark.parametrize("params", [None, {}, {"blendkv": None}, {"blendkv": {}}, {"other": 1}])
def test_silence_is_said_so(params):
    outcome = outcome_of(BLEND, params, 0.0)
    assert "did not say" in outcome.fallback
    assert outcome.incidents == ("no outcome reported",)


def test_engine_arguments(tmp_path):
    folder = save_model(tmp_path / "m")
    made = engine_arguments(
        folder, "name", tmp_path / "s", "auto", {"memory": "1GB"}, {"max_model_len": None, "seed": 1}
    )
    assert made["dtype"] == own_dtype(folder) == "float32"
    assert (made["served_model_name"], made["seed"], "max_model_len" in made) == ("name", 1, False)
    transfer = made["kv_transfer_config"]
    assert transfer["kv_connector_extra_config"] == {"store": str(tmp_path / "s"), "memory": "1GB"}
    assert transfer["kv_load_failure_policy"] == "recompute"
    module, _, name = made["worker_extension_cls"].rpartition(".")
    assert (module, hasattr(extension, name)) == ("blendkv.engines.vllm.extension", True)
    assert engine_arguments(folder, "n", tmp_path, "bfloat16", {}, {})["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("connector", "more", "message"),
    [
        ({"nonsense": 1}, {}, "unknown in kv_connector_extra_config: \\['nonsense'\\]"),
        ({"mode": "full"}, {}, "the connector's mode is 'full'"),
        ({}, {"kv_transfer_config": {}}, "kv_transfer_config cannot be given"),
    ],
)
def test_wrong_arguments(tmp_path, connector, more, message):
    with pytest.raises(InputError, match=message):
        engine_arguments(tmp_path, "n", tmp_path, "float32", connector, more)


def test_the_store_is_not_an_option(tmp_path):
    extra = transfer_config(tmp_path, {"store": "/elsewhere"})["kv_connector_extra_config"]
    assert extra["store"] == str(tmp_path)


def test_without_vllm(monkeypatch):
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'blendkv\[vllm\]'"):
        require_vllm()


@pytest.mark.parametrize("error", [StoreFullError("the disk is full"), UnsupportedModelError("no rotation")])
def test_errors_of_workers_come_as_plain_values(monkeypatch, error):
    def fails() -> Any:
        raise error

    monkeypatch.setattr(extension, "_blender", fails)
    answer = extension.BlendExtension().blendkv_precompute([[1]], "system", [2])
    assert answer == {"error": [type(error).__name__, str(error)]}


@dataclass
class Made:
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass
class Out:
    outputs: list[Made]
    finished: bool = False
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class FakeLLM:
    """Yields what it is told to, and then, without an end, nothing more until it is cancelled."""

    outs: list[Any]
    aborted: threading.Event = field(default_factory=threading.Event)

    async def generate(self, prompt, sampling, request_id):
        try:
            for out in self.outs:
                await asyncio.sleep(0)
                if isinstance(out, Exception):
                    raise out
                yield out
            if not out.finished:
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.set()
            raise


@pytest.fixture
def loop():
    made = EngineLoop()
    yield made
    made.close(lambda: None)


def decode(loop, *outs, asked=BLEND):
    llm = FakeLLM(list(outs))
    return llm, VllmGeneration(loop, llm, {}, None, "r", asked, Outcome(str(asked), seconds={"prepare": 0.0}))


def finished(reason, said=None):
    return Out([Made("c", [3], reason)], True, None if said is None else {"blendkv": said})


@pytest.mark.parametrize(
    ("reason", "ours"), [("stop", "stop"), ("length", "length"), ("abort", "cancelled"), ("repetition", "cancelled")]
)
def test_an_answer(loop, reason, ours):
    _, generation = decode(loop, Out([Made("a", [1])]), Out([Made("", [2])]), finished(reason, SAID))
    assert list(generation) == ["a", "c"]
    assert (generation.text, generation.tokens, generation.finish_reason) == ("ac", [1, 2, 3], ours)
    assert generation.first_token_at is not None
    assert generation.outcome.report.recomputed_tokens == 1


def test_a_plain_answer_keeps_its_outcome(loop):
    _, generation = decode(loop, finished("stop", None), asked=None)
    list(generation)
    assert generation.outcome == Outcome("None", seconds={"prepare": 0.0})


def test_an_answer_that_fails(loop):
    _, generation = decode(loop, finished("error"))
    with pytest.raises(EngineError, match="failed while it decoded"):
        list(generation)


class VLLMClientError(Exception):
    pass


class EngineDeadError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("too long"), InputError, "refuses the request: too long"),
        (VLLMClientError("no"), InputError, "refuses the request: no"),
        (EngineDeadError(), EngineError, "engine process is gone"),
        (KeyError("other"), KeyError, "other"),
        (EngineError("mine"), EngineError, "mine"),
    ],
)
def test_errors_of_vllm_are_named(loop, error, kind, message):
    _, generation = decode(loop, Out([Made("a", [1])]), error)
    with pytest.raises(kind, match=message):
        list(generation)


def test_cancelled_answers_are_aborted(loop):
    llm, generation = decode(loop, Out([Made("a", [1])]))
    pieces = iter(generation)
    assert next(pieces) == "a"
    pieces.close()
    assert llm.aborted.is_set()
    assert generation.finish_reason == "cancelled"


def test_cancelled_before_it_began(loop):
    """The task may be cancelled before its first step: the reader still hears of the end."""
    _, generation = decode(loop, Out([Made("a", [1])]))
    held, go = threading.Event(), threading.Event()

    async def hold():
        held.set()
        go.wait(20)

    loop.start(hold(), lambda task: None)
    assert held.wait(20)
    pieces = iter(generation)
    reader = threading.Thread(target=lambda: list(pieces))
    reader.start()
    while not generation._begun:
        time.sleep(0)
    generation.cancel()
    go.set()
    reader.join(20)
    assert not reader.is_alive()
    assert generation.finish_reason == "cancelled"


def test_closing_the_loop_ends_what_runs():
    loop = EngineLoop()
    llm, generation = decode(loop, Out([Made("a", [1])]))
    pieces = iter(generation)
    assert next(pieces) == "a"
    ended = []
    loop.close(lambda: ended.append(True))
    assert list(pieces) == []
    assert (llm.aborted.is_set(), ended) == (True, [True])
    loop.close(lambda: ended.append(True))
    assert ended == [True]
    with pytest.raises(InputError, match="engine is closed"):
        list(decode(loop, Out([Made("a", [1])]))[1])


def test_blocking_calls_on_the_loop_are_refused():
    async def here():
        loop = EngineLoop(asyncio.get_running_loop())
        with pytest.raises(InputError, match="runs on the engine's own event loop"):
            loop.call(asyncio.sleep(0))
        _, generation = decode(loop, Out([Made("a", [1])]), finished("stop", SAID))
        assert [piece async for piece in generation] == ["a", "c"]
        loop.close(lambda: pytest.fail("the loop is the caller's"))

    asyncio.run(here())
