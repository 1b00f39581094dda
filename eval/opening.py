"""Engines for an evaluation, opened and closed in order."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendkv.blend import Mode
from blendkv.engines.base import Engine
from blendkv.errors import InputError
from blendkv.eval.items import EvalItem, Run
from blendkv.eval.load import LoadSettings, run_load
from blendkv.eval.modes import EvalMode, Sizes
from blendkv.eval.run import EvalSettings
from blendkv.eval.subject import Subject, build
from blendkv.eval.subject_torch import TorchSubject
from blendkv.library import Library
from blendkv.store.codecs import RAW
from blendkv.store.tiered import KVStore
from blendkv.types import Prompt

MEMORY_BYTES = 4 << 30
"""Limit of the memory tier that keeps the chunk KVs of a run."""


@dataclass(frozen=True)
class Opening:
    """Which engine, and how. ``store`` is a folder that keeps the chunk KVs, by ``codec``; None for one that goes with
    the run.

    With ``plan``, timed requests go through the loading planner; distributions are compared for the mode as it is
    named.

    Raises
    ------
    InputError
        From `subject`, for an unknown engine.
    """

    engine: str
    model: str
    store: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 1
    memory_share: float | None = None
    plan: bool = False
    codec: str = RAW

    def subject(self, opened: ExitStack) -> Subject:
        """Load the model; it is released with ``opened``."""
        if self.plan and self.engine != "torch":
            raise InputError(f"the loading planner is the embedded engine's, given --plan with engine {self.engine}")
        if self.engine == "torch":
            from blendkv.engines.torch.engine import TorchEngine
            from blendkv.engines.torch.warm_up import start_planner

            loaded = TorchEngine.load(self.model, dtype=self.dtype, device=self.device)
            if self.plan:
                start_planner(loaded, self._existing(opened))
            kept = KVStore.open(self.store, memory_bytes=MEMORY_BYTES)
            subject = TorchSubject(loaded, kept, codec=self.codec)
            return opened.enter_context(closing(subject))
        if self.engine == "vllm":
            from blendkv.eval.subject_vllm import VllmSubject

            measured = VllmSubject(
                self.model, self._folder(opened), dtype=self.dtype, threads=self.threads,
                memory_share=self.memory_share, codec=self.codec,
            )  # fmt: skip
            return opened.enter_context(closing(measured))
        raise InputError(f"unknown engine {self.engine!r}; allowed: torch, vllm")

    def _existing(self, opened: ExitStack) -> Path:
        """A folder on the disk that the store is on."""
        if self.store is None:
            return Path(opened.enter_context(tempfile.TemporaryDirectory()))
        self.store.mkdir(parents=True, exist_ok=True)
        return self.store

    def _folder(self, opened: ExitStack) -> Path:
        if self.store is not None:
            return self.store
        return Path(opened.enter_context(tempfile.TemporaryDirectory())) / "store"

    def serving(self, subject: Subject, opened: ExitStack) -> tuple[Engine, Library]:
        """An engine that takes requests of many threads, with its library, for the subject's model.

        vLLM is loaded anew, with processes of its own: the subject's engine runs one request at a time.
        """
        if isinstance(subject, TorchSubject):
            return subject.engine, subject.library
        from blendkv.engines.vllm.engine import VllmEngine

        folder = self._folder(opened)
        more: dict[str, Any] = {} if self.memory_share is None else {"gpu_memory_utilization": self.memory_share}
        connector = {"min_saving": -1.0, "ignore_gate": True, "codec": self.codec}
        engine = VllmEngine.load(
            self.model, store=folder, dtype=self.dtype, enforce_eager=True, connector=connector,
            enable_prefix_caching=False, **more,
        )  # fmt: skip
        opened.enter_context(closing(engine))
        store = opened.enter_context(closing(KVStore.open(folder, memory_bytes=0)))
        return engine, engine.library(store, "system", subject.builder.prefix)


def measure_load(
    opening: Opening,
    subject: Subject,
    run: Run,
    items: Sequence[EvalItem],
    modes: Sequence[EvalMode],
    settings: EvalSettings,
    requests: int,
    rate: float | None,
) -> dict[str, Any]:
    """Every mode under the same Poisson load, chunk KVs computed before; rows of `blendkv.eval.load.run_load` by mode.

    Without a ``rate``, it is what full prefill could just bear by its time to the first token alone. ``prefix`` is left
    out: it has nothing to hold when every prompt is another.

    Raises
    ------
    InputError
        If a rate is neither given nor measured.
    """
    full = [t for r in run.results if r.mode == "full" for t in r.ttft_s]
    if rate is None and not full:
        raise InputError("no rate is given and full prefill was not measured; add full to the modes, or give a rate")
    offered = rate if rate is not None else len(full) / sum(full)
    prompts = [build(subject, item, settings.chunks).prompt for item in items]
    with ExitStack() as opened:
        engine, library = opening.serving(subject, opened)
        library.precompute([s.token_ids for p in prompts for s in p.segments if s.kind == "chunk"], None)
        load = LoadSettings(requests, offered, seed=settings.seed)
        wanted = [m for m in modes if not m.prefix and m.spec not in run.meta["left_out"]]
        return {m.spec: run_load(engine, library, prompts, _resolver(m, subject), load) for m in wanted}


def _resolver(mode: EvalMode, subject: Subject) -> Callable[[Prompt], Mode]:
    def resolve(prompt: Prompt) -> Mode:
        lengths = [len(s.token_ids) for s in prompt.segments if s.kind == "chunk"]
        behind_prefix = prompt.segments[0].kind == "system"
        return mode.resolve(Sizes(lengths[1:] if behind_prefix else lengths, sum(lengths), subject.layers))

    return resolve
