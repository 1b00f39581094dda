"""Tiny tokenizers and an embedder without a model."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from blendkv.retrieval import Collection, Splitter

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. It was not amused!",
    "# A heading\n\nA paragraph about caches, keys and values.\n\n- an item\n- another item\n",
    "def function(argument):\n    return argument + 1\n\n",
    "日本語の文章です。次の文。 Émile naïve café \U0001f600 \U0001f469\u200d\U0001f680\n\n",
]


def byte_level(trim: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def sentence_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|end|>", "<unk>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<|end|>", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def tokenizers():
    """Fast tokenizers of the kinds in use, by name; only the first two keep every character."""
    made = {
        "byte_level": byte_level(trim=False),
        "byte_level_trimmed": byte_level(trim=True),
        "sentence_piece": sentence_piece(),
        "word_piece": word_piece(),
    }
    return {name: PreTrainedTokenizerFast(tokenizer_object=made[name], eos_token="<|end|>") for name in made}


@pytest.fixture(scope="session")
def tokenizer(tokenizers):
    return tokenizers["byte_level"]


@pytest.fixture
def splitter(tokenizer):
    return Splitter(tokenizer, target_tokens=32)


@pytest.fixture
def collection(tmp_path):
    with Collection(tmp_path / "store") as made:
        yield made


class BagEmbedder:
    """Every word has a fixed direction; a text is the mean of its words'."""

    def __init__(self, name: str = "bag", dim: int = 24) -> None:
        self.name = name
        self.dim = dim
        self.calls: list[int] = []

    def encode(self, texts, kind="document"):
        self.calls.append(len(texts))
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()) or ["nothing"]:
                seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest())
                vector += np.random.default_rng(seed).standard_normal(self.dim).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def make_embedder():
    return BagEmbedder


@pytest.fixture
def embedder():
    return BagEmbedder()
