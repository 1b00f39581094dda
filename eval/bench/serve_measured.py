"""vLLM as a server runs it (its engine in a process of its own) under many clients: a `MeasuringProcess`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

from blendkv.eval.bench.process import serve_operations
from blendkv.eval.bench.vllm_measured import transfer_config


class _Server:
    """An `AsyncLLM` and the loop that it lives on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._llm: Any = None

    def start(
        self,
        model: str,
        dtype: str,
        max_model_len: int,
        eager: bool,
        memory_share: float | None,
        store: str | None = None,
    ) -> dict[str, Any]:
        """Start vLLM; with a store, the connector is configured."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=model, dtype=dtype, max_model_len=max_model_len, enforce_eager=eager, skip_tokenizer_init=True,
            enable_prefix_caching=True,
            **({} if store is None else {"kv_transfer_config": transfer_config(store)}),
            **({} if memory_share is None else {"gpu_memory_utilization": memory_share}),
        )  # fmt: skip

        async def make() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self._llm = self._loop.run_until_complete(make())
        config = self._llm.vllm_config
        return {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
        }

    def load(
        self, requests: Sequence[list[list[Any]]], mode: str | None, clients: int, answer_tokens: int
    ) -> dict[str, Any]:
        """Have ``clients`` ask ``requests`` (segments each) one after the other; seconds of all, an entry of each.

        With a mode, all requests share its salt: later ones find the blended prefixes of earlier ones.
        """
        return self._loop.run_until_complete(self._all(iter(requests), mode, clients, answer_tokens))

    async def _all(
        self, requests: Iterator[list[list[Any]]], mode: str | None, clients: int, answer_tokens: int
    ) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        async def client(name: int) -> None:
            for turn, segments in enumerate(requests):
                found.append(await self._one(f"{name}-{turn}", segments, mode, answer_tokens))

        began, worked = time.perf_counter(), _worked()
        await asyncio.gather(*(client(name) for name in range(clients)))
        seconds, worked = time.perf_counter() - began, _worked() - worked
        return {"seconds": seconds, "cpu_seconds": worked, "requests": found}

    async def _one(self, name: str, segments: list[list[Any]], mode: str | None, answer_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        ids = [token for _, run in segments for token in run]
        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        extra = None
        if mode is not None:
            prompt["cache_salt"] = mode
            cut = [[kind, len(run)] for kind, run in segments]
            extra = {"kv_transfer_params": {"blendkv": {"segments": cut, "mode": mode}}}
        sampling = SamplingParams(
            max_tokens=answer_tokens, temperature=0.0, detokenize=False, ignore_eos=True, extra_args=extra
        )
        ttft: float | None = None
        last: Any = None
        began = time.perf_counter()
        try:
            async for out in self._llm.generate(prompt, sampling, f"{mode}-{name}"):
                last = out
                if ttft is None:
                    ttft = time.perf_counter() - began
        except Exception as error:  # counted; the client goes on
            return {"error": f"{type(error).__name__}: {error}"}
        return {
            "ttft": ttft, "latency": time.perf_counter() - began, "prompt_tokens": len(ids),
            "cached_tokens": last.num_cached_tokens or 0, "told": (last.kv_transfer_params or {}).get("blendkv"),
        }  # fmt: skip

    def close(self) -> None:
        """Stop vLLM."""
        if self._llm is not None:
            self._llm.shutdown()
        self._loop.close()


def _worked() -> float:
    """Seconds of CPU that vLLM's processes have used; how loaded the machine is does not show in it."""
    import psutil  # type: ignore[import-untyped]

    times = [p.cpu_times() for p in psutil.Process().children(recursive=True)]
    return float(sum(t.user + t.system for t in times))


def main() -> None:
    """Answer the measuring process."""
    server = _Server()
    try:
        serve_operations({"start": server.start, "load": server.load})
    finally:
        server.close()


if __name__ == "__main__":
    main()
