"""``kill -9`` in the middle: the next run finds whole documents only, and continues."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from blendkv.retrieval import Collection, SyncReport
from blendkv.types import Chunk, Document, as_token_ids

CHILD = textwrap.dedent(
    """
    import os, signal, sys
    import numpy as np
    from blendkv.retrieval.collection import Collection
    from blendkv.types import Chunk, Document, as_token_ids

    folder, what, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
    collection = Collection(folder)
    left = [at]

    def count(statement):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    class Words:
        settings = {"tokenizer": "words"}
        def split(self, document):
            words = document.text.split()
            return [Chunk(document.id, i, w, as_token_ids([i, i]), i, i + 1) for i, w in enumerate(words)]

    class Ones:
        name, dim = "ones", 4
        def encode(self, texts, kind="document"):
            return np.full((len(texts), 4), 0.5, dtype=np.float32)

    collection._db._connection.set_trace_callback(count)
    if what == "sync":
        collection.sync([Document(str(i), " ".join([sys.argv[4]] * 6)) for i in range(5)], Words(), prune=True)
    else:
        collection.embed_missing(Ones(), batch_size=4)
    print("finished")
    """
)


class Words:
    settings = {"tokenizer": "words"}  # noqa: RUF012

    def split(self, document):
        return [Chunk(document.id, i, w, as_token_ids([i, i]), i, i + 1) for i, w in enumerate(document.text.split())]


def documents(word):
    return [Document(str(i), " ".join([word] * 6)) for i in range(5)]


def run_and_kill(folder, what, at, word="new"):
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), what, str(at), word], capture_output=True, text=True, check=False
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert "finished" not in child.stdout


@pytest.mark.parametrize("at", [13, 20, 33])
def test_sync_is_killed(tmp_path, at):
    with Collection(tmp_path) as collection:
        collection.sync([*documents("old"), Document("gone", "old")], Words())
    run_and_kill(tmp_path, "sync", at)
    with Collection(tmp_path) as collection:
        new = 0
        for document in documents("old"):
            words = [chunk.text for chunk in collection.chunks(document.id)]
            assert words in (["old"] * 6, ["new"] * 6)
            new += words[0] == "new"
        assert collection.generation == 6 + new
        report = collection.sync(documents("new"), Words(), prune=True)
        assert report == SyncReport(changed=5 - new, unchanged=new, removed=1, new_chunks=6 * (5 - new))
        assert [chunk.text for chunk in collection.chunks()] == ["new"] * 30


@pytest.mark.parametrize("at", [9, 25])
def test_embedding_is_killed(tmp_path, at, make_embedder):
    with Collection(tmp_path) as collection:
        collection.sync(documents("word"), Words())
    run_and_kill(tmp_path, "embed", at)
    with Collection(tmp_path) as collection:
        embedded = collection.counts().embedded
        assert embedded % 4 == 0
        assert embedded < 30
        assert collection.embed_missing(make_embedder("ones", 4), batch_size=4) == 30 - embedded
        assert collection.counts().embedded == 30
