from __future__ import annotations

import logging
import shutil

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import InputError, StoreError
from blendkv.retrieval import Collection, DenseIndex, LexicalIndex, reciprocal_rank_fusion
from blendkv.types import Chunk, Document, as_token_ids


class Whole:
    """One chunk per document."""

    settings = {"tokenizer": "whole"}  # noqa: RUF012

    def split(self, document):
        return [Chunk(document.id, 0, document.text, as_token_ids([1]), 0, len(document.text))]


class Given:
    """Vectors by text."""

    name = "given"

    def __init__(self, vectors):
        self.vectors = vectors
        self.dim = len(next(iter(vectors.values())))

    def encode(self, texts, kind="document"):
        return np.stack([self.vectors[text] for text in texts])


def filled(folder, count, dim=12, seed=3):
    print("seed", seed)
    vectors = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    collection = Collection(folder)
    collection.sync([Document(f"{i:05}", str(i)) for i in range(count)], Whole())
    collection.embed_missing(Given({str(i): vector for i, vector in enumerate(vectors)}))
    rows = np.array([row for row, _ in collection.texts()])
    return collection, vectors, rows


def indexes(collection):
    return sorted(path.name for path in (collection.path / "indexes").iterdir())


@pytest.mark.parametrize("hnsw_from", [10_000, 1])
def test_dense_against_brute_force(tmp_path, hnsw_from):
    collection, vectors, rows = filled(tmp_path, 400)
    index = DenseIndex(collection, hnsw_from=hnsw_from)
    assert isinstance(index._index, faiss.IndexHNSW) == (hnsw_from == 1)
    assert len(index) == 400
    found = 0
    for query in vectors[:20] + 0.1 * vectors[20:40]:
        scores = vectors @ query
        best = np.argsort(-scores)[:10]
        hits = index.search(query, 10)
        assert [score for _, score in hits] == sorted((score for _, score in hits), reverse=True)
        for row, score in hits:
            assert score == pytest.approx(float(scores[np.flatnonzero(rows == row)[0]]), abs=1e-5)
        found += len({row for row, _ in hits} & set(rows[best].tolist()))
        if hnsw_from > 1:
            assert [row for row, _ in hits] == rows[best].tolist()

        # Under a filter the search is exact whatever the index.
        allowed = np.sort(np.random.default_rng(found).choice(rows, 30, replace=False))
        places = np.flatnonzero(np.isin(rows, allowed))
        wanted = rows[places[np.argsort(-scores[places])][:10]].tolist()
        assert [row for row, _ in index.search(query, 10, np.append(allowed, 10**6))] == wanted
    assert found >= 195
    assert len(index.search(vectors[0], 1000)) == 400
    assert len(index.search(vectors[0], 1000, rows[:3])) == 3
    assert index.search(vectors[0], 5, np.array([], dtype=np.int64)) == []
    collection.close()


def test_dense_ties_go_by_row(tmp_path):
    with Collection(tmp_path) as collection:
        collection.sync([Document(name, name) for name in "cab"], Whole())
        vector = np.array([1, 0], dtype=np.float32)
        collection.embed_missing(Given({"a": vector, "b": vector, "c": vector}))
        hits = DenseIndex(collection).search(vector, 3)
        assert hits == [(row, 1.0) for row, _ in collection.texts()]


def test_an_index_is_saved_mapped_and_made_again_when_the_collection_changed(tmp_path, monkeypatch):
    collection, vectors, _rows = filled(tmp_path, 20)
    first = DenseIndex(collection)
    wanted = first.search(vectors[3], 5)
    with open("/proc/self/maps") as maps:
        assert f"dense50000-{collection.tag}/vectors.faiss" in maps.read()
    with monkeypatch.context() as patched:
        patched.setattr(DenseIndex, "_write", lambda *_: pytest.fail("made again"))
        assert DenseIndex(collection).search(vectors[3], 5) == wanted
    collection.remove_document("00003")
    second = DenseIndex(collection)
    assert second.tag == collection.tag != first.tag
    assert [row for row, _ in second.search(vectors[3], 4)] == [row for row, _ in wanted[1:]]
    assert indexes(collection) == [f"dense50000-{collection.tag}"]
    assert first.search(vectors[3], 5) == wanted  # its file is gone, its mapping is not
    collection.close()


