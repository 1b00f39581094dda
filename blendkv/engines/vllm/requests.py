"""What a prompt and its options become for vLLM, and what vLLM's answer about a blend becomes for us."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from blendkv.blend import BlendSummary, Mode
from blendkv.engines.base import GenerationOptions, Outcome
from blendkv.market.words import check_word, use_of
from blendkv.types import Prompt, Recipe

FINISH_REASONS = {"stop": "stop", "length": "length"}
"""vLLM's finish reasons that are ours; every other one ends an answer early: ``cancelled``."""


def sampling_arguments(options: GenerationOptions, room: int) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams``; ``room`` is how many tokens the context leaves for the answer."""
    return {
        "max_tokens": min(options.max_new_tokens, room),
        "temperature": options.temperature,
        "top_p": options.top_p if options.temperature > 0.0 else 1.0,
        "stop": list(options.stop),
        "seed": options.seed,
    }


def transfer_params(prompt: Prompt, mode: Mode, recipe: Recipe, in_conversation: bool) -> dict[str, Any]:
    """``kv_transfer_params`` of a request that is to be blended; see `blendkv.engines.vllm.connector`.

    Whose work it is comes from `blendkv.market.context.current_use`.
    """
    segments = [[s.kind, len(s.token_ids)] for s in prompt.segments]
    told = {"segments": segments, "mode": str(mode), "recipe": recipe.kind, "tenant": recipe.tenant}
    return {"blendkv": {**told, **_tags(in_conversation)}}


def plain_params(in_conversation: bool) -> dict[str, Any]:
    """``kv_transfer_params`` of a request for full prefill: only whose work it is, for the scheduler's admission."""
    return {"blendkv": {"mode": "full", **_tags(in_conversation)}}


def _tags(in_conversation: bool) -> dict[str, str]:
    use = use_of(None, None, "chat" if in_conversation else "rag")
    told = {"workload": use.workload, **({"session": use.session} if use.session else {})}
    return {name: check_word(name, word) for name, word in told.items()}  # else the connector would refuse the blend


def cache_salt(prompt: Prompt, mode: Mode, recipe: Recipe, conversation: str | None) -> str:
    """The salt of a blended request's KV in vLLM's prefix cache.

    Which tokens are recomputed depends on the question, so KV that was blended for one prompt serves that very prompt
    again, and later turns of its conversation, but no other. A tenant's tag is part of it.
    """
    begins = f"{mode}|{recipe.tenant}" if recipe.tenant else f"{mode}"
    if conversation is not None:
        return f"{begins}|{conversation}"
    digest = hashlib.blake2b(recipe.digest.encode(), digest_size=16)
    digest.update(repr([(s.kind, len(s.token_ids)) for s in prompt.segments]).encode())
    digest.update(np.ascontiguousarray(prompt.token_ids, dtype="<i4").tobytes())
    return f"{begins}|{digest.hexdigest()}"


def outcome_of(mode: Mode, params: Mapping[str, Any] | None, prepared: float) -> Outcome:
    """What became of a request that asked for ``mode``.

    Parameters
    ----------
    mode
        Asked for; it has settings.
    params
        ``RequestOutput.kv_transfer_params`` of the finished request.
    prepared
        Seconds that it took to hand the request over.
    """
    said = (params or {}).get("blendkv") or {}
    outcome, seconds = said.get("outcome"), {"prepare": prepared}
    if "held_seconds" in said:  # the scheduler held it back for the sake of others
        seconds["held"] = float(said["held_seconds"])
    if outcome == "blended":
        report = _summary(said)
        return Outcome(str(mode), report, None, (), seconds | (dict(report.stages) if report else {}))
    if outcome is None:
        return Outcome(str(mode), None, "vLLM did not say what became of the blend", ("no outcome reported",), seconds)
    reason = str(said.get("reason") or outcome)
    return Outcome("prefix" if outcome == "prefix" else "full", None, reason, (reason,), seconds)


def _summary(said: Mapping[str, Any]) -> BlendSummary | None:
    """The summary in what the connector said; None if it left a part of it out."""
    names = [f.name for f in fields(BlendSummary)]
    if any(said.get(name) is None for name in names):
        return None
    return BlendSummary(**{name: said[name] for name in names})
