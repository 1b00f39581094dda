from __future__ import annotations

import json
import sqlite3
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import DocumentError, InputError, StoreError, StoreFullError, StoreMismatchError
from blendkv.retrieval import Collection, Splitter, SyncReport
from blendkv.retrieval.collection import Counts
from blendkv.types import Chunk, Document, as_token_ids

LONG = " ".join(f"Sentence {i} of a long text." for i in range(40))


class CountingSplitter:
    """Counts the documents that are split."""

    def __init__(self, inner):
        self.inner = inner
        self.settings = inner.settings
        self.split_ids: list[str] = []

    def split(self, document):
        self.split_ids.append(document.id)
        return self.inner.split(document)


def test_sync_adds_changes_and_keeps(collection, splitter):
    counting = CountingSplitter(splitter)
    documents = [Document("s/a", LONG, {"title": "A"}), Document("s/b", "short", {"title": "B"})]
    report = collection.sync(documents, counting)
    chunks = splitter.split(documents[0])
    assert report == SyncReport(added=2, new_chunks=len(chunks) + 1)
    assert counting.split_ids == ["s/a", "s/b"]

    generation = collection.generation
    assert collection.sync(documents, counting) == SyncReport(unchanged=2)
    assert counting.split_ids == ["s/a", "s/b"]  # nothing was tokenised again
    assert collection.generation == generation

    changed = [documents[0], Document("s/b", "another text", {"title": "B"})]
    assert collection.sync(changed, counting) == SyncReport(changed=1, unchanged=1, new_chunks=1)
    assert collection.chunk("s/b#0").text == "another text\n\n"
    assert collection.generation > generation


def test_chunks_come_back_as_they_were(collection, splitter):
    document = Document("d", LONG, {"title": "T", "tags": ["x", "y"], "n": None})
    collection.sync([document], splitter)
    for stored, made in zip(collection.chunks(), splitter.split(document), strict=True):
        assert stored.token_ids.tolist() == made.token_ids.tolist()
        assert stored.token_ids.dtype == np.int32
        assert not stored.token_ids.flags.writeable
        assert (stored.id, stored.text, stored.start, stored.end) == (made.id, made.text, made.start, made.end)
        assert stored.metadata == document.metadata
        assert collection.chunk(made.id).text == made.text


def test_metadata_and_settings_are_part_of_a_document(collection, splitter, tokenizer, embedder):
    collection.sync([Document("d", LONG, {"title": "T"})], splitter)
    collection.embed_missing(embedder)
    counts = collection.counts()
    assert collection.sync([Document("d", LONG, {"title": "U"})], splitter).changed == 1
    assert collection.chunk("d#0").metadata == {"title": "U"}
    assert collection.counts() == counts  # equal chunk texts keep their embeddings
    assert collection.sync([Document("d", LONG, {"title": "U"})], Splitter(tokenizer, 64)).changed == 1
    assert collection.counts().chunks < counts.chunks
    assert collection.get_meta("splitter")["target_tokens"] == 64


def test_an_edited_document_embeds_its_new_chunks_only(collection, splitter, embedder):
    paragraphs = [
        f"Paragraph {i} speaks of foxes and of dogs, at length, and of {i} other things.\n\n" for i in range(8)
    ]
    collection.sync([Document("d", "".join(paragraphs))], splitter)
    first = collection.embed_missing(embedder)
    collection.sync([Document("d", "".join([*paragraphs, "A new end."]))], splitter)
    second = collection.embed_missing(embedder)
    assert 0 < second < first
    rows, vectors = next(collection.embeddings())
    texts = [text for _, text in collection.texts()]
    np.testing.assert_array_equal(vectors, embedder.encode(texts))
    assert (np.diff(rows) > 0).all()


def test_another_tokenizer_is_refused(collection, splitter, tokenizers):
    other = Splitter(tokenizers["word_piece"], target_tokens=32)
    collection.sync([], other)  # an empty collection has no token ids yet
    collection.sync([Document("d", "text")], splitter)
    with pytest.raises(StoreMismatchError, match=r"carry token ids of tokenizer .* or another store folder"):
        collection.sync([Document("e", "text")], other)
    assert collection.document_ids() == ["d"]


def test_prune(collection, splitter):
    names = ["docs", "docs/a", "docs/b", "docs.old/a", "rows.jsonl:1", "rows.jsonl:2"]
    collection.sync([Document(name, name) for name in names], splitter)
    assert collection.sync([Document("docs/a", "docs/a")], splitter).removed == 0
    assert len(collection.document_ids()) == 6
    report = collection.sync([Document("docs/a", "docs/a")], splitter, prune=True, sources=["docs", "nowhere"])
    assert (report.removed, report.unchanged) == (2, 1)
    assert collection.document_ids() == ["docs.old/a", "docs/a", "rows.jsonl:1", "rows.jsonl:2"]
    assert collection.sync([], splitter, prune=True, sources=["rows.jsonl"]).removed == 2
    assert collection.sync([], splitter, prune=True).removed == 2
    assert collection.counts() == Counts(0, 0, 0, 0)


