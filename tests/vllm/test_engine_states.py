"""Around a blend: preemption, abort, chunked prefill of others, several KV cache groups, models that are refused."""

from __future__ import annotations

import pytest
from blending import blending as start
from blending import close, save, transfer
from homes import own_home
from verdicts import put_verdict
from vllm_engine import engine

from blendkv.blend import parse_mode
from blendkv.engines.fingerprint import fingerprint_folder

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]
MODES = ("reuse", "blend:strided@0.3", "blend:head_query@0.4")


def test_preempted_requests_resume_from_a_new_blend(tmp_path):
    """Three requests that grow from 2 blocks to 3, 6 in all: some are preempted; every answer is what it is alone."""
    sizes = (40, 60, 90)
    with start(tmp_path, sizes=sizes, num_gpu_blocks_override=7, enable_prefix_caching=False) as running:
        scheduler = running.llm.llm_engine.engine_core.engine_core.scheduler
        alone = running.ask(mode=MODES[1], tokens=80)  # without prefix caching no salt is needed
        plain = running.ask(tokens=80)
        preempted = []
        real = scheduler._preempt_request

        def noted(request, *args, **kwargs):
            preempted.append(request.request_id)
            return real(request, *args, **kwargs)

        scheduler._preempt_request = noted
        before = running.worker.outcomes["blended"]
        requests = [running.request(mode=MODES[1], tokens=80) for _ in range(2)]
        answers = running.ask(running.request(tokens=80), *requests)  # the last come are preempted first
        assert preempted, "the KV space is too large for this test"
        assert running.worker.outcomes["blended"] > before + 2
        assert all(close(a, alone, 1e-3) for a in answers[1:])
        assert close(answers[0], plain, 1e-3)


def test_abort_while_waiting_for_the_store(tmp_path, monkeypatch):
    from blendkv.store.tiered import KVStore

    with start(tmp_path, extra={"load_seconds": 60}) as running:
        blended = running.ask(mode="reuse", salt="a")
        with monkeypatch.context() as slow:
            slow.setattr(KVStore, "in_memory", lambda self, key: False)
            slow.setattr("blendkv.engines.vllm.prefetch.Prefetcher.ready", lambda self, request_id, chunks, use: False)
            prompt, params = running.request(mode="reuse", salt="b")
            core = running.llm.llm_engine
            core.add_request("waits", prompt, params)
            for _ in range(3):
                core.step()
            core.abort_request(["waits"])
            core.step()
        assert not running.scheduler._states
        assert running.scheduler.outcomes["aborted"] == 1
        assert close(running.ask(mode="reuse", salt="c"), blended)


def test_plain_prompts_prefill_in_chunks_beside_blends(tmp_path):
    """Steps of 64 tokens: a long plain prompt takes several, blends go on beside it."""
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_chunked_prefill": True}
    with start(tmp_path, sizes=(40, 60, 90), extra={"step_tokens": 512}, **options) as running:
        plain = running.ask()
        alone = running.ask(mode=MODES[1], salt="x")
        requests = [running.request(), *(running.request(mode=MODES[1], salt=f"s{i}") for i in range(3))]
        answers = running.ask(*requests)
        assert close(answers[0], plain)
        assert all(close(a, alone) for a in answers[1:])


@pytest.mark.parametrize("family", ["gemma3_text", "gemma2"])
def test_several_kv_cache_groups(tmp_path, family):
    """Sliding windows: pages behind the window do not exist, all others are written, group by group."""
    with start(tmp_path, family, sizes=(150, 90, 40), block_size=16) as running:
        config = running.worker._kv_cache_config
        assert len(config.kv_cache_groups) > 1
        plain = running.ask()
        assert close(running.ask(mode="blend:head_query@1", salt="exact"), plain)
        assert running.told["outcome"] == "blended"
        for mode in MODES:
            tokens, log_probs = running.ask(mode=mode, salt=mode)
            token, log_prob = running.embedded(parse_mode(mode).settings)
            assert tokens[0] == token
            assert abs(log_probs[0] - log_prob) < 1e-3
            assert close(running.ask(mode=mode, salt=mode), (tokens, log_probs))  # from the prefix cache this time


