"""What a model waits for its daemon: first tokens from disk beside memory, and what storing costs its prefill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from blendkv.blend import BlendSettings, parse_mode
from blendkv.daemon.arena import held_bytes
from blendkv.daemon.client import DaemonStore
from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import InputError, StoreError
from blendkv.eval.bench.daemon_process import DaemonProcess
from blendkv.eval.bench.rows import Rows
from blendkv.eval.bench.store_get import PATIENCE, WRONG, Copier, seconds_of
from blendkv.eval.bench.store_read import drop_cached
from blendkv.eval.bench.ttft import QUESTION, real_chunks
from blendkv.library import PASS_TOKENS, ChunkLibrary, batches
from blendkv.prompt import PromptBuilder
from blendkv.store.disk import chunk_path
from blendkv.store.tensors import encode_chunk
from blendkv.types import ChunkKV, Prompt, Recipe, TokenIds

_LONGEST_WAIT = 30.0  # seconds for the daemon to bring a prompt's chunks to memory
_QUIET = 0.1  # seconds of rest before every first token, so that what went before meets both sides alike


@dataclass(frozen=True)
class ModelSettings:
    """The prompt.

    Attributes
    ----------
    chunks, chunk_tokens
        Of the prompt; twice as many are computed for the cost of puts.
    rounds
        In which the sides take turns; medians are reported.
    modes
        Blends, such as ``blend:strided@0.03``.
    """

    chunks: int = 6
    chunk_tokens: int = 400
    rounds: int = 6
    modes: Sequence[str] = ("blend:head_query@0.05", "blend:strided@0.03")

    def __post_init__(self) -> None:
        for name in ("chunks", "chunk_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is allowed")
        if any(parse_mode(mode).settings is None for mode in self.modes):
            raise InputError("a mode is no blend; give blends, such as blend:strided@0.03")


class _Side:
    """One of two prompts of which the daemon's memory holds the chunks of one at a time."""

    def __init__(self, engine: TorchEngine, library: ChunkLibrary, chunks: Sequence[TokenIds], prompt: Prompt) -> None:
        self.engine = engine
        self.prompt = prompt
        self.library = library
        self.keys = [library.key(ids) for ids in chunks]
        library.readers(prompt)
        library.store.flush()

    def first_token(self, blend: BlendSettings) -> tuple[float, torch.Tensor]:
        """Seconds from the call to the first token, and the logits it was taken from."""
        engine = self.engine
        time.sleep(_QUIET)
        began = time.perf_counter()
        cache = engine.new_cache(len(self.prompt) + 1)
        with self.library.source(self.prompt) as source:
            report = engine.blend(self.prompt, source, cache, blend, logits_to_keep=1)
        options = GenerationOptions(max_new_tokens=1)
        decoder = engine.decoder(self.prompt.token_ids, cache, options, report.logits)
        for _ in decoder:
            pass
        assert decoder.first_token_at is not None
        assert report.logits is not None
        return decoder.first_token_at - began, report.logits.clone()

    def bring(self, store: DaemonStore) -> None:
        """Have the chunks in the daemon's memory, and so those of the other side out of it."""
        end = time.monotonic() + _LONGEST_WAIT
        while not all(store.in_memory(key) for key in self.keys):
            if time.monotonic() > end:
                raise StoreError("the daemon does not bring a prompt's chunks to memory")
            store.prefetch(self.keys)
            time.sleep(0.05)

    def why_not_cold(self, store: DaemonStore) -> str | None:
        """Drop the chunks' files from the page cache, and say why a read would still not come from the device."""
        if any(store.in_memory(key) for key in self.keys):
            return "chunks were in the daemon's memory"
        cached = sum(drop_cached(store.path / chunk_path(key)) for key in self.keys)
        return f"the page cache held {cached} bytes of the chunks" if cached else None


def measure_ttft(
    engine: TorchEngine, settings: ModelSettings, folder: Path, rows: Rows, tell: Callable[[str], None]
) -> None:
    """Rows of the time to first token with all chunks on disk, the page cache cold, and with all in memory."""
    root = folder / "store"
    builder = PromptBuilder(engine.tokenizer)
    found = real_chunks(engine.tokenizer, 2 * settings.chunks, settings.chunk_tokens, None)
    sets = found[: settings.chunks], found[settings.chunks :]
    memory = _room(engine, builder.prefix, sets[0])
    engine.check_room(sum(map(len, sets[0])) + len(builder.prefix) + settings.chunk_tokens, " with the question")
    with DaemonProcess(root, memory), DaemonStore(root, PATIENCE) as store:
        library = ChunkLibrary(engine, store, "system", builder.prefix)
        tell(f"{len(found)} chunks of {settings.chunk_tokens} tokens")
        sides = [_Side(engine, library, chunks, builder.first(chunks, QUESTION)) for chunks in sets]
        for mode in settings.modes:
            tell(f"time to first token of {mode}")
            blend = parse_mode(mode).settings
            assert blend is not None
            _one_mode(mode.removeprefix("blend:"), blend, sides, store, settings.rounds, rows)


