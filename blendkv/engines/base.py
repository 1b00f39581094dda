"""What blending asks of an engine: a model that runs itself, a place to read KV from and one to write it to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from blendkv.errors import InputError, PromptTooLongError
from blendkv.kernels import AttentionParams, Statistic, Stored
from blendkv.kernels.rotation import Pairing
from blendkv.store.base import ChunkReader
from blendkv.store.codecs import CODECS, RAW
from blendkv.types import ChunkKV, Prompt, Recipe, RecipeKind, TokenIds

if TYPE_CHECKING:
    from blendkv.blend import BlendSummary, Mode
    from blendkv.blend.loading import LoadPlan
    from blendkv.engines.generation import Generation
    from blendkv.library import Library
    from blendkv.store.door import Store


@dataclass(frozen=True)
class Rotation:
    """How a layer rotates its keys: which of the model's cos/sin tables, which dims pair up, the first rotated dim."""

    table: str
    pairing: Pairing
    offset: int


@dataclass(frozen=True)
class LayerSpec:
    """Shape of one attention layer, as its first call showed it. ``rotation`` is None for a layer without RoPE."""

    index: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    params: AttentionParams
    rotation: Rotation | None

    def kv_bytes(self, element_size: int) -> int:
        """Bytes of K and V of one token."""
        return self.kv_heads * (self.head_dim + self.v_head_dim) * element_size


class AttentionSession(Protocol):
    """What attention layers see instead of their own attention while BlendKV runs the model."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention output of ``layer`` for the rows of this forward pass.

        ``q`` is ``[rows, q_heads, head_dim]``, ``k`` and ``v`` are ``[rows, kv_heads, head_dim]``, after QK norm and
        RoPE; the result is ``[rows, q_heads, v_head_dim]``. `StopForward` ends the pass.
        """
        ...


class StopForward(Exception):
    """Raised by a session that has seen enough layers; the runner's forward then returns None."""


class ModelRunner(Protocol):
    """A loaded model that can be run on any rows under an attention session."""

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device
    context: int

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, session: AttentionSession, logits_to_keep: int = 0
    ) -> torch.Tensor | None:
        """Run the rows (``token_ids`` and absolute ``positions``, int64 ``[rows]``) through the model.

        Returns the logits ``[logits_to_keep, vocab]`` of the last rows; None when none are wanted or the session
        stopped the pass.
        """
        ...

    def rotary(self, positions: torch.Tensor) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """The model's own cos and sin by table name, each ``[positions, pairs]``, rounded as the model rounds them."""
        ...

    def reduce(self, tensor: torch.Tensor, statistic: Statistic) -> torch.Tensor:
        """Join a statistic over this runner's heads with those of the other tensor-parallel ranks, elementwise.

        The result is the same on every rank; a runner that holds all heads returns ``tensor``.
        """
        ...


def kv_bytes_per_token(runner: ModelRunner, codec: str = RAW) -> int:
    """Bytes of K and V of one token over all layers, as ``codec`` stores them."""
    size, vector = runner.dtype.itemsize, CODECS.get(codec).vector_bytes
    return sum(s.kv_heads * (vector(s.head_dim, size) + vector(s.v_head_dim, size)) for s in runner.layers)


def head_dims(runner: ModelRunner) -> set[int]:
    """Head dims of K and V of all layers."""
    return {dim for spec in runner.layers for dim in (spec.head_dim, spec.v_head_dim)}


class KVSource(Protocol):
    """Stored KV of a prompt's segments, layer by layer."""

    readers: Sequence[ChunkReader | None]
    """One per segment of the prompt; None where nothing is stored and the tokens are computed fresh."""

    def layer(self, index: int) -> Sequence[tuple[Stored, Stored] | None]:
        """K before RoPE and V, each ``[tokens, kv_heads, head_dim]``, of every segment; None as in ``readers``.

        As values of the model's dtype, or as a codec stores them: the blend decodes while it rotates. Layers are asked
        for in ascending order, once per pass.
        """
        ...


