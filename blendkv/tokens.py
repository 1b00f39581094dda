"""Text to token ids, from any number of threads at once.

transformers keeps padding, truncation and whether special tokens are split as state of the one tokenizer object, and
sets it on each call: two threads that want different things get each other's, without an error. Encoding therefore
runs on private copies of the tokenizer's backend whose state never changes.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from blendkv.types import TokenIds, as_token_ids

_ENCODERS: weakref.WeakKeyDictionary[Any, tuple[int, TextEncoder]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class TextEncoder:
    """Encodes text with one tokenizer. Any thread may call.

    Parameters
    ----------
    tokenizer
        A fast tokenizer of transformers. It is copied: what is done to it later changes nothing here.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._plain, self._special = _copy(tokenizer, True), _copy(tokenizer, False)

    def encode(self, text: str, *, plain: bool = False, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; ``plain`` text may spell special tokens without meaning them."""
        backend = self._plain if plain else self._special
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def spans(self, text: str) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """Token ids of plain text, int32 ``[tokens]``, and their character spans, int64 ``[tokens, 2]``."""
        encoded = self._plain.encode(text, add_special_tokens=False)
        return as_token_ids(encoded.ids), np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)


def _copy(tokenizer: Any, plain: bool) -> Any:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = plain
    return backend


def text_encoder(tokenizer: Any) -> TextEncoder:
    """The encoder of a tokenizer: made once, and again when tokens were added to it."""
    with _LOCK:
        size, found = _ENCODERS.get(tokenizer, (-1, None))
        if found is None or size != len(tokenizer):
            found = TextEncoder(tokenizer)
            _ENCODERS[tokenizer] = len(tokenizer), found
        return found