def _room(engine: TorchEngine, prefix: TokenIds, chunks: Sequence[TokenIds]) -> int:
    """Bytes in which the prefix and the chunks of one side have room, and no chunk more."""
    start = engine.collect(Recipe("system", (), engine.dtype), [prefix], None)[0]
    one = engine.collect(Recipe("system", tuple(int(t) for t in prefix), engine.dtype), chunks[:1], start)[0]
    files = [held_bytes(len(encode_chunk(kv))) for kv in (start, one)]
    return files[0] + files[1] * len(chunks) + files[1] // 2


def _one_mode(
    name: str, blend: BlendSettings, sides: Sequence[_Side], store: DaemonStore, rounds: int, rows: Rows
) -> None:
    seconds: dict[str, list[float]] = {"disk": [], "memory": []}
    wrong = None
    for turn in range(rounds + 2):  # the first two warm up, one for each side
        side, other = sides[turn % 2], sides[1 - turn % 2]
        other.bring(store)
        wrong = wrong or side.why_not_cold(store)
        disk, logits = side.first_token(blend)
        side.bring(store)
        memory, same = side.first_token(blend)
        if not torch.equal(logits, same):
            wrong = "the logits from disk differ from those from memory"
        if turn >= 2:
            seconds["disk"].append(disk)
            seconds["memory"].append(memory)
    median = {tier: statistics.median(values) for tier, values in seconds.items()}
    ratio = median["disk"] / median["memory"]
    rows.add(f"ttft_memory, {name}", median["memory"] * 1e3, "ms", wrong=wrong)
    rows.add(f"ttft_disk, {name}", median["disk"] * 1e3, "ms", f"ttft_memory, {name}", ratio, wrong=wrong)
    rows.add(f"ttft_disk_over_memory, {name}", ratio, "1", f"ttft_memory, {name}", ratio, wrong=wrong)


def measure_put(
    engine: TorchEngine, settings: ModelSettings, folder: Path, rows: Rows, tell: Callable[[str], None]
) -> None:
    """Rows of the rate at which chunk KVs are computed, with and without putting them to the daemon meanwhile."""
    root = folder / "store"
    tell("computing chunk KVs with and without storing them")
    builder = PromptBuilder(engine.tokenizer)
    chunks = real_chunks(engine.tokenizer, 2 * settings.chunks, settings.chunk_tokens, None)
    plain, storing, drained = [], [], []
    wrong = None
    with DaemonProcess(root, 1 << 30), DaemonStore(root, PATIENCE) as store:
        library = ChunkLibrary(engine, store, "system", builder.prefix)
        prefix = engine.collect(library.start, [builder.prefix], None)[0]

        def compute(keep: Callable[[ChunkKV], None]) -> None:
            for batch in batches(chunks, PASS_TOKENS):
                for kv in engine.collect(library.recipe, batch, prefix):
                    keep(kv)

        truth: list[ChunkKV] = []
        compute(truth.append)  # warms up as well
        for _ in range(settings.rounds):
            plain.append(seconds_of(lambda: compute(lambda kv: None)))
            began = time.perf_counter()
            compute(store.put_async)
            storing.append(time.perf_counter() - began)
            store.flush()
            drained.append(time.perf_counter() - began)
            wrong = wrong or _check(store, truth)
            for kv in truth:
                store.remove(kv.key)
    tokens = sum(len(ids) for ids in chunks)
    base, name = statistics.median(plain), "collect"
    ratio = statistics.median(p / s for p, s in zip(plain, storing, strict=True))
    rows.add(name, tokens / base, "tokens/s")
    rows.add("collect_and_put", tokens / statistics.median(storing), "tokens/s", name, ratio, wrong=wrong)
    waited = statistics.median(d - s for d, s in zip(drained, storing, strict=True))
    rows.add("put_flush", waited * 1e3, "ms", wrong=wrong)
    rows.add("put_cost", 100 * (1 - ratio), "%", name, ratio, wrong=wrong)


def _check(store: DaemonStore, truth: Sequence[ChunkKV]) -> str | None:
    copier = Copier(truth[0])
    for kv in truth:
        reader = store.get(kv.key, kv.token_ids)
        if reader is None:
            return "a chunk that was put is gone"
        copier.copy(reader)
        if not copier.holds(kv):
            return WRONG
    return None
