"""Tiny generated models: one entry per family and per kind of RoPE."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

BASE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0, "initializer_range": 0.2,
}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": MOE,
    "phi3": {},
    "gemma2": {"sliding_window": 9},
    "gemma3_text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "smollm3": {},
    "gpt_oss": {**MOE, "sliding_window": 9},
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "cohere2": {"sliding_window": 9},
    "starcoder2": {"sliding_window": None},
    "glm4": {},
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 8.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def build(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 model with random weights, large enough that context matters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES.get(family, {}), **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
            elif "sinks" in name:
                parameter.normal_()
    return model


def build_rope(kind: str, seed: int = 0) -> PreTrainedModel:
    """A tiny Llama with one kind of RoPE scaling."""
    limit = 48 if kind == "dynamic" else 512  # dynamic NTK acts beyond max_position_embeddings
    return build(
        "llama",
        seed,
        max_position_embeddings=limit,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]},
    )


def random_ids(rng: random.Random, length: int, vocab: int = 131) -> list[int]:
    """Random ordinary token ids."""
    return [rng.randrange(3, vocab) for _ in range(length)]


def seed_of_run() -> int:
    """A fresh seed per run, or the one given in BLENDKV_TEST_SEED; tests print it."""
    return int(os.environ.get("BLENDKV_TEST_SEED", random.SystemRandom().randrange(1 << 30)))


def lengths(rng: random.Random, chunks: int, low: int = 1, high: int = 40) -> Sequence[int]:
    """Odd chunk lengths, one token included now and then."""
    return [rng.choice((1, 3, rng.randint(low, high), rng.randint(17, high))) for _ in range(chunks)]
