"""A pipeline whose store is in a daemon: the same answers, whether it lives, dies, hangs or comes back."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from daemon_process import STUCK_DISK, DaemonProcess, eventually
from tiny_hub import SYSTEM, BagEmbedder, open_pipeline, write_corpus

from blendkv.daemon.client import DaemonStore
from blendkv.daemon.opening import open_store
from blendkv.daemon.reader import LentReader
from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.engine import TorchEngine
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.collection import Collection
from blendkv.retrieval.retriever import HybridRetriever
from blendkv.store.tiered import KVStore

MODES = ("reuse", "blend:head_query@0.3")
QUESTIONS = (
    "What does the nonlocal statement do?",
    "What creates an anonymous function?",
    "When does a generator stop?",
)
SHORT = GenerationOptions(max_new_tokens=12)
PATIENT, HASTY = 20.0, 1.0
"""Deadlines: a loaded machine must not look like a dead daemon; one that is stopped must."""


def over(folder, engine, deadline=PATIENT):
    """A pipeline from parts, over whatever store there is."""
    collection, embedder = Collection(folder), BagEmbedder()
    return RagPipeline(
        engine, open_store(folder, 1 << 28, deadline=deadline), HybridRetriever(collection, embedder), system=SYSTEM,
        top_k=3, collection=collection, embedder=embedder,
    )  # fmt: skip


def answers(pipeline):
    return [pipeline.ask(q, mode=mode, options=SHORT).token_ids for mode in MODES for q in QUESTIONS]


@pytest.fixture(scope="module")
def expected(llama, tmp_path_factory):
    """Answers over a store in this process."""
    folder = tmp_path_factory.mktemp("embedded")
    with open_pipeline(folder / "s", llama) as pipeline:
        pipeline.ingest([write_corpus(folder / "c")], chunk_tokens=48)
        return answers(pipeline)


@pytest.fixture
def filled(llama, tmp_path):
    """The same corpus, ingested without a daemon."""
    with open_pipeline(tmp_path / "s", llama) as pipeline:
        pipeline.ingest([write_corpus(tmp_path / "c")], chunk_tokens=48)
    return tmp_path / "s"


def test_from_store_uses_the_daemon_that_runs(llama, tmp_path):
    with RagPipeline.from_store(tmp_path / "s", engine=llama) as pipeline:
        assert isinstance(pipeline.store, KVStore)
    with DaemonProcess(tmp_path / "s"), RagPipeline.from_store(tmp_path / "s", engine=llama) as pipeline:
        assert isinstance(pipeline.store, DaemonStore)
        assert pipeline.store.up
    with RagPipeline.from_store(tmp_path / "s", engine=llama) as pipeline:  # it was killed: its socket is left
        assert isinstance(pipeline.store, KVStore)


def test_an_engine_that_starts_while_the_daemon_hangs_finds_it_later(llama, filled, expected):
    with DaemonProcess(filled) as daemon:
        daemon.kill(signal.SIGSTOP)
        with over(filled, llama, HASTY) as pipeline:
            assert isinstance(pipeline.store, DaemonStore)
            assert answers(pipeline) == expected
            assert pipeline.library.counts.hits == 0
            daemon.kill(signal.SIGCONT)
            eventually(lambda: pipeline.store.up)
            assert answers(pipeline) == expected
            assert pipeline.library.counts.hits > 0


def test_ingest_and_answers_through_a_daemon(llama, tmp_path, expected):
    with DaemonProcess(tmp_path / "s"), over(tmp_path / "s", llama) as pipeline:
        report = pipeline.ingest([write_corpus(tmp_path / "c")], chunk_tokens=48)
        assert report.kv_computed == len({chunk.token_ids.tobytes() for chunk in pipeline.collection.chunks()}) > 0
        assert answers(pipeline) == expected
        counts = pipeline.library.counts
        assert (counts.computed, counts.failed_lookups, counts.not_stored) == (report.kv_computed, 0, 0)
        assert counts.hits > 0
        assert pipeline.fallbacks == {}


def test_a_daemon_killed_between_requests(llama, filled, expected):
    """Chunks are computed, and found while they wait for a daemon; the next daemon has all that was stored."""
    with DaemonProcess(filled) as daemon, over(filled, llama) as pipeline:
        assert answers(pipeline) == expected
        counts = pipeline.library.counts
        hits = counts.hits
        assert (hits > 0, counts.computed) == (True, 0)
        daemon.kill()
        eventually(lambda: not pipeline.store.up)
        assert answers(pipeline) == expected
        assert counts.computed > 0
        assert pipeline.store.missed > 0
        computed, before = counts.computed, counts.hits
        with DaemonProcess(filled):
            eventually(lambda: pipeline.store.up)
            assert answers(pipeline) == expected
            assert (counts.hits, counts.computed) == (before + hits, computed)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("mode", MODES)
def test_a_daemon_lost_during_a_request(llama, filled, expected, monkeypatch, number, mode):
    """Two layers of the chunks have come from a slow disk, the rest never does."""
    read, lost = LentReader._parts, []

    def parts(self, index):
        if index == 1 and not lost:
            lost.append(self.key)
            daemon.kill(number)
        return read(self, index)

    with DaemonProcess(filled, before=STUCK_DISK.format(layer=2)) as daemon, over(filled, llama, HASTY) as pipeline:
        monkeypatch.setattr(LentReader, "_parts", parts)
        answer = pipeline.ask(QUESTIONS[0], mode=mode, options=SHORT)
        assert lost
        assert answer.token_ids == expected[len(QUESTIONS) * MODES.index(mode)]
        assert (answer.mode, answer.fallback) == (mode, None)
        assert pipeline.fallbacks == {"chunk of a store that went away recomputed": 1}
        assert pipeline.library.counts.computed == pipeline.library.counts.hits > 0


def test_a_daemon_killed_while_its_memory_is_read(llama, filled, expected, monkeypatch):
    """What is there already stays readable: nothing is computed."""
    read, killed = LentReader._parts, []

    def parts(self, index):
        if index == 1 and not killed:
            killed.append(daemon.kill())
            eventually(lambda: not pipeline.store.up)
        return read(self, index)

    with DaemonProcess(filled) as daemon, over(filled, llama) as pipeline:
        for question in QUESTIONS:
            pipeline.ask(question, mode="reuse", options=SHORT)
        monkeypatch.setattr(LentReader, "_parts", parts)
        assert pipeline.ask(QUESTIONS[0], mode="reuse", options=SHORT).token_ids == expected[0]
        assert killed
        assert pipeline.library.counts.computed == 0
        assert pipeline.fallbacks == {}


def test_two_pipelines_on_one_daemon(llama, llama_folder, filled, expected):
    other = TorchEngine.load(str(llama_folder))
    with DaemonProcess(filled), over(filled, llama) as one, over(filled, other) as two:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(answers, (one, two, one, two)))
        assert found == [expected] * 4
        assert [pipeline.library.counts.computed for pipeline in (one, two)] == [0, 0]
        stats = one.store.daemon_stats()
        assert stats.clients == 2
        assert stats.store.tiers[0].hits > 0