def test_remove_document(collection, splitter):
    collection.sync([Document("a", LONG), Document("b", "b")], splitter)
    collection.remove_document("a")
    assert [chunk.document_id for chunk in collection.chunks()] == ["b"]
    assert list(collection.chunks("a")) == []
    with pytest.raises(InputError, match="no document 'a'"):
        collection.remove_document("a")


def test_counts(collection, splitter, embedder):
    documents = [Document("a", LONG), Document("b", "b")]
    collection.sync(documents, splitter)
    chunks = [chunk for document in documents for chunk in splitter.split(document)]
    tokens = sum(chunk.token_ids.size for chunk in chunks)
    assert collection.counts() == Counts(2, len(chunks), tokens, 0)
    collection.embed_missing(embedder)
    assert collection.counts().embedded == len(chunks)


def test_progress(collection, splitter, embedder):
    seen = []
    collection.sync([Document("a", "a"), Document("b", "b")], splitter, progress=lambda *at: seen.append(at))
    collection.sync(iter([Document("a", "a")]), splitter, progress=lambda *at: seen.append(at))
    collection.embed_missing(embedder, batch_size=1, progress=lambda *at: seen.append(at))
    assert seen == [(1, 2), (2, 2), (1, None), (1, 2), (2, 2)]


def test_wrong_documents_keep_what_came_before(collection, splitter):
    with pytest.raises(InputError, match="document id 'a' came twice"):
        collection.sync([Document("a", "a"), Document("b", "b"), Document("a", "c")], splitter)
    with pytest.raises(InputError, match="metadata of document 'c' is not JSON"):
        collection.sync([Document("c", "c", {"x": object()})], splitter)
    with pytest.raises(InputError, match="metadata of document 'c' is not JSON"):
        collection.sync([Document("c", "c", {"x": float("nan")})], splitter)
    with pytest.raises(DocumentError, match="c: no text"):
        collection.sync([Document("c", " ")], splitter)
    assert collection.document_ids() == ["a", "b"]
    assert [chunk.text for chunk in collection.chunks()] == ["a\n\n", "b\n\n"]


def test_a_failure_inside_a_document_changes_nothing(collection, splitter):
    """The old chunks are deleted before the new ones are refused."""
    collection.sync([Document("a", "old")], splitter)

    class Broken(CountingSplitter):
        def split(self, document):
            ids = as_token_ids([1])
            return [Chunk("a", 0, "new", ids, 0, 3), Chunk("a", 0, "new", ids, 0, 3)]  # one place twice

    generation = collection.generation
    with pytest.raises(StoreError, match="UNIQUE"):
        collection.sync([Document("a", "new")], Broken(splitter))
    assert [chunk.text for chunk in collection.chunks()] == ["old\n\n"]
    assert collection.generation == generation


def test_chunk_metadata_of_a_splitter_of_ones_own(collection, splitter):
    class Marked(CountingSplitter):
        def split(self, document):
            chunk = self.inner.split(document)[0]
            metadata = {**document.metadata, "title": "mine", "page": 3}
            return [Chunk(chunk.document_id, 0, chunk.text, chunk.token_ids, chunk.start, chunk.end, metadata)]

    collection.sync([Document("a", "a", {"title": "T", "year": 1})], Marked(splitter))
    assert collection.chunk("a#0").metadata == {"title": "mine", "page": 3, "year": 1}
    assert len(collection.rows_where({"title": "mine", "year": 1})) == 1
    assert len(collection.rows_where({"title": "T"})) == 0


@pytest.mark.parametrize("wrong", ["a#1", "a", "a#x", "b#0", "#", "a#²"])
def test_no_such_chunk(collection, splitter, wrong):
    collection.sync([Document("a", "a")], splitter)
    with pytest.raises(InputError, match="no chunk"):
        collection.chunk(wrong)


def test_chunks_by_row(collection, splitter):
    collection.sync([Document("a", "a"), Document("b", "b")], splitter)
    rows = [row for row, _ in collection.texts()]
    assert {row: chunk.id for row, chunk in collection.chunks_by_row([rows[1], 99, rows[0]]).items()} == {
        rows[0]: "a#0",
        rows[1]: "b#0",
    }
    assert collection.chunks_by_row([]) == {}


def test_row_numbers_are_never_given_twice(collection, splitter):
    collection.sync([Document("a", "a")], splitter)
    ((before, _),) = collection.texts()
    collection.remove_document("a")
    collection.sync([Document("a", "a")], splitter)
    ((after, _),) = collection.texts()
    assert after > before


