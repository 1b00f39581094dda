"""vLLM as a subject: one engine in a process of its own (`blendkv.eval.bench.vllm_measured`), asked over a pipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from blendkv.blend import BlendSummary, parse_mode
from blendkv.engines.fingerprint import fingerprint_folder
from blendkv.engines.folders import model_name, resolve_folder
from blendkv.engines.vllm.arguments import own_dtype, require_vllm
from blendkv.engines.vllm.engine import load_tokenizer
from blendkv.errors import InputError, StoreError
from blendkv.eval.bench.process import MeasuringProcess, engine_environment
from blendkv.eval.bench.vllm_ttft import ENGINE, as_segments
from blendkv.eval.modes import EvalMode, Sizes
from blendkv.eval.subject import CONTINUATION, Asked, Built, Comparison, Truth
from blendkv.prompt import DEFAULT_SYSTEM, PromptBuilder
from blendkv.store.codecs import RAW

KV_BYTES = 2 << 30
"""Room for vLLM's pages on a CPU."""
_SPOKEN = CONTINUATION // 2
"""Continuation tokens that move into the prompt when plain vLLM is compared with itself."""


class VllmSubject:
    """See `blendkv.eval.subject.Subject`. What the engine does not show is None: selected tokens, KV by layer.

    Parameters
    ----------
    model
        Folder, hub id, or ``demo``.
    store
        Folder of the store that the engine's connector reads and fills.
    dtype
        ``auto``: the checkpoint's own.
    max_model_len
        Tokens of prompt and answer; the model's own by default.
    threads
        Of the engine.
    memory_share
        The engine's share of a GPU's memory.
    codec
        How the connector stores chunk KVs.

    Raises
    ------
    MissingDependencyError, ModelLoadError
        If there is no vLLM, or no model.
    """

    engine_name = "vllm"

    def __init__(
        self,
        model: str,
        store: Path,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        threads: int = 1,
        memory_share: float | None = None,
        system: str = DEFAULT_SYSTEM,
        codec: str = RAW,
    ) -> None:
        require_vllm()
        self.codec = codec
        folder = resolve_folder(model)
        self.model, self.fingerprint = model_name(model, folder), fingerprint_folder(folder)
        self.tokenizer = load_tokenizer(folder)
        config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
        self.layers = int(config.num_hidden_layers)
        self.context = min(int(config.max_position_embeddings), max_model_len or 1 << 30)
        self.builder = PromptBuilder(self.tokenizer, system)
        self._ends = _end_tokens(folder, self.tokenizer)
        self._process = MeasuringProcess(ENGINE, engine_environment(threads, KV_BYTES))
        try:
            started = self._process.call(
                "start", model=str(folder), dtype=own_dtype(folder) if dtype == "auto" else dtype,
                max_model_len=self.context, eager=True, memory_share=memory_share, store=str(store), min_saving=-1.0,
                codec=codec,
            )  # fmt: skip
        except BaseException:
            self._process.close()
            raise
        self.dtype: str = started["dtype"]

    def prepare(self, built: Built) -> None:
        """Compute and store the chunk KVs of a prompt."""
        chunks = [c.tolist() for c in built.chunks]
        held = self._process.call("precompute", prefix=self.builder.prefix.tolist(), chunks=chunks)
        if held != len(chunks):
            raise StoreError(
                f"the store holds {held} of {len(chunks)} chunks after they were computed: make room for it"
            )

    def truth(self, built: Built) -> Truth:
        """Prefill in full, without a blend, and answer greedily."""
        segments = as_segments(built.prompt)
        self._process.call("reference", segments=segments)
        self._process.call("reference", segments=segments, forced=built.gold.tolist(), name="gold")
        tokens = self._answer(segments, None, built.max_new_tokens)[0]
        return Truth(tokens, self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _answer(
        self, segments: Any, mode: str | None, tokens: int, warm: int = 0
    ) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Token ids up to one that ends an answer, and the connector's account."""
        found = self._process.call("answer", segments=segments, mode=mode, tokens=tokens, warm=warm)
        said = found["tokens"]
        end = next((i + 1 for i, token in enumerate(said) if token in self._ends), len(said))
        return tuple(said[:end]), found["told"] or {}

    def _spec(self, built: Built, mode: EvalMode) -> str | None:
        """The mode as a request names it; None for full prefill."""
        lengths = [len(c) for c in built.chunks]
        behind_prefix = built.prompt.segments[0].kind == "system"
        resolved = mode.resolve(Sizes(lengths[1:] if behind_prefix else lengths, sum(lengths), self.layers))
        return None if resolved.settings is None else str(resolved)

    def _warm(self, built: Built, mode: EvalMode) -> int:
        """Tokens that are in the prefix cache before the clock starts."""
        return len(self.builder.prefix) + len(built.chunks[0]) if mode.prefix else 0

    def compare(self, built: Built, mode: EvalMode, truth: Truth, deviation: bool = False) -> Comparison:
        """See `blendkv.eval.subject.Subject.compare`; plain vLLM is compared with itself, half of it prefilled."""
        segments, spec = as_segments(built.prompt), self._spec(built, mode)
        warm = self._warm(built, mode)
        spoken = _SPOKEN if mode.exact and not mode.prefix else 0
        own = self._process.call("fidelity", segments=segments, mode=spec, spoken=spoken, warm=warm)
        if spoken:
            return Comparison(own["kl"], None, None, own["top1"])
        gold = self._process.call("fidelity", segments=segments, mode=spec, name="gold", warm=warm)
        report = None if spec is None else _blended(own["told"], spec)
        return Comparison(own["kl"], own["by_token"][0], gold["kl"], own["top1"], report)

    def budget_one(self, built: Built, truth: Truth) -> float:
        """KL to plain vLLM with every token recomputed."""
        spec = "blend:strided@1"
        found = self._process.call("fidelity", segments=as_segments(built.prompt), mode=spec)
        _blended(found["told"], spec)
        return float(found["kl"])

    def ask(self, built: Built, mode: EvalMode, max_new_tokens: int) -> Asked:
        """See `blendkv.eval.subject.Subject.ask`: a request of one token is timed, its answer is another request."""
        segments, spec, warm = as_segments(built.prompt), self._spec(built, mode), self._warm(built, mode)
        timed = self._process.call("ask", segments=segments, mode=spec, warm=warm)
        tokens: tuple[int, ...] = ()
        if max_new_tokens > 1:
            tokens = self._answer(segments, spec, max_new_tokens, warm)[0]
        report = None if spec is None else _blended(timed["told"], spec)
        stages = {} if report is None else dict(report.stages)
        if stages:
            stages["question"] = max(0.0, timed["seconds"] - sum(stages.values()))
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Asked(tokens, text, timed["seconds"], stages, report)

    def close(self) -> None:
        """End the engine's process."""
        self._process.close()


def _blended(told: dict[str, Any] | None, spec: str) -> BlendSummary:
    """The connector's account of a request that must have been blended.

    Raises
    ------
    InputError
        If it was not: what stands in the way is the mode or the prompt.
    """
    said = told or {}
    if said.get("outcome") != "blended":
        raise InputError(f"vLLM did not blend a request for {parse_mode(spec)}: {said.get('reason', 'no connector')}")
    return BlendSummary(**{name: value for name, value in said.items() if name in BlendSummary.__dataclass_fields__})


def _end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the model's own, and the tokenizer's."""
    path = folder / "generation_config.json"
    own = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    ids = own if isinstance(own, list) else [own]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)
