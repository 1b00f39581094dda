from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import faiss
import pytest

from blendkv.errors import InputError
from blendkv.retrieval import Collection, HybridRetriever, Retriever
from blendkv.types import Document

TEXTS = {
    "fox": "the quick brown fox jumps over the lazy dog",
    "cache": "caches keep keys and values of tokens",
    "bread": "bread is baked from flour and water",
    "dog": "a dog sleeps in the sun",
}


def view(found):
    """What two equal answers have in common."""
    return [(item.chunk.id, item.chunk.text, item.score, item.ranks) for item in found]


@pytest.fixture
def filled(collection, splitter, embedder):
    collection.sync([Document(key, text, {"title": key, "n": len(key)}) for key, text in TEXTS.items()], splitter)
    collection.embed_missing(embedder)
    return collection


@pytest.mark.parametrize("mode", ["hybrid", "dense", "lexical"])
def test_each_mode_finds_the_right_chunk(filled, embedder, mode):
    retriever: Retriever = HybridRetriever(filled, embedder, mode)
    for question, wanted in [("flour and water", "bread"), ("keys of caches", "cache")]:
        found = retriever.retrieve(question, 2)
        assert found[0].chunk.document_id == wanted
        assert found[0].chunk.token_ids.tolist() == filled.chunk(f"{wanted}#0").token_ids.tolist()
        assert [item.score for item in found] == sorted((item.score for item in found), reverse=True)
        assert view(found) == view(retriever.retrieve(question, 2))
        assert found[0].ranks == {leg: 1 for leg in ("dense", "lexical") if mode in ("hybrid", leg)}


def test_hybrid_is_the_fusion_of_its_legs(filled, embedder):
    question = "the lazy dog keeps bread"
    legs = {m: HybridRetriever(filled, embedder, m).retrieve(question, 10) for m in ("dense", "lexical")}
    ranks = {m: {item.chunk.id: i for i, item in enumerate(found, start=1)} for m, found in legs.items()}
    for item in HybridRetriever(filled, embedder).retrieve(question, 10):
        assert item.ranks == {m: at[item.chunk.id] for m, at in ranks.items() if item.chunk.id in at}
        assert item.score == pytest.approx(sum(1 / (60 + rank) for rank in item.ranks.values()))


@pytest.mark.parametrize("mode", ["hybrid", "dense", "lexical"])
def test_filters(filled, embedder, mode):
    retriever = HybridRetriever(filled, embedder, mode)
    assert [i.chunk.document_id for i in retriever.retrieve("the dog", 4, {"title": "fox"})] == ["fox"]
    titles = {i.chunk.metadata["title"] for i in retriever.retrieve("the dog", 4, {"n": 3})}
    assert titles == {"fox", "dog"}
    assert retriever.retrieve("the dog", 4, {"title": "none"}) == []
    with pytest.raises(InputError, match="filter 'title' is dict"):
        retriever.retrieve("the dog", 4, {"title": {}})


def test_a_graph_finds_the_same(filled, embedder):
    exact = HybridRetriever(filled, embedder, "dense")
    graph = HybridRetriever(filled, embedder, "dense", hnsw_from=1)
    assert [item.chunk.id for item in graph.retrieve("lazy fox", 4)] == [
        item.chunk.id for item in exact.retrieve("lazy fox", 4)
    ]
    assert isinstance(graph._dense._index, faiss.IndexHNSW)


def test_wrong_questions(filled, embedder):
    retriever = HybridRetriever(filled, embedder)
    with pytest.raises(InputError, match="the query is empty"):
        retriever.retrieve(" \n", 3)
    with pytest.raises(InputError, match="k is 0; at least 1 is allowed"):
        retriever.retrieve("x", 0)
    with pytest.raises(InputError, match="retrieval mode 'fuzzy'; allowed: hybrid, dense, lexical"):
        HybridRetriever(filled, embedder, "fuzzy")


def test_another_embedder_is_refused_unless_it_is_not_used(filled, make_embedder):
    with pytest.raises(InputError, match="embedded with 'bag'"):
        HybridRetriever(filled, make_embedder("other"))
    assert HybridRetriever(filled, make_embedder("other"), "lexical").retrieve("fox", 1)


@pytest.mark.parametrize("mode", ["hybrid", "dense", "lexical"])
def test_an_empty_collection(collection, embedder, mode):
    assert HybridRetriever(collection, embedder, mode).retrieve("anything", 3) == []
    assert embedder.calls == []


def test_a_collection_that_is_not_embedded(collection, splitter, embedder):
    collection.sync([Document("a", "a fox")], splitter)
    with pytest.raises(InputError, match=r"no chunk is embedded yet; call Collection.embed_missing, or use mode 'lex"):
        HybridRetriever(collection, embedder).retrieve("fox", 1)
    assert HybridRetriever(collection, embedder, "lexical").retrieve("fox", 1)


def test_changes_are_seen_at_the_next_question(filled, splitter, embedder):
    retriever = HybridRetriever(filled, embedder)
    assert retriever.retrieve("zebra stripes", 1)[0].chunk.document_id != "zebra"
    with Collection(filled.path) as other:
        other.sync([Document("zebra", "zebra stripes are black and white")], splitter)
        other.embed_missing(embedder)
    assert retriever.retrieve("zebra stripes", 1)[0].chunk.document_id == "zebra"
    filled.remove_document("zebra")
    assert all(item.chunk.document_id != "zebra" for item in retriever.retrieve("zebra stripes", 10))


def test_a_chunk_that_goes_during_a_question_is_left_out(filled, embedder, monkeypatch):
    retriever = HybridRetriever(filled, embedder)
    fetch = Collection.chunks_by_row

    def late(self, rows):
        self.remove_document("fox")
        return fetch(self, rows)

    monkeypatch.setattr(Collection, "chunks_by_row", late)
    found = retriever.retrieve("brown fox", 4)
    assert sorted(item.chunk.document_id for item in found) == ["bread", "cache", "dog"]


@pytest.mark.asyncio
async def test_without_blocking(filled, embedder):
    retriever = HybridRetriever(filled, embedder)
    assert view(await retriever.aretrieve("flour", 2)) == view(retriever.retrieve("flour", 2))


def test_threads_share_a_retriever(filled, embedder):
    retriever = HybridRetriever(filled, embedder)
    wanted = {text: view(retriever.retrieve(text, 3)) for text in TEXTS.values()}
    with ThreadPoolExecutor(4) as pool:
        asked = list(TEXTS.values()) * 5
        assert list(pool.map(lambda text: view(retriever.retrieve(text, 3)), asked)) == [wanted[text] for text in asked]
