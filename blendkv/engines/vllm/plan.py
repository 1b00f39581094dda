"""From a vLLM request to a plan: which of its tokens are stored chunk KV, and whether to blend them is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from blendkv.blend import BlendSettings, parse_mode
from blendkv.engines.vllm.messages import Compute, NotBlendedError, Piece
from blendkv.engines.vllm.settings import ConnectorSettings
from blendkv.errors import InputError
from blendkv.market.base import Use
from blendkv.market.words import check_word
from blendkv.matching import Match
from blendkv.store.codecs import RAW
from blendkv.store.door import Store
from blendkv.types import Recipe, RecipeKind, TokenIds, as_token_ids, check_tenant, chunk_key

KINDS = ("system", "chunk", "history", "query")
_FIELDS = ("segments", "mode", "recipe", "workload", "session", "tenant")


class Finder(Protocol):
    """Finds stored chunks in token ids; see `blendkv.matching.TenantFinders`."""

    def find(self, token_ids: TokenIds, tenant: str = "") -> list[Match]:
        """Matches of a tenant's chunks, in order, without overlaps."""
        ...


@dataclass(frozen=True)
class Facts:
    """What a planner knows of the engine."""

    fingerprint: str
    dtype: str
    bos_token_id: int | None
    prefix_caching: bool
    codec: str = RAW
    tenant: str = ""
    """The tag of whose chunks are used by requests that name no tenant."""


@dataclass(frozen=True)
class Plan:
    """How a request would be blended.

    ``missing`` are chunks whose KV has to be computed; ``stored`` lists (key, token ids) of what is read. ``rows``
    counts the tokens that the blend runs through the model (missing chunks not included), ``reused`` those whose KV
    is stored. ``use`` says whose work it is.
    """

    pieces: tuple[Piece, ...]
    settings: BlendSettings
    mode: str
    use: Use
    recipe: RecipeKind
    missing: Compute
    stored: tuple[tuple[str, TokenIds], ...]
    rows: int
    reused: int
    tenant: str = ""


