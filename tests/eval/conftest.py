"""Tiny models in folders."""

from tiny_hub import (
    deep,
    gemma,
    gemma_folder,
    gpt2,
    gpt2_folder,
    llama,
    llama_folder,
    mla_folder,
    other_folder,
    own_logging,
)

__all__ = [
    "deep",
    "gemma",
    "gemma_folder",
    "gpt2",
    "gpt2_folder",
    "llama",
    "llama_folder",
    "mla_folder",
    "other_folder",
    "own_logging",
]
