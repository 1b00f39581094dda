"""One vLLM engine in this process, to be measured by another one: ``python -m blendkv.eval.bench.vllm_measured``.

Every operation takes and returns JSON values; a prompt is a list of ``[kind, token ids]`` segments.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from blendkv.blend import BlendSummary
from blendkv.eval.bench.flops import FlopModel
from blendkv.eval.bench.memory import peak_extra_bytes
from blendkv.eval.bench.process import serve_operations
from blendkv.store.codecs import RAW
from blendkv.types import ChunkKV, as_token_ids

FORCED_TOKENS = 16
"""Tokens of plain vLLM's continuation that a mode is compared on."""
_MEMORY = "16GB"


def transfer_config(store: str, min_saving: float | None = None, codec: str = RAW) -> dict[str, Any]:
    """VLLM's ``kv_transfer_config`` for a store; ``min_saving`` and ``codec`` as in the connector's settings."""
    # What is measured is what was asked for, whatever a verdict on the model says.
    extra: dict[str, Any] = {"store": store, "memory": _MEMORY, "ignore_gate": True, "codec": codec}
    if min_saving is not None:
        extra["min_saving"] = min_saving
    return {
        "kv_connector": "BlendConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "blendkv.engines.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }  # fmt: skip


Segments = Sequence[tuple[str, list[int]]]


