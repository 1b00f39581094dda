"""Ingest: what changes, what stays, what a kill or a full disk leaves behind."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import seed_of_run
from tiny_hub import TOPICS, open_pipeline, write_corpus

from blendkv.engines.base import GenerationOptions
from blendkv.errors import InputError, StoreFullError
from blendkv.types import chunk_key

SHORT = GenerationOptions(max_new_tokens=8)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def pipeline(tmp_path, llama):
    with open_pipeline(tmp_path / "store", llama) as made:
        yield made


def run(pipeline, corpus, **options):
    return pipeline.ingest([corpus], **{"chunk_tokens": 48, **options})


def chunk_keys(pipeline):
    """Keys of the chunk KVs in the store, without the system prefix."""
    return {row.key for row in pipeline.store.ls() if row.recipe != pipeline.library.start}


def wanted(pipeline):
    return {pipeline.library.key(chunk.token_ids) for chunk in pipeline.collection.chunks()}


def test_first_and_second_run(pipeline, corpus):
    seen = {}
    first = run(pipeline, corpus, progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)))
    counts = pipeline.collection.counts()
    assert (first.documents.added, pipeline.documents) == (len(TOPICS), len(TOPICS))
    assert (first.chunks, first.tokens) == (counts.chunks, counts.tokens)
    assert counts.embedded == counts.chunks
    assert first.kv_computed == len(wanted(pipeline))
    assert chunk_keys(pipeline) == wanted(pipeline)
    assert (first.skipped, first.kv_left_for_first_use, first.kv_removed) == ((), 0, 0)
    assert first.kv_tokens_per_second > 0
    assert set(seen) == set(first.seconds) == {"documents", "embed", "kv"}
    assert seen["kv"][-1] == (first.kv_tokens, first.kv_tokens)
    again = run(pipeline, corpus)
    assert again.documents.unchanged == len(TOPICS)
    assert (again.documents.new_chunks, again.kv_computed, again.kv_tokens_per_second) == (0, 0, None)


def test_chunk_kv_of_an_ingest_is_the_one_of_a_question(pipeline, corpus):
    run(pipeline, corpus)
    pipeline.library.counts.computed = 0
    pipeline.ask("What is a decorator?", options=SHORT)
    assert pipeline.library.counts.computed == 0
    assert pipeline.library.counts.hits > 0


def test_changed_and_removed_documents(pipeline, corpus):
    run(pipeline, corpus)
    before = chunk_keys(pipeline)
    (corpus / "lambda.txt").write_text("Lambda is something else now.")
    (corpus / "with.txt").unlink()
    kept = run(pipeline, corpus)
    assert (kept.documents.changed, kept.documents.removed) == (1, 0)
    assert kept.kv_removed > 0
    assert chunk_keys(pipeline) == wanted(pipeline)
    assert "corpus/with.txt" in pipeline.collection.document_ids()
    pruned = run(pipeline, corpus, prune=True)
    assert (pruned.documents.unchanged, pruned.documents.removed) == (len(TOPICS) - 1, 1)
    assert "corpus/with.txt" not in pipeline.collection.document_ids()
    assert chunk_keys(pipeline) == wanted(pipeline)
    assert kept.kv_removed + pruned.kv_removed == len(before - chunk_keys(pipeline))
    assert pipeline.store.stat().tiers[1].chunks == len(chunk_keys(pipeline)) + 1


def test_a_chunk_that_another_document_has_keeps_its_kv(pipeline, corpus):
    shutil.copy(corpus / "with.txt", corpus / "copy.txt")
    run(pipeline, corpus)
    (corpus / "copy.txt").unlink()
    report = run(pipeline, corpus, prune=True)
    assert (report.documents.removed, report.kv_removed) == (1, 0)
    assert chunk_keys(pipeline) == wanted(pipeline)


def test_kv_of_all_recipes_goes(tmp_path, llama, corpus):
    for recipe in ("system", "bos"):
        with open_pipeline(tmp_path / "store", llama, recipe=recipe) as pipeline:
            run(pipeline, corpus)
    (corpus / "with.txt").unlink()
    with open_pipeline(tmp_path / "store", llama, recipe="system") as pipeline:
        run(pipeline, corpus, prune=True)
        left = {row.key for row in pipeline.store.ls() if row.recipe.kind == "bos"}
        recipe = next(row.recipe for row in pipeline.store.ls() if row.recipe.kind == "bos")
        chunks = pipeline.collection.chunks()
        assert left == {chunk_key(llama.fingerprint, recipe, chunk.token_ids) for chunk in chunks}


def test_prune_keeps_to_its_sources(pipeline, corpus, tmp_path):
    more = write_corpus(tmp_path / "corpus-two", ["with", "scope"])
    single = tmp_path / "single.txt"
    single.write_text("One file.")
    pipeline.ingest([corpus, more, single], chunk_tokens=48)
    (more / "with.txt").unlink()
    (corpus / "lambda.txt").unlink()
    report = pipeline.ingest([more], chunk_tokens=48, prune=True)
    assert report.documents.removed == 1
    assert "corpus/lambda.txt" in pipeline.collection.document_ids()
    assert "single.txt" in pipeline.collection.document_ids()
    assert pipeline.ingest([corpus, single], chunk_tokens=48, prune=True).documents.removed == 1


def test_prune_spares_documents_that_cannot_be_read_today(pipeline, corpus, caplog):
    run(pipeline, corpus)
    (corpus / "with.txt").write_bytes(b"\x00\xff\x00binary")
    (corpus / "lambda.txt").unlink()
    report = run(pipeline, corpus, prune=True)
    assert len(report.skipped) == 1
    assert report.documents.removed == 0
    assert {"corpus/with.txt", "corpus/lambda.txt"} <= set(pipeline.collection.document_ids())
    assert "nothing was pruned, because 1 documents could not be read" in caplog.text
    write_corpus(corpus, ["with"])
    assert run(pipeline, corpus, prune=True).documents.removed == 1


def test_skipped_documents_are_named(pipeline, corpus):
    (corpus / "empty.txt").write_text("")
    report = run(pipeline, corpus)
    assert report.documents.added == len(TOPICS)
    assert len(report.skipped) == 1
    assert "empty.txt" in report.skipped[0]


@pytest.mark.parametrize(("precompute", "limit"), [("lazy", None), ("lazy", 100_000), ("all", 100_000), ("all", 0)])
def test_limits(pipeline, corpus, precompute, limit):
    report = run(pipeline, corpus, precompute=precompute, precompute_bytes=limit)
    held = sum(row.nbytes for row in pipeline.store.ls() if row.key in chunk_keys(pipeline))
    assert held <= (limit or 0)
    assert held == report.kv_tokens * pipeline.engine.kv_bytes_per_token
    assert report.kv_computed + report.kv_left_for_first_use == len(wanted(pipeline))
    assert bool(report.kv_computed) == bool(limit)
    again = run(pipeline, corpus, precompute=precompute, precompute_bytes=limit)
    assert (again.kv_computed, again.kv_left_for_first_use) == (0, report.kv_left_for_first_use)
    assert pipeline.ask("What is a decorator?", options=SHORT).text  # the rest at first use
    run(pipeline, corpus, precompute="all")
    assert chunk_keys(pipeline) == wanted(pipeline)


def test_the_limit_of_the_store_is_kept(tmp_path, llama, corpus):
    """What a store may not hold is not computed in vain."""
    with open_pipeline(tmp_path / "store", llama, disk=250_000) as pipeline:
        report = run(pipeline, corpus)
        assert 0 < report.kv_computed < len(wanted(pipeline))
        assert report.kv_computed + report.kv_left_for_first_use == len(wanted(pipeline))
        assert pipeline.store.stat().tiers[1].bytes <= 250_000
        assert run(pipeline, corpus).kv_computed <= 2  # the heads of files and the system prefix take room as well


def test_unsupported_model_has_no_kv(tmp_path, gpt2, corpus):
    with open_pipeline(tmp_path / "store", gpt2) as pipeline:
        report = run(pipeline, corpus)
        assert report.kv_computed == 0
        assert pipeline.store.ls() == []
        assert pipeline.ask("What is a decorator?", options=SHORT).sources


def test_wrong_arguments(pipeline, corpus):
    with pytest.raises(InputError, match="unknown precompute 'some'; allowed: all, lazy"):
        run(pipeline, corpus, precompute="some")
    with pytest.raises(InputError):
        run(pipeline, corpus, chunk_tokens=0)


@pytest.fixture
def small_disk(monkeypatch):
    """Lets ``room`` chunk files be written, then the disk is full."""
    from blendkv.store import disk

    own, left = disk.write_all, [0]

    def write_all(fd, data):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        own(fd, data)

    def set_room(room):
        left[0] = room

    monkeypatch.setattr(disk, "write_all", write_all)
    return set_room


def test_a_full_disk(tmp_path, llama, corpus, small_disk, monkeypatch):
    """It stops at once, with one error; what was stored answers questions, and the next run continues."""
    monkeypatch.setattr("blendkv.library.PASS_TOKENS", 1)
    computed = []
    with open_pipeline(tmp_path / "store", llama) as pipeline:
        own = pipeline.engine.collect

        def collect(*arguments):
            while pipeline.store.stat().pending_bytes:
                time.sleep(0.001)
            computed.append(len(arguments[1]))
            return own(*arguments)

        monkeypatch.setattr(pipeline.engine, "collect", collect)
        small_disk(3)
        with pytest.raises(StoreFullError) as caught:
            run(pipeline, corpus)
        assert "no space" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(computed) <= 6
        print(len(pipeline.store.ls()), computed, caught.value)
    monkeypatch.undo()
    with open_pipeline(tmp_path / "store", llama) as pipeline:
        assert pipeline.store.verify().damaged == ()
        assert pipeline.documents == len(TOPICS)
        assert pipeline.ask("What is a decorator?", options=SHORT).text
        run(pipeline, corpus)
        assert chunk_keys(pipeline) == wanted(pipeline)


class Server:
    """`ingest_server.py` as a process."""

    def __init__(self, model: Path) -> None:
        here = Path(__file__).parent
        path = os.pathsep.join([str(here.parent / "support"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, str(here / "ingest_server.py"), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip
        assert self.answer() == "ready"

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def ingest(self, store: Path, corpus: Path, kill_after: float | None = None) -> int:
        """The exit code; minus the signal's number for a killed run."""
        task = {"store": str(store), "corpus": str(corpus), "kill_after": kill_after}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return int(self.answer())


