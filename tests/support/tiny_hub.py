"""Tiny model folders with tokenizers, a corpus, and an embedder without a model: whole flows in milliseconds."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from blendkv.engines.torch.engine import TorchEngine
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.collection import Collection
from blendkv.retrieval.retriever import HybridRetriever
from blendkv.store.tiered import KVStore

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CONTEXT = 2048
SYSTEM = "Answer from the passages."

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSES_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
DROPS_SYSTEM = (
    "{{ bos_token }}{% for m in messages if m['role'] != 'system' %}[{{ m['role'] }}] {{ m['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
SHOUTS = "{% for m in messages %}{{ m['content'] | replace('blendkv', 'BLENDKV') }}{% endfor %}"

TOPICS = {
    "lambda": "A lambda expression creates an anonymous function. Its body is one expression, whose value is returned.",
    "generator": "A generator function contains yield. Calling it returns an iterator, which stops when the body ends.",
    "decorator": "Decorators are evaluated when the function is defined, and are called with the function object.",
    "scope": "The nonlocal statement lets names refer to bindings of the nearest enclosing scope, not of globals.",
    "import": "The import statement finds a module, loads it if needed, and binds a name in the local namespace.",
    "with": "The with statement calls enter before its body and exit after it, even when the body raises an error.",
    "café": "Übung macht den Meister; naïve façade, 日本語の文章です。次の文。 \U0001f600 done.",
}


def make_tokenizer(template: str | None = CHATML, merges: int = 60, bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the topics; with few merges, characters are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + 256 + merges, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL, show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(list(TOPICS.values())[:-1], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", **({"bos_token": "<s>"} if bos else {}),
        additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip
    if template is not None:
        made.chat_template = template
    return made


def save_model(
    folder: Path, family: str = "llama", seed: int = 0, template: str | None = CHATML, **config: Any
) -> Path:
    """A tiny float32 model and its tokenizer in a folder of their own."""
    tokenizer = make_tokenizer(template)
    model = build(family, seed, vocab_size=len(tokenizer), **{"max_position_embeddings": CONTEXT, **config})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class BagEmbedder:
    """Every word has a fixed direction; a text is the mean of its words'."""

    name, dim = "bag", 24

    def encode(self, texts: Sequence[str], kind: str = "document") -> np.ndarray:
        vectors = np.full((len(texts), self.dim), 1e-6, dtype=np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest())
                vector += np.random.default_rng(seed).standard_normal(self.dim).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_corpus(folder: Path, topics: Sequence[str] = tuple(TOPICS), repeat: int = 2) -> Path:
    """One text file per topic."""
    folder.mkdir(parents=True, exist_ok=True)
    for topic in topics:
        (folder / f"{topic}.txt").write_text((TOPICS[topic] + "\n\n") * repeat, encoding="utf-8")
    return folder


def open_pipeline(
    folder: Path,
    engine: TorchEngine,
    memory: int = 1 << 30,
    disk: int | None = None,
    policy: str = "market",
    **options: Any,
) -> RagPipeline:
    """A pipeline from parts, over the store in ``folder``, with the bag embedder."""
    store = KVStore.open(folder, memory_bytes=memory, disk_bytes=disk, policy=policy)
    collection = Collection(folder)
    embedder = BagEmbedder()
    options = {"system": SYSTEM, "top_k": 3, **options}
    return RagPipeline(
        engine, store, HybridRetriever(collection, embedder), collection=collection, embedder=embedder, **options
    )


@pytest.fixture
def own_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what the command line does to a process of its own."""
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, os.environ.get(name, "error" if name.startswith("T") else "1"))
    loggers = logging.getLogger(), logging.getLogger("blendkv")
    before = [list(logger.handlers) for logger in loggers]
    yield
    for logger, handlers in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("models") / "gemma", "gemma3_text", template=REFUSES_SYSTEM, tie_word_embeddings=False
    )


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "gpt2", "gpt2", template=None)


@pytest.fixture(scope="session")
def mla_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mla = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
    folder = tmp_path_factory.mktemp("models") / "mla"
    return save_model(folder, "deepseek_v3", num_key_value_heads=4, first_k_dense_replace=4, **mla, **moe)


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> TorchEngine:
    return TorchEngine.load(str(llama_folder))


@pytest.fixture(scope="session")
def gemma(gemma_folder: Path) -> TorchEngine:
    return TorchEngine.load(str(gemma_folder))


@pytest.fixture(scope="session")
def gpt2(gpt2_folder: Path) -> TorchEngine:
    return TorchEngine.load(str(gpt2_folder))


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """Layers enough for a deviation rule to select within 15 %."""
    return TorchEngine.load(str(save_model(tmp_path_factory.mktemp("models") / "deep", num_hidden_layers=16)))