def test_pages(collection, splitter, monkeypatch):
    monkeypatch.setattr("blendkv.retrieval.collection._PAGE", 3)
    documents = [Document(f"{i:02}", f"text {i}") for i in range(10)]
    collection.sync(documents, splitter)
    assert [chunk.document_id for chunk in collection.chunks()] == [d.id for d in documents]
    assert [text for _, text in collection.texts()] == [f"{d.text}\n\n" for d in documents]


FILTERED = [
    ({"title": "x"}, ["a", "c"]),
    ({"title": ["x", "y"]}, ["a", "b", "c"]),
    ({"title": "x", "year": 2024}, ["a"]),
    ({"year": 2024.0}, ["a", "b"]),
    ({"year": "2024"}, []),
    ({"open": True}, ["a"]),
    ({"open": None}, ["b", "c", "d"]),
    ({"title": ("y", None)}, ["b", "d"]),
    ({"title": []}, []),
    ({"missing": "x"}, []),
    ({"odd key.[0]": "v"}, ["d"]),
    ({"title": "x' OR 1=1 --"}, []),
]


@pytest.mark.parametrize(("where", "expected"), FILTERED)
def test_filters(collection, splitter, where, expected):
    metadata = {
        "a": {"title": "x", "year": 2024, "open": True},
        "b": {"title": "y", "year": 2024},
        "c": {"title": "x", "year": 2025},
        "d": {"odd key.[0]": "v"},
    }
    collection.sync([Document(name, name, fields) for name, fields in metadata.items()], splitter)
    rows = collection.rows_where(where).tolist()
    assert sorted(chunk.document_id for chunk in collection.chunks_by_row(rows).values()) == expected
    assert rows == sorted(rows)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"title": {"a": 1}}, "filter 'title' is dict"),
        ({"title": [["nested"]]}, "filter 'title' is list"),
        ({'ti"tle': "x"}, "a string without double quotes"),
        ({3: "x"}, "filter field 3"),
    ],
)
def test_wrong_filters(collection, where, message):
    with pytest.raises(InputError, match=message):
        collection.rows_where(where)


def test_embedders(collection, splitter, make_embedder):
    collection.sync([Document("a", "a"), Document("b", "b")], splitter)
    embedder = make_embedder()
    assert collection.embed_missing(embedder, batch_size=1) == 2
    assert embedder.calls == [1, 1]
    generation = collection.generation
    assert collection.embed_missing(embedder) == 0
    assert collection.generation == generation
    assert collection.get_meta("embedder") == {"name": "bag", "dim": 24}

    other = make_embedder("other")
    with pytest.raises(InputError, match="embedded with 'bag', the embedder given is 'other'"):
        collection.embed_missing(other)
    collection.clear_embeddings()
    assert collection.counts().embedded == 0
    assert collection.embed_missing(other) == 2


def test_what_an_embedder_returns_is_checked(collection, splitter, make_embedder):
    collection.sync([Document("a", "a")], splitter)
    wrong = make_embedder()
    for vectors in (np.zeros((1, 25), np.float32), np.zeros((2, 24), np.float32), np.full((1, 24), np.nan, np.float32)):
        wrong.encode = lambda texts, kind="document", vectors=vectors: vectors
        with pytest.raises(InputError, match="embedder 'bag' returned shape"):
            collection.embed_missing(wrong)
    assert collection.counts().embedded == 0
    good = make_embedder()
    collection.embed_missing(good)
    collection.sync([Document("b", "b")], splitter)
    with pytest.raises(InputError, match="returned shape"):
        collection.embed_missing(make_embedder(dim=25))  # one name, another dimension


def test_a_document_that_changes_while_it_is_embedded(collection, splitter, make_embedder):
    collection.sync([Document("a", "old"), Document("b", "b")], splitter)
    embedder = make_embedder()
    encode = embedder.encode

    def encode_slowly(texts, kind="document"):
        if "old\n\n" in texts:
            collection.sync([Document("a", "new")], splitter)
        return encode(texts)

    embedder.encode = encode_slowly
    collection.embed_missing(embedder)
    assert collection.counts().embedded == 2
    rows, vectors = next(collection.embeddings())
    assert rows.tolist() == [row for row, _ in collection.texts()]
    np.testing.assert_array_equal(vectors, encode([text for _, text in collection.texts()]))


def test_meta(collection):
    assert collection.get_meta("model") is None
    assert collection.get_meta("model", "none") == "none"
    collection.set_meta("model", {"name": "tiny", "layers": [1, 2]})
    collection.set_meta("model", {"name": "tiny", "layers": [3]})
    assert collection.get_meta("model") == {"name": "tiny", "layers": [3]}
    with pytest.raises(InputError, match="meta key 'generation' is the collection's own"):
        collection.set_meta("generation", 3)
    with pytest.raises(InputError, match="meta key 'x' is not JSON"):
        collection.set_meta("x", {1, 2})


