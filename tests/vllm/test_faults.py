"""Faults on the way to a blend: the request is prefilled in full, counted, and the engine goes on."""

from __future__ import annotations

import time

import pytest
from blending import blending as start
from blending import close

from blendkv.errors import DamagedChunkError, StoreError
from blendkv.store.tiered import KVStore

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def blending(request, tmp_path_factory):
    """A model with one KV cache group, whose blocks vLLM prefills again, and one with two, where it cannot be told."""
    sizes = 33, 1, 70, 45
    with start(tmp_path_factory.mktemp("model"), request.param, sizes, extra={"load_seconds": 0.3}) as running:
        running.ask(mode="reuse", salt="fill")
        running.store.flush()  # the store holds every chunk, and can be searched for them
        yield running


def failing(error):
    def fail(*args, **kwargs):
        raise error

    return fail


CALLS = ("get", "contains", "token_ids", "in_memory", "put_async")
ERRORS = (StoreError("the disk is away"), OSError("input/output error"), RuntimeError("?"))


@pytest.mark.parametrize("segments", ["own", None], ids=["boundaries", "content"])
@pytest.mark.parametrize("call", CALLS)
def test_a_store_call_that_fails(blending, monkeypatch, call, segments):
    """Whatever call to the store fails with whatever error: the answer is right, and blending resumes by itself."""
    plain = blending.ask()
    blended = blending.ask(mode="reuse", salt=f"before-{call}-{segments}", segments=segments)
    gone = blending.library.key(blending.world.chunks[0].token_ids)
    for error in ERRORS:
        with monkeypatch.context() as broken:
            if call == "put_async":  # something to put: the chunk is missing
                blending.store.remove(gone)
            broken.setattr(KVStore, call, failing(error))
            during = blending.ask(mode="reuse", salt=f"during-{call}-{error}-{segments}", segments=segments)
            # What cannot be read, or is not found, is computed: the answer may be the blend's, or full prefill's.
            assert close(during, plain) or (segments is None and call == "put_async") or close(during, blended)
            assert blending.told["outcome"] in ("blended", "full")
    blending.ask(mode="reuse", salt=f"mend-{call}-{segments}")
    blending.store.flush()
    assert close(blending.ask(mode="reuse", salt=f"after-{call}-{segments}", segments=segments), blended)
    assert blending.told["outcome"] == "blended"


@pytest.mark.parametrize("error", ERRORS)
def test_an_index_that_fails(blending, monkeypatch, error):
    """The finder reads the store's index directly."""
    from blendkv.matching import ChunkFinder

    plain = blending.ask()
    blended = blending.ask(mode="reuse", salt=f"index-before-{error}", segments=None)
    for call in ("refresh", "find"):
        with monkeypatch.context() as broken:
            broken.setattr(ChunkFinder, call, failing(error))
            if call == "refresh":  # bound when the connector was made
                broken.setattr(blending.scheduler, "_refresh", failing(error))
            assert close(blending.ask(mode="reuse", salt=f"index-{call}-{error}", segments=None), plain)
            assert blending.told["outcome"] == "full"
    assert close(blending.ask(mode="reuse", salt=f"index-after-{error}", segments=None), blended)
    assert blending.told["outcome"] == "blended"


def test_a_blend_that_fails(blending, monkeypatch):
    plain = blending.ask()
    blended = blending.ask(mode="reuse", salt="b0")
    with monkeypatch.context() as broken:
        broken.setattr("blendkv.engines.vllm.worker.blend", failing_blend())
        assert close(blending.ask(mode="reuse", salt="b1"), plain)
    assert blending.told == {"outcome": "full", "reason": "error:RuntimeError", "mode": "reuse"}
    assert blending.worker.outcomes["error:RuntimeError"] >= 1
    assert close(blending.ask(mode="reuse", salt="b2"), blended)


def failing_blend():
    """Fails for stored KV; a prefill without any works."""
    from blendkv.blend import blend

    def fail(runner, prompt, source, sink, settings):
        if any(r is not None for r in source.readers):
            raise RuntimeError("the model cannot be run")
        return blend(runner, prompt, source, sink, settings)

    return fail


def test_half_a_blend_is_written_over(blending, monkeypatch):
    """A fault in a late layer: the pages that were written already are written again."""
    from blendkv.library import PromptSource

    plain = blending.ask()
    real = PromptSource.layer

    def late(self, index):
        if index == 2:
            raise DamagedChunkError("0" * 64, "checksum of layer 2")
        return real(self, index)

    with monkeypatch.context() as broken:
        broken.setattr(PromptSource, "layer", late)
        assert close(blending.ask(mode="reuse", salt="half"), plain)
    assert blending.told["reason"] == "chunk_damaged"


def test_a_slow_disk_is_not_waited_for(blending, monkeypatch):
    plain = blending.ask()
    real = KVStore.get

    def slow(self, key, token_ids):
        time.sleep(1.0)
        return real(self, key, token_ids)

    with monkeypatch.context() as broken:
        broken.setattr(KVStore, "in_memory", lambda self, key: False)
        broken.setattr(KVStore, "get", slow)
        assert close(blending.ask(mode="reuse", salt="slow"), plain)
        assert blending.told["reason"] == "store_slow"


def test_a_request_waits_until_its_kv_is_in_memory(blending, monkeypatch):
    """The scheduler goes on meanwhile: a plain request that came later is not held up behind it."""
    blended = blending.ask(mode="reuse", salt="w0")
    reads = []
    real = KVStore.get

    def slow(self, key, token_ids):
        reads.append(key)
        time.sleep(0.01)
        return real(self, key, token_ids)

    with monkeypatch.context() as slower:
        slower.setattr(KVStore, "in_memory", lambda self, key: False)
        slower.setattr(KVStore, "get", slow)
        first, second = blending.ask(blending.request(mode="reuse", salt="w1"), blending.request())
        assert blending.last[0].kv_transfer_params["blendkv"]["outcome"] == "blended"
    assert close(first, blended)
    assert close(second, blending.ask())
    stored = len(blending.world.chunks) + 1
    assert stored <= len(reads) <= 2 * stored  # once ahead, once by the blend, however often it was polled
