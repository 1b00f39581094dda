"""A vLLM with the connector, the same model under transformers, and a prompt of a few chunks to ask about."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny import build, seed_of_run
from vllm_engine import engine
from worlds import World

from blendkv.blend import blend
from blendkv.engines.torch.runner import TorchRunner
from blendkv.library import ChunkLibrary
from blendkv.types import Prompt, Segment


def transfer(folder: Path, **extra: Any) -> dict[str, Any]:
    """``kv_transfer_config`` with a store in ``folder``; blends whatever can be blended, worth it or not."""
    return {
        "kv_connector": "BlendConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "blendkv.engines.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(folder / "store"), "min_saving": -1, **extra},
    }  # fmt: skip


def save(folder: Path, family: str = "llama") -> Path:
    """Write the model that `blending` starts; returns the folder."""
    build(family, head_dim=32, hidden_size=128).save_pretrained(folder)
    return folder


class Blending:
    """Ask it for answers of a few greedy tokens with their log-probabilities."""

    def __init__(self, llm: Any, runner: TorchRunner, world: World, folder: Path) -> None:
        self.llm, self.runner, self.world, self.folder = llm, runner, world, folder
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.worker = get_kv_transfer_group()
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
        self.last: list[Any] = []

    @property
    def ids(self) -> list[int]:
        """The prompt."""
        return self.world.prompt.token_ids.tolist()

    @property
    def store(self) -> Any:
        """The connector's store."""
        return self.worker.blender().store

    @property
    def library(self) -> ChunkLibrary:
        """The worker's library of the prompt's chunks."""
        return self.worker.blender().library("system", self.world.prompt.segments[0].token_ids)

    def request(
        self,
        mode: str | None = None,
        salt: str | None = None,
        segments: Any = "own",
        named: bool = True,
        ids: list[int] | None = None,
        tokens: int = 4,
        sampling: dict[str, Any] | None = None,
        **more: Any,
    ) -> tuple[dict[str, Any], Any]:
        """(prompt, sampling parameters). ``segments`` None: to be matched by content."""
        from vllm import SamplingParams

        wanted: dict[str, Any] = {"mode": mode, **more}
        if segments == "own":
            wanted["segments"] = [[s.kind, len(s.token_ids)] for s in self.world.prompt.segments]
        elif segments is not None:
            wanted["segments"] = segments
        extra = {"kv_transfer_params": {"blendkv": wanted}} if mode else None
        options = {"max_tokens": tokens, "temperature": 0.0, "logprobs": 1, "detokenize": False, "ignore_eos": True}
        params = SamplingParams(**{**options, **(sampling or {})}, extra_args=extra)
        prompt = {"prompt_token_ids": self.ids if ids is None else ids}
        if salt:
            prompt["cache_salt"] = f"{mode}|{salt}" if named else salt
        return prompt, params

    def ask(self, *requests: Any, **one: Any) -> Any:
        """(token ids, log-probability of each) of a request, or a list of them for several in one step."""
        pairs = requests or [self.request(**one)]
        self.last = self.llm.generate([p for p, _ in pairs], [s for _, s in pairs], use_tqdm=False)
        found = []
        for out in (o.outputs[0] for o in self.last):
            rows = zip(out.token_ids, out.logprobs, strict=True)
            found.append((list(out.token_ids), [row[token].logprob for token, row in rows]))
        return found if requests else found[0]

    @property
    def told(self) -> dict[str, Any] | None:
        """What the connector said of the last request."""
        params = self.last[0].kv_transfer_params
        return None if params is None else params["blendkv"]

    def embedded(self, settings: Any, prompt: Prompt | None = None, source: Any = None) -> tuple[int, float]:
        """(first token, its log-probability) of the same blend over transformers."""
        segments = (prompt or self.world.prompt).segments
        ids = self.ids if prompt is None else prompt.token_ids.tolist()
        cut = Prompt((*segments[:-1], Segment("query", segments[-1].token_ids[:-1])))  # vLLM runs the last token itself
        sink = self.world.sink()
        with torch.inference_mode():
            blend(self.runner, cut, source or self.world.source(), sink, settings)
            last = torch.tensor([[ids[-1]]])
            ranked = self.runner.model(input_ids=last, past_key_values=sink).logits[0, -1].log_softmax(-1)
        return int(ranked.argmax()), float(ranked.max())


@contextmanager
def blending(
    folder: Path,
    family: str = "llama",
    sizes: Sequence[int] | None = None,
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Blending]:
    """Start vLLM on a tiny model of ``family`` with the connector."""
    seed = seed_of_run()
    print(f"seed {seed}")
    model = build(family, head_dim=32, hidden_size=128)
    model.save_pretrained(folder)
    runner = TorchRunner(model)
    found = World.make(runner, random.Random(seed), sizes=sizes)
    while len(found.prompt.segments[-1].token_ids) < 2:
        found = World.make(runner, random.Random(seed := seed + 1), sizes=sizes)
    settings = {"kv_transfer_config": transfer(folder, **(extra or {})), "enable_prefix_caching": True, **options}
    with engine(folder, **settings) as llm:
        yield Blending(llm, runner, found, folder)


def close(one: Any, other: Any, tolerance: float = 1e-4) -> bool:
    """Whether two answers of `Blending.ask` agree."""
    return one[0] == other[0] and max(abs(a - b) for a, b in zip(one[1], other[1], strict=True)) < tolerance