class _Measured:
    """The engine and its operations."""

    def __init__(self) -> None:
        self.llm: Any = None
        self._asked = 0
        self._truth: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scheduling: list[float] = []

    def start(
        self,
        model: str,
        dtype: str,
        max_model_len: int,
        eager: bool,
        memory_share: float | None,
        store: str | None = None,
        min_saving: float | None = None,
        codec: str = RAW,
    ) -> dict[str, Any]:
        """Load the model; with a store, the connector is configured. Returns what the engine runs on."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        from blendkv.eval.bench.vllm_forcing import TeacherForcing

        self.llm = LLM(
            model=model, dtype=dtype, max_model_len=max_model_len, enforce_eager=eager, skip_tokenizer_init=True,
            distributed_executor_backend="uni", logits_processors=[TeacherForcing], enable_prefix_caching=True,
            **({} if store is None else {"kv_transfer_config": transfer_config(store, min_saving, codec)}),
            **({} if memory_share is None else {"gpu_memory_utilization": memory_share}),
        )  # fmt: skip
        if store is not None:
            self._time_scheduling()
        config = self.llm.llm_engine.vllm_config
        return {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "block_size": config.cache_config.block_size,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }

    def _time_scheduling(self) -> None:
        """Add up what the connector's half in the scheduler takes."""
        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        for name in ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"):
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._scheduling.append(time.perf_counter() - began)

        return timed

    def _blender(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().blender()

    def _library(self, prefix: list[int]) -> Any:
        return self._blender().library("system", as_token_ids(prefix))

    def precompute(self, prefix: list[int], chunks: list[list[int]]) -> int:
        """Compute and store what the store lacks of ``chunks`` behind ``prefix``; returns how many chunks it holds."""
        library, ids = self._library(prefix), [as_token_ids(c) for c in chunks]
        library.precompute(ids, None)
        return sum(1 for c in ids if library.has(c))

    def spoil(self, prefix: list[int], chunk: list[int]) -> None:
        """Put random KV of the same size in the place of a stored chunk's."""
        library, ids = self._library(prefix), as_token_ids(chunk)
        reader = library.store.get(library.key(ids), ids)
        noise = torch.Generator().manual_seed(1)
        pairs = [reader.layer(i) for i in range(reader.layers)]
        k, v = (
            tuple((torch.randn(p[i].shape, generator=noise) * p[i].float().std()).to(p[i].dtype) for p in pairs)
            for i in (0, 1)
        )
        library.store.remove(library.key(ids))
        library.store.put(ChunkKV(reader.fingerprint, reader.recipe, ids, k, v))

    def restore(self, prefix: list[int], chunk: list[int]) -> None:
        """Compute a stored chunk again."""
        library, ids = self._library(prefix), as_token_ids(chunk)
        library.store.remove(library.key(ids))
        library.precompute([ids], None)

    def ask(self, segments: Segments, mode: str | None, warm: int = 0) -> dict[str, Any]:
        """One request: seconds from the call to the first token, the connector's account of it, its scheduling.

        ``warm`` tokens of the prompt are in vLLM's prefix cache before the clock starts. ``cpu_seconds`` is what this
        process worked meanwhile: on a CPU and with one thread the same, were nobody else on the machine.
        """
        self._scheduling.clear()
        self._asked += 1
        if warm:
            self._generate(_first(segments, warm), None, 1)
        began, worked = time.perf_counter(), time.process_time()
        out = self._generate(segments, mode, 1)
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
        told = (out.kv_transfer_params or {}).get("blendkv")
        return {"seconds": seconds, "cpu_seconds": worked, "told": told, "scheduling": self._scheduling.copy()}

    def answer(self, segments: Segments, mode: str | None, tokens: int, warm: int = 0) -> dict[str, Any]:
        """The greedy answer's ``tokens`` token ids, and the connector's account of it; ``warm`` as for `ask`."""
        self._asked += 1
        if warm:
            self._generate(_first(segments, warm), None, 1)
        out = self._generate(segments, mode, tokens)
        told = (out.kv_transfer_params or {}).get("blendkv")
        return {"tokens": list(out.outputs[0].token_ids), "told": told}

    def _generate(self, segments: Segments, mode: str | None, tokens: int) -> Any:
        """Run one request to its end; its salt is this operation's, so that no other operation's KV is found."""
        from vllm import SamplingParams

        ids = [token for _, run in segments for token in run]
        extra = None
        if mode is not None:
            cut = [[kind, len(run)] for kind, run in segments]
            extra = {"kv_transfer_params": {"blendkv": {"segments": cut, "mode": mode}}}
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True, extra_args=extra
        )
        prompt = {"prompt_token_ids": ids, "cache_salt": f"{mode or 'full'}|{self._asked}"}
        return self.llm.generate([prompt], sampling, use_tqdm=False)[0]

    def reference(self, segments: Segments, forced: list[int] | None = None, name: str = "own") -> list[int]:
        """Plain vLLM's greedy continuation, or its logits on ``forced`` tokens; modes are compared with it by name."""
        from blendkv.eval.bench.vllm_forcing import TeacherForcing

        self._asked += 1
        TeacherForcing.record(None if forced is None else torch.tensor(forced))
        out = self._generate(segments, None, FORCED_TOKENS if forced is None else len(forced))
        tokens = torch.tensor(out.outputs[0].token_ids)
        self._truth[name] = tokens, TeacherForcing.taken().double().log_softmax(-1)
        return tokens.tolist()

    def fidelity(
        self, segments: Segments, mode: str | None, spoken: int = 0, name: str = "own", warm: int = 0
    ) -> dict[str, Any]:
        """KL(reference || mode) in nats and top-1 agreement on the reference's continuation, teacher-forced.

        With ``spoken``, that many of its tokens are part of the prompt, and the rest is compared: for plain vLLM
        itself, what is left is rounding. ``by_token`` holds the KL of each token.
        """
        from blendkv.eval.bench.vllm_forcing import TeacherForcing

        said, rows = self._truth[name]
        tokens, truth = said[spoken:], rows[spoken:]
        kind, last = segments[-1]
        segments = [*segments[:-1], (kind, [*last, *said[:spoken].tolist()])]
        self._asked += 1
        if warm:
            self._generate(_first(segments, warm), None, 1)
        TeacherForcing.record(tokens)
        out = self._generate(segments, mode, len(tokens))
        found = TeacherForcing.taken().double().log_softmax(-1)
        kl = (truth.exp() * (truth - found)).sum(-1).clamp_(min=0.0)
        top1 = (found.argmax(-1) == truth.argmax(-1)).double().mean()
        told = (out.kv_transfer_params or {}).get("blendkv")
        return {"kl": float(kl.mean()), "top1": float(top1), "by_token": kl.tolist(), "told": told}

    def peak(self, segments: Segments, mode: str) -> int:
        """The most bytes that a blended request allocates beside vLLM's pages."""
        self._asked += 1
        return peak_extra_bytes(lambda: self._generate(segments, mode, 1))

    def ideal(self, summary: dict[str, Any]) -> float | None:
        """Counted FLOPs of the full prefill over those of a blend; None for a mixture of experts."""
        runner = self._blender().runner
        if self.llm.llm_engine.vllm_config.model_config.get_num_experts():
            return None
        flops = FlopModel(runner.layers, _row_flops(runner.model))
        done = BlendSummary(**summary)
        whole = flops.full(done.total_tokens + 1)
        last = whole - flops.full(done.total_tokens)  # vLLM runs the prompt's last token itself
        return whole / (flops.blend(done) + last)

    def close(self) -> None:
        """Stop the engine."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()


def _first(segments: Segments, tokens: int) -> Segments:
    """The first ``tokens`` of a prompt, as one segment."""
    return [("query", [token for _, run in segments for token in run][:tokens])]


def _row_flops(model: torch.nn.Module) -> float:
    """FLOPs of a decoder's linear layers per row."""
    from vllm.model_executor.layers.linear import LinearBase

    return sum(2.0 * m.input_size * m.output_size for m in model.modules() if isinstance(m, LinearBase))


def main() -> None:
    """Answer the measuring process."""
    engine = _Measured()
    names = (
        "start", "precompute", "spoil", "restore", "ask", "answer", "reference", "fidelity", "peak", "ideal",
    )  # fmt: skip
    try:
        serve_operations({name: getattr(engine, name) for name in names})
    finally:
        engine.close()


if __name__ == "__main__":
    main()