def test_only_own_outdated_folders_are_removed(tmp_path):
    collection, _vectors, _ = filled(tmp_path, 3)
    identity = collection.tag.rpartition("-")[0]
    for name in ["dense50000-notes", f"dense50000-{identity}-999", "dense50000-abc123-1", "lexical-abc123-1"]:
        (tmp_path / "indexes" / name).mkdir(parents=True)
    DenseIndex(collection)
    assert indexes(collection) == sorted(
        ["dense50000-notes", f"dense50000-{identity}-999", f"dense50000-{collection.tag}", "lexical-abc123-1"]
    )
    collection.close()


def test_unfinished_folders_go_after_a_day(tmp_path, monkeypatch):
    collection, _, _ = filled(tmp_path, 3)
    (tmp_path / "indexes" / ".lexical-abc123-1.beef.tmp").mkdir(parents=True)
    LexicalIndex(collection)
    assert ".lexical-abc123-1.beef.tmp" in indexes(collection)
    collection.remove_document("00000")
    monkeypatch.setattr("blendkv.retrieval.artifacts._ABANDONED_SECONDS", -10)
    LexicalIndex(collection)
    assert indexes(collection) == [f"lexical-{collection.tag}"]
    collection.close()


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        (DenseIndex, "vectors.faiss"),
        (DenseIndex, "rows.npy"),
        (LexicalIndex, "rows.npy"),
        (LexicalIndex, "params.index.json"),
    ],
)
def test_a_damaged_index_is_made_again(tmp_path, caplog, kind, file):
    collection, vectors, _ = filled(tmp_path, 20)
    query = vectors[0] if kind is DenseIndex else "7"
    wanted = kind(collection).search(query, 3)
    assert wanted
    (path,) = (tmp_path / "indexes").glob(f"*/{file}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with caplog.at_level(logging.WARNING):
        assert kind(collection).search(query, 3) == wanted
    assert "it is written again" in caplog.text
    collection.close()


@pytest.mark.parametrize("kind", [DenseIndex, LexicalIndex])
def test_an_index_of_other_rows_is_made_again(tmp_path, kind):
    collection, _vectors, _ = filled(tmp_path, 20)
    kind(collection)
    (path,) = (tmp_path / "indexes").glob("*/rows.npy")
    np.save(path, np.arange(3))
    assert len(kind(collection)) == 20
    collection.close()


def test_two_processes_that_publish_at_once(tmp_path, monkeypatch):
    """The second one takes what the first one has published."""
    collection, _vectors, _ = filled(tmp_path, 5)
    write = DenseIndex._write

    def slowly(self, folder):
        write(self, folder)
        target = folder.with_name(f"dense50000-{collection.tag}")
        if not target.exists():
            shutil.copytree(folder, target)

    monkeypatch.setattr(DenseIndex, "_write", slowly)
    assert len(DenseIndex(collection)) == 5
    assert indexes(collection) == [f"dense50000-{collection.tag}"]
    collection.close()


def test_an_index_that_cannot_be_written(tmp_path, monkeypatch):
    collection, _, _ = filled(tmp_path, 5)
    (tmp_path / "indexes").write_text("in the way")
    with pytest.raises(StoreError, match=r"cannot be written .*; check the disk and its rights"):
        LexicalIndex(collection)
    (tmp_path / "indexes").unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.rename", full)
    with pytest.raises(StoreError, match="No space left on device"):
        LexicalIndex(collection)
    assert indexes(collection) == []
    collection.close()


def test_dense_without_or_with_some_embeddings(tmp_path, caplog):
    collection, vectors, rows = filled(tmp_path, 5)
    collection.sync([Document("new", "new")], Whole())
    with caplog.at_level(logging.WARNING):
        index = DenseIndex(collection)
    assert "1 of 6 chunks have no embedding" in caplog.text
    assert {row for row, _ in index.search(vectors[0], 10)} == set(rows.tolist())
    with pytest.raises(InputError, match=r"shape \(3,\); \(12,\) is allowed"):
        index.search(np.zeros(3, np.float32), 1)
    collection.clear_embeddings()
    empty = DenseIndex(collection)
    assert len(empty) == 0
    assert empty.search(vectors[0], 3) == []
    collection.close()


def lexical(folder, *texts):
    collection = Collection(folder)
    collection.sync([Document(f"{i:03}", text) for i, text in enumerate(texts)], Whole())
    return collection, LexicalIndex(collection), [row for row, _ in collection.texts()]


def bm25(texts, words, k1=1.5, b=0.75):
    """Lucene's BM25, from the formula."""
    docs = [text.lower().split() for text in texts]
    mean = np.mean([len(doc) for doc in docs])
    scores = np.zeros(len(docs))
    for word in words:
        n = sum(word in doc for doc in docs)
        idf = np.log(1 + (len(docs) - n + 0.5) / (n + 0.5))
        for i, doc in enumerate(docs):
            tf = doc.count(word)
            scores[i] += idf * tf / (tf + k1 * (1 - b + b * len(doc) / mean))
    return scores


def test_lexical_scores(tmp_path):
    texts = ["the cat sat on the mat", "a dog and a cat", "dogs bark", "the the the", "cat"]
    collection, index, rows = lexical(tmp_path, *texts)
    scores = bm25(texts, ["the", "cat"])
    hits = index.search("The CAT?", 10)
    order = np.argsort(-scores, kind="stable")[: (scores > 0).sum()]
    assert [row for row, _ in hits] == [rows[i] for i in order]
    np.testing.assert_allclose([score for _, score in hits], scores[order], rtol=1e-5)
    assert index.search("cat", 2) == index.search("cat", 10)[:2]
    only = index.search("cat", 10, np.array([rows[1], rows[2]]))
    assert [row for row, _ in only] == [rows[1]]
    collection.close()


def test_small_and_strange_corpora(tmp_path):
    collection, index, rows = lexical(tmp_path / "one", "one single document")
    assert [row for row, _ in index.search("single", 5)] == rows
    assert index.search("unknown words", 5) == []
    assert index.search("?!", 5) == []
    collection.close()
    collection, index, rows = lexical(tmp_path / "none", "...", "!!!")
    assert index.search("anything", 5) == []
    assert len(index) == 2
    assert LexicalIndex(collection).search("anything", 5) == []
    collection.close()
    collection, index, _ = lexical(tmp_path / "empty")
    assert len(index) == 0
    assert index.search("anything", 5) == []
    collection.close()


def test_languages_without_spaces(tmp_path):
    collection, index, rows = lexical(tmp_path, "東京は日本の首都です", "大阪の食べ物", "x1_y é a")
    assert [row for row, _ in index.search("首都", 5)] == [rows[0]]
    assert [row for row, _ in index.search("É", 5)] == [rows[2]]
    assert [row for row, _ in index.search("a", 5)] == [rows[2]]
    collection.close()


def test_lexical_ties_go_by_row(tmp_path):
    collection, index, rows = lexical(tmp_path, *["same words"] * 6)
    assert [row for row, _ in index.search("same", 4)] == rows[:4]
    collection.close()


def test_reciprocal_rank_fusion_by_hand():
    fused = reciprocal_rank_fusion({"dense": [10, 20, 30], "lexical": [30, 10, 40]})
    assert [item.row for item in fused] == [10, 30, 20, 40]
    assert [item.score for item in fused] == pytest.approx([1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62, 1 / 63])
    assert fused[0].ranks == {"dense": 1, "lexical": 2}
    assert fused[3].ranks == {"lexical": 3}
    assert [item.row for item in reciprocal_rank_fusion({"a": [1, 2], "b": [2, 1]}, k=1)] == [1, 2]
    assert [item.row for item in reciprocal_rank_fusion({"b": [2, 1], "a": [1, 2]})] == [2, 1]
    assert reciprocal_rank_fusion({"a": [], "b": []}) == []


@settings(max_examples=50, deadline=None)
@given(lists=st.lists(st.lists(st.integers(0, 20), unique=True), min_size=1, max_size=3))
def test_reciprocal_rank_fusion(lists):
    fused = reciprocal_rank_fusion({str(i): rows for i, rows in enumerate(lists)})
    assert {item.row for item in fused} == {row for rows in lists for row in rows}
    assert len({item.row for item in fused}) == len(fused)
    for item in fused:
        assert item.score == pytest.approx(sum(1 / (61 + rows.index(item.row)) for rows in lists if item.row in rows))
    assert [item.score for item in fused] == sorted((item.score for item in fused), reverse=True)