class KVSink(Protocol):
    """Where final KV goes: a contiguous cache, or an engine's pages."""

    length: int
    """Tokens whose KV is already final; a blend adds behind them."""

    def buffer(self, layer: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writable K (rotated) and V of one layer, ``[total, kv_heads, head_dim]``; below ``length`` filled."""
        ...

    def commit(self, layer: int, total: int) -> None:
        """The layer's rows ``length .. total - 1`` in its buffer are final."""
        ...

    def finish(self, total: int) -> None:
        """All layers are committed: ``length`` becomes ``total``."""
        ...


class ModelIdentity(Protocol):
    """What the names of chunk KVs depend on."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model."""

    @property
    def dtype(self) -> str:
        """Name of the dtype of KV, such as ``bfloat16``."""

    @property
    def bos_token_id(self) -> int | None:
        """The tokenizer's BOS, if it has one."""


class ChunkEngine(ModelIdentity, Protocol):
    """What computes chunk KVs: an engine, as far as `blendkv.library.ChunkLibrary` needs one."""

    @property
    def runner(self) -> ModelRunner:
        """The model."""

    def collect(self, recipe: Recipe, chunks: Sequence[TokenIds], prefix: ChunkKV | None) -> list[ChunkKV]:
        """Compute chunk KVs alone; see `blendkv.blend.collect`."""
        ...


@dataclass(frozen=True)
class GenerationOptions:
    """How to decode. Temperature 0 is greedy; ``stop`` strings end the answer and are not part of it."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; at least 1 is allowed")
        if not self.temperature >= 0.0:
            raise InputError(f"temperature is {self.temperature}; 0 (greedy) or more is allowed")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p is {self.top_p}; more than 0, at most 1 is allowed")
        if any(not s for s in self.stop):
            raise InputError("an empty stop string would end every answer at once; leave it out")


@dataclass(frozen=True)
class Outcome:
    """What an engine did for one answer.

    Attributes
    ----------
    mode
        What was done: the mode spec, ``full``, or ``prefix`` (a prefix cache held most of the prompt's KV from an
        earlier request with the same settings, and the rest was prefilled).
    report
        The blend's; None without a blend.
    fallback
        Why a blend that was asked for became something else, for people.
    incidents
        What to count, in a few fixed words: what was mended on the way, and last the reason of a fallback.
    seconds
        ``prepare``, and the stages of the blend, up to the wait for the first token.
    plan
        What the loading planner decided and predicted; None without one. Its segments are those of the blended prompt:
        behind a conversation's history, of what is new.
    """

    mode: str
    report: BlendSummary | None = None
    fallback: str | None = None
    incidents: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    plan: LoadPlan | None = None


class Conversation:
    """What an engine keeps of a conversation between its turns. Only the engine that made it looks inside."""


class Engine(Protocol):
    """What answers prompts: the seam between `blendkv.pipeline.RagPipeline` and whatever runs the model."""

    @property
    def name(self) -> str:
        """The model, as a store remembers it: a folder, a hub id, or ``demo``."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model."""

    @property
    def tokenizer(self) -> Any:
        """The model's fast transformers tokenizer."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""

    @property
    def unsupported(self) -> Exception | None:
        """Why the model cannot be blended; None when it can. Full prefill works in either case."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""

    def library(
        self,
        store: Store,
        kind: RecipeKind,
        system_prefix: TokenIds,
        codec: str | None = None,
        tenant: str = "",
    ) -> Library:
        """The chunk KVs of this engine in ``store``, of one recipe kind, codec and tenant behind one system prefix.

        Raises
        ------
        InputError
            If the codec, by default the engine's own, cannot be used with this model.
        """

    def conversation(self) -> Conversation:
        """Start a conversation, to be given to each of its turns."""

    def generate(
        self,
        prompt: Prompt,
        mode: Mode,
        library: Library,
        options: GenerationOptions,
        conversation: Conversation | None = None,
    ) -> Generation:
        """Blend (or prefill) a prompt and decode behind it.

        Parameters
        ----------
        prompt
            The whole context, in a conversation too; `check_room` has passed it.
        mode
            What is asked for. What cannot be blended is prefilled in full, and the outcome says so.
        library
            Made by this engine.
        options
            How to decode.
        conversation
            Made by this engine; what it holds of the prompt is not computed again.

        Raises
        ------
        InputError
            If mode or options cannot be used.
        """

    def close(self) -> None:
        """Release the model. Twice does no harm."""


def check_room(engine: Engine, tokens: int, made_of: str = "") -> None:
    """Refuse a context of ``tokens`` that leaves no room for an answer; ``made_of`` says what they are.

    Raises
    ------
    PromptTooLongError
        If so.
    """
    if tokens >= engine.context:
        raise PromptTooLongError(
            f"the prompt has {tokens} tokens{made_of}; the context of {engine.name} holds {engine.context}, the answer "
            "included: ask for fewer or smaller chunks (--top-k), or shorten the question"
        )