def test_it_is_there_again_after_a_restart(tmp_path, splitter):
    with Collection(tmp_path) as first:
        first.sync([Document("a", "a")], splitter)
        first.set_meta("model", "m")
        tag = first.tag
    with Collection(str(tmp_path)) as second:
        assert second.tag == tag
        assert second.get_meta("model") == "m"
        assert second.chunk("a#0").text == "a\n\n"
        assert second.sync([Document("a", "a")], splitter) == SyncReport(unchanged=1)


def test_a_store_made_again_has_another_tag(tmp_path):
    with Collection(tmp_path / "a") as first, Collection(tmp_path / "b") as second:
        assert first.generation == second.generation
        assert first.tag != second.tag


def test_a_newer_format_is_refused(tmp_path):
    Collection(tmp_path).close()
    with sqlite3.connect(tmp_path / "collection.sqlite") as raw:
        raw.execute("UPDATE meta SET value = '2' WHERE key = 'format'")
    raw.close()
    with pytest.raises(StoreMismatchError, match="format 2; this version reads up to 1: upgrade blendkv"):
        Collection(tmp_path)


def test_files_that_are_no_collection(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not a folder"):
        Collection(tmp_path / "file")
    with pytest.raises(StoreError, match="check the path"):
        Collection(tmp_path / "file" / "below")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "collection.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="file is not a database; if it is damaged, remove it"):
        Collection(tmp_path / "damaged")
    (tmp_path / "other").mkdir()
    with sqlite3.connect(tmp_path / "other" / "collection.sqlite") as raw:
        raw.execute("CREATE TABLE theirs (x)")
    raw.close()
    with pytest.raises(StoreMismatchError, match="not made by BlendKV"):
        Collection(tmp_path / "other")


def test_a_full_disk_and_a_closed_file(collection, splitter):
    collection._db.rows("PRAGMA max_page_count = 20")
    with pytest.raises(StoreFullError, match="the disk is full; free some room"):
        collection.sync([Document("a", LONG * 100)], splitter)
    assert collection.document_ids() == []
    collection.close()
    with pytest.raises(StoreError, match="closed"):
        collection.document_ids()


def test_threads_share_a_collection(collection, splitter):
    failures = []

    def work(name):
        try:
            collection.sync([Document(f"{name}/{i}", f"{name} {i}") for i in range(10)], splitter)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert collection.counts().documents == 40
    assert collection.generation == 40


def test_two_connections_write_in_turn(tmp_path, splitter):
    with Collection(tmp_path) as one, Collection(tmp_path) as two:
        one.sync([Document("a", "a")], splitter)
        two.sync([Document("a", "b"), Document("c", "c")], splitter)
        assert one.document_ids() == ["a", "c"]
        assert one.chunk("a#0").text == "b\n\n"
        assert one.generation == 3


edits = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["x", "y z", LONG]), max_size=4),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=30, deadline=None)
@given(script=edits)
def test_sync_against_a_dictionary(tmp_path_factory, tokenizer, script):
    splitter = Splitter(tokenizer, target_tokens=32)
    model: dict[str, str] = {}
    with Collection(tmp_path_factory.mktemp("model")) as collection:
        for given_, prune in script:
            wanted = SyncReport(
                added=len(given_.keys() - model.keys()),
                changed=sum(key in model and model[key] != text for key, text in given_.items()),
                unchanged=sum(model.get(key) == text for key, text in given_.items()),
                removed=len(model.keys() - given_.keys()) if prune else 0,
                new_chunks=sum(len(splitter.split(Document(k, t))) for k, t in given_.items() if model.get(k) != t),
            )
            before = collection.generation
            report = collection.sync([Document(*item) for item in given_.items()], splitter, prune=prune)
            assert report == wanted
            assert collection.generation - before == wanted.added + wanted.changed + wanted.removed
            model = dict(given_) if prune else model | given_
            assert collection.document_ids() == sorted(model)
            for key, text in model.items():
                assert "".join(chunk.text for chunk in collection.chunks(key)) == text + "\n\n"


def test_metadata_is_kept_as_json(tmp_path, splitter):
    """What a reader of the file may rely on."""
    with Collection(tmp_path) as collection:
        collection.sync([Document("a", "a", {"z": 1, "é": "ü"})], splitter)
    with sqlite3.connect(tmp_path / "collection.sqlite") as raw:
        (stored,) = raw.execute("SELECT metadata FROM documents").fetchone()
    raw.close()
    assert json.loads(stored) == {"z": 1, "é": "ü"}