class Planner:
    """Makes plans. It reads the index only and changes nothing.

    Parameters
    ----------
    settings, facts
        Of the connector and the engine.
    store
        Asked what it holds.
    finder
        Finds chunks by content in requests that do not say where their chunks are.
    """

    def __init__(self, settings: ConnectorSettings, facts: Facts, store: Store, finder: Finder) -> None:
        self._settings, self._facts, self._store, self._finder = settings, facts, store, finder

    def plan(self, request: Any) -> Plan | None:
        """The plan of a vLLM request; None for one that asks for nothing.

        Raises
        ------
        NotBlendedError
            If it is to be prefilled in full, with the reason.
        StoreError
            If the store cannot be read.
        """
        wanted = (request.kv_transfer_params or {}).get("blendkv")
        if wanted is None:
            if not self._settings.all_requests:
                return None
            wanted = {}
        try:
            if not isinstance(wanted, dict) or set(wanted) - set(_FIELDS):
                raise InputError(f"blendkv parameters are {wanted!r}; a mapping of {', '.join(_FIELDS)} is allowed")
            mode = parse_mode(wanted.get("mode", self._settings.default_mode))
            use = use_of(wanted)
            recipe = wanted.get("recipe")
            recipe = None if recipe is None else _one_of("recipe", recipe, ("system", "bos"))
            tenant = check_tenant(wanted.get("tenant", self._facts.tenant))
            segments = _segments(wanted.get("segments"), request)
        except NotBlendedError:
            raise
        except (InputError, TypeError, ValueError, KeyError, IndexError) as error:
            raise NotBlendedError("parameters", f"request {request.request_id}: {error}") from error
        if mode.settings is None:
            raise NotBlendedError("mode", "the mode is full: leave blendkv out of kv_transfer_params")
        self._check(request, str(mode), tenant)
        ids = as_token_ids(request.prompt_token_ids[:-1])  # the last token is left to vLLM
        if segments is None:
            return self._by_content(ids, mode.settings, str(mode), use, tenant)
        cut = (*segments[:-1], (segments[-1][0], segments[-1][1] - 1))
        return self._by_boundaries(ids, cut, mode.settings, str(mode), use, recipe, tenant)

    def _check(self, request: Any, mode: str, tenant: str) -> None:
        """Refuse what is not blended, and settings that the salt does not name."""
        usual = mode == self._default_mode and tenant == self._facts.tenant
        unsalted = self._settings.all_requests and request.cache_salt is None and usual
        if self._facts.prefix_caching and not unsalted and not _salted(request.cache_salt or "", mode, tenant):
            form = f"{mode}|TAG, TAG being the tenant's" if tenant else mode
            raise NotBlendedError("cache_salt", f"with prefix caching, cache_salt must begin with {form}")
        if request.lora_request is not None:
            raise NotBlendedError("lora", "chunk KV is the plain model's; requests with LoRA are prefilled in full")
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise NotBlendedError("prompt_embeds", "chunk KV is known by token ids; embeddings are prefilled in full")
        if request.mm_features:
            raise NotBlendedError("multimodal", "multimodal input is prefilled in full")
        if request.sampling_params is None:
            raise NotBlendedError("pooling", "pooling requests are prefilled in full")
        if request.skip_reading_prefix_cache:
            raise NotBlendedError("prompt_logprobs", "prompt log-probabilities need every row: prefilled in full")
        if len(request.prompt_token_ids) < 2:
            raise NotBlendedError("segments", "a prompt of one token has nothing to blend")

    @property
    def _default_mode(self) -> str:
        return str(parse_mode(self._settings.default_mode))

    def _by_boundaries(
        self,
        ids: TokenIds,
        segments: Sequence[tuple[str, int]],
        settings: BlendSettings,
        mode: str,
        use: Use,
        recipe: RecipeKind | None,
        tenant: str,
    ) -> Plan:
        """Chunks where the request says that they are; those that the store lacks are to be computed."""
        facts = self._facts
        start = Recipe("system", (), facts.dtype, tenant=tenant)
        prefix = tuple(int(t) for t in ids[: segments[0][1]]) if segments[0][0] == "system" else ()
        kind: RecipeKind = recipe or ("system" if prefix else "bos")
        bos = () if facts.bos_token_id is None else (facts.bos_token_id,)
        behind = Recipe(kind, prefix if kind == "system" else bos, facts.dtype, facts.codec, tenant)
        stored: list[tuple[str, TokenIds]] = []
        missing: dict[bytes, tuple[int, ...]] = {}
        position = fresh = reused = 0
        for piece_kind, tokens in segments:
            run = ids[position : position + tokens]
            position += tokens
            if piece_kind not in ("chunk", "system"):
                fresh += tokens
                continue
            made = behind if piece_kind == "chunk" else start
            key = chunk_key(facts.fingerprint, made, run)
            if self._store.contains(key, run):
                stored.append((key, run))
                reused += tokens if piece_kind == "chunk" else 0
            elif piece_kind == "chunk":
                missing[run.tobytes()] = tuple(int(t) for t in run)
            else:
                fresh += tokens
        pieces = tuple(Piece(k, n) for k, n in segments)
        chunk_tokens = sum(n for k, n in segments if k == "chunk")
        rows = fresh + _selected(settings, chunk_tokens, segments[-1][1])
        wanted = Compute(kind, behind.prefix, tuple(missing.values()), tenant, use)
        return Plan(pieces, settings, mode, use, kind, wanted, tuple(stored), rows, reused, tenant)

    def _by_content(self, ids: TokenIds, settings: BlendSettings, mode: str, use: Use, tenant: str) -> Plan:
        """Chunks where the finder sees them; all else is fresh."""
        last = len(ids) - 1  # the question keeps one token at least
        pieces: list[Piece] = []
        stored: list[tuple[str, TokenIds]] = []
        position = reused = 0
        for match in self._finder.find(ids, tenant):
            stop = min(match.stop, last)
            if stop <= match.start:
                continue
            if match.start > position:
                pieces.append(Piece("history", match.start - position))
            pieces.append(Piece(match.kind, stop - match.start, match.key, match.chunk_start))
            stored.append((match.key, match.token_ids))
            reused += stop - match.start if match.kind == "chunk" else 0
            position = stop
        pieces.append(Piece("query", len(ids) - position))
        fresh = sum(p.tokens for p in pieces if p.key is None)
        rows = fresh + _selected(settings, reused, pieces[-1].tokens)
        nothing = Compute("bos", (), ())
        return Plan(tuple(pieces), settings, mode, use, "bos", nothing, tuple(stored), rows, reused, tenant)


def use_of(wanted: Mapping[str, Any]) -> Use:
    """Whose work a request is, as its ``blendkv`` parameters say.

    Raises
    ------
    InputError
        If its class or session is no word of 1 to 64 characters.
    """
    session = wanted.get("session")
    return Use(
        check_word("workload", wanted.get("workload", "rag")),
        "" if session is None else check_word("session", session),
    )


def _salted(salt: str, mode: str, tenant: str) -> bool:
    """Whether a salt of the prefix cache names the mode, and the tenant behind it."""
    return salt.startswith(f"{mode}|{tenant}" if tenant else mode)


def _selected(settings: BlendSettings, chunk_tokens: int, question: int) -> int:
    """Rows of the selected tokens and of the scoring pass."""
    scored = question if settings.rule.needs in ("max", "mean") and 0 < settings.asked < 1 else 0
    return int(np.ceil(settings.asked * chunk_tokens)) + scored


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> Any:
    if value not in allowed:
        raise InputError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
    return value


def _segments(given: Any, request: Any) -> tuple[tuple[str, int], ...] | None:
    """The segments of the request, checked; None if it names none."""
    if given is None:
        return None
    segments = tuple((str(kind), int(tokens)) for kind, tokens in given)
    if not segments or sum(n for _, n in segments) != request.num_prompt_tokens or min(n for _, n in segments) < 1:
        raise NotBlendedError("segments", f"{segments} are not the prompt's {request.num_prompt_tokens} tokens")
    if segments[-1][0] != "query" or segments[-1][1] < 2 or not {k for k, _ in segments} <= set(KINDS):
        raise NotBlendedError("segments", f"{segments}: kinds are {', '.join(KINDS)}; a query of 2 ends them")
    if any(kind == "system" for kind, _ in segments[1:]):
        raise NotBlendedError("segments", f"{segments}: a system segment stands first")
    return segments