def test_a_model_that_is_refused_is_served(tmp_path, tiny_checkpoint):
    """Learned positions: no rotation, no blending; every request is prefilled in full, counted."""
    from blending import Blending
    from vllm import SamplingParams

    folder, _ = tiny_checkpoint("gpt2", n_embd=64, n_head=2, n_layer=2, n_positions=512)
    ids = list(range(5, 60))
    with engine(folder) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, detokenize=False)
        expected = list(llm.generate([{"prompt_token_ids": ids}], [params], use_tqdm=False)[0].outputs[0].token_ids)
    with engine(folder, kv_transfer_config=transfer(tmp_path)) as llm:
        running = Blending(llm, None, None, tmp_path)
        for _ in range(2):
            cut = [["chunk", 40], ["query", 15]]
            tokens, _ = running.ask(running.request(mode="reuse", salt="x", segments=cut, ids=ids))[0]
            assert tokens == expected
            assert running.told["outcome"] == "full"
        assert running.told["reason"] == "model"


def test_a_worker_class_where_the_plugin_cannot_reach_the_model(tmp_path, monkeypatch):
    """Without either, nothing is blended and all is served."""
    from blendkv.engines.vllm import worker_class  # noqa: F401 - before `remember` is taken from the plugin alone

    monkeypatch.setattr("blendkv.engines.vllm.plugin.remember", lambda model: None)
    for worker in ({"worker_cls": "blendkv.engines.vllm.worker_class.CpuWorker"}, {}):
        monkeypatch.setattr("blendkv.engines.vllm.plugin._LOADED", [])  # the last engine's model may still be there
        with start(tmp_path, **worker) as running:
            plain = running.ask()
            assert close(running.ask(mode="blend:head_query@1", salt="x"), plain)
            assert running.told["outcome"] == ("blended" if worker else "full")
            assert running.told["reason"] == (None if worker else "model")


@pytest.mark.parametrize(
    ("passed", "settings", "reuse", "other"),
    [
        ((), {}, "full", "full"),
        ((), {"ignore_gate": True}, "blended", "blended"),
        (("blend:strided@0.4", "blend:strided@0.5"), {"require_gate": True}, "full", "blended"),
    ],
    ids=["failed", "ignored", "required"],
)
def test_the_gate_s_verdict_is_honoured(tmp_path, monkeypatch, passed, settings, reuse, other):
    """By the connector; a mode that was passed is also that of requests that name none."""
    monkeypatch.setenv("BLENDKV_HOME", str(own_home(tmp_path / "home")))
    put_verdict(tmp_path / "home", fingerprint_folder(save(tmp_path)), *passed)
    with start(tmp_path, extra=settings) as running:
        for mode, outcome in (("reuse", reuse), ("blend:strided@0.4", other)):
            running.ask(mode=mode, salt="x")
            assert running.told["outcome"] == outcome
            assert running.told["reason"] == (None if outcome == "blended" else "gate")
        prompt, params = running.request(mode="blend:strided@0.4", salt="x")
        del params.extra_args["kv_transfer_params"]["blendkv"]["mode"]
        running.ask((prompt, params))
        assert running.told["mode"] == ("blend:strided@0.4" if passed else None)
        assert running.told["reason"] == (None if passed else "cache_salt")


def test_without_the_connector_nothing_is_registered(tiny_checkpoint):
    """In a process of its own: an installed BlendKV leaves vLLM's registry as it was."""
    import subprocess
    import sys

    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from vllm import ModelRegistry;"
        "print(sum('blendkv' in str(vars(m)) for m in ModelRegistry.models.values()))"
    )
    counts = []
    for active in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=_environment(active), check=True
        )
        counts.append(int(done.stdout.strip().splitlines()[-1]))
    assert counts[0] == 0
    assert counts[1] > 100


def _environment(active):
    import os

    return {**os.environ, "BLENDKV_VLLM_ACTIVE": active}


@pytest.mark.parametrize("size", ["pipeline_parallel_size"])
def test_pipeline_parallel_is_refused_at_start(tmp_path, size):
    from types import SimpleNamespace

    from blendkv.engines.vllm.connector import _check
    from blendkv.errors import InputError

    transfer_config = SimpleNamespace(kv_load_failure_policy="recompute")
    parallel = SimpleNamespace(tensor_parallel_size=1, **{size: 2})
    config = SimpleNamespace(kv_transfer_config=transfer_config, parallel_config=parallel)
    with pytest.raises(InputError, match=f"{size} is 2.*use 1"):
        _check(config)


def test_all_requests_of_an_engine(tmp_path):
    """``all_requests``: nothing has to be said, nothing is salted."""
    with start(tmp_path, sizes=(33, 70, 45), extra={"all_requests": True, "mode": "reuse"}) as running:
        named = running.ask(mode="reuse", salt="x")
        running.store.flush()
        assert close(running.ask(), named)
        assert running.told["outcome"] == "blended"
        assert running.scheduler.outcomes == {"blended": 2}
