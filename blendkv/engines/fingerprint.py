"""Model fingerprints: KV of another model never matches."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tekken.json",
)
_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "_attn_implementation"}


def fingerprint_folder(folder: Path) -> str:
    """Digest of a model folder: its config, every byte of its weights, its tokenizer. Hex, 128 bits.

    Content decides, not names or dates: a copy has the same fingerprint, one altered weight another.
    """
    total = hashlib.blake2b(digest_size=16)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    total.update(_config_text(config))
    weights = sorted({p for pattern in _WEIGHTS for p in folder.glob(pattern)})
    for path in [*weights, *(folder / name for name in _TOKENIZER)]:
        if path.is_file():
            total.update(f"{path.name}|{_hash_file(path)}|".encode())
    return total.hexdigest()


def fingerprint_model(model: nn.Module, config: dict[str, Any], tokenizer_text: str) -> str:
    """Digest of a model in memory: config, every byte of its parameters, the tokenizer's serialised form."""
    total = hashlib.blake2b(digest_size=16)
    total.update(_config_text(config))
    for name, tensor in sorted(model.state_dict().items()):
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{xxhash.xxh3_128_hexdigest(data)}|".encode())
    total.update(xxhash.xxh3_128_hexdigest(tokenizer_text.encode()).encode())
    return total.hexdigest()


def _config_text(config: dict[str, Any]) -> bytes:
    return json.dumps({k: v for k, v in config.items() if k not in _VOLATILE}, sort_keys=True, default=str).encode()


def _hash_file(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            state.update(block)
    return state.hexdigest()