@pytest.fixture
def server(llama_folder):
    made = Server(llama_folder)
    yield made
    made.process.stdin.close()
    made.process.wait(20)
    made.process.stdout.close()


def contents(store, engine):
    """All that an ingest leaves: documents, chunks, embeddings, and chunk KVs."""
    with open_pipeline(store, engine, memory=0) as pipeline:
        collection = pipeline.collection
        assert pipeline.store.verify().damaged == ()
        assert chunk_keys(pipeline) == wanted(pipeline)
        chunks = {c.id: (c.text, c.token_ids.tobytes()) for c in collection.chunks()}
        texts = dict(collection.texts())
        vectors = {
            texts[row]: v for rows, vs in collection.embeddings() for row, v in zip(rows.tolist(), vs, strict=True)
        }
        kv = {}
        for chunk in collection.chunks():
            reader = pipeline.store.get(pipeline.library.key(chunk.token_ids), chunk.token_ids)
            kv[chunk.token_ids.tobytes()] = torch.cat(
                [torch.cat(reader.layer(i)).flatten() for i in range(reader.layers)]
            )
        return chunks, vectors, kv


def test_killed_at_random_moments(tmp_path, llama, server):
    """An update of a store, killed again and again and then run to its end, leaves what an undisturbed one leaves."""
    seed = seed_of_run()
    print(f"seed {seed}")
    rng = random.Random(seed)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(24):
        (corpus / f"{number}.txt").write_text(f"{number}: {list(TOPICS.values())[number % 6]} Version one. " * 2)
    assert server.ingest(tmp_path / "base", corpus) == 0
    for number in range(0, 24, 2):
        (corpus / f"{number}.txt").write_text(f"{number}: {list(TOPICS.values())[number % 5]} Version two. " * 3)
    for number in range(1, 24, 6):
        (corpus / f"{number}.txt").unlink()
    shutil.copytree(tmp_path / "base", tmp_path / "calm")
    began = time.perf_counter()
    assert server.ingest(tmp_path / "calm", corpus) == 0
    whole = time.perf_counter() - began
    expected = contents(tmp_path / "calm", llama)
    killed, round_ = 0, 0
    while killed < 9:
        store = tmp_path / f"store{round_}"
        shutil.copytree(tmp_path / "base", store)
        for _ in range(4):
            code = server.ingest(store, corpus, kill_after=rng.uniform(0, whole))
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
        assert server.ingest(store, corpus) == 0
        found = contents(store, llama)
        assert found[0] == expected[0]
        for mine, calm in zip(found[1:], expected[1:], strict=True):
            assert mine.keys() == calm.keys()
            assert all(np.allclose(mine[key], calm[key], atol=1e-4) for key in mine)
        round_ += 1
        assert round_ < 20


def test_the_log_is_quiet(pipeline, corpus, caplog):
    with caplog.at_level(logging.WARNING):
        run(pipeline, corpus)
        pipeline.ask("What is a decorator?", options=SHORT)
    assert not caplog.records
