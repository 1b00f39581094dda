"""The loading planner in the embedded engine: what it decides is carried out, told, and learned from."""

from __future__ import annotations

import logging
import random
import time

import pytest
import torch
from rates import book_of
from tiny import random_ids, seed_of_run

from blendkv.blend import parse_mode
from blendkv.blend.loading import LoadingPlanner
from blendkv.blend.planned import TimedReader
from blendkv.blend.rates import READY
from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.engine import TorchEngine
from blendkv.engines.torch.warm_up import start_planner
from blendkv.errors import InputError
from blendkv.store import KVStore, LoadingReader
from blendkv.store.filereader import DiskReader
from blendkv.types import Prompt, Segment, as_token_ids, to_tensor

SYSTEM = as_token_ids(range(5, 14))
OPTIONS = GenerationOptions(max_new_tokens=4)
STRIDED = "blend:strided@0.1"


@pytest.fixture
def engine(llama_folder):
    return TorchEngine.load(str(llama_folder))


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


class Desk:
    """A prompt over a store whose chunks are on disk, for an engine."""

    def __init__(self, engine, folder, rng, sizes=(40, 60, 50), memory=0):
        chunks = [as_token_ids(random_ids(rng, n)) for n in sizes]
        with KVStore.open(folder, memory_bytes=0) as store:
            engine.library(store, "system", SYSTEM).precompute(chunks, None)
        kinds = [("system", SYSTEM), *(("chunk", c) for c in chunks), ("query", as_token_ids(random_ids(rng, 7)))]
        self.prompt = Prompt(tuple(Segment(kind, ids) for kind, ids in kinds))
        self.engine, self.folder = engine, folder
        self.store = KVStore.open(folder, memory_bytes=memory)
        self.library = engine.library(self.store, "system", SYSTEM)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.store.close()

    def ask(self, mode=STRIDED):
        generation = self.engine.generate(self.prompt, parse_mode(mode), self.library, OPTIONS)
        assert list(generation) is not None
        return generation.outcome, list(generation.tokens)


def test_without_a_planner_there_is_no_plan(engine, tmp_path, rng):
    with Desk(engine, tmp_path / "s", rng) as desk:
        outcome, _ = desk.ask()
    assert outcome.plan is None
    assert outcome.report.bytes_loaded > 0


def test_chunks_of_a_slow_disk_are_computed_and_the_answer_is_full_prefills(engine, tmp_path, rng):
    engine.planner = LoadingPlanner(book_of(rng, row=1e-6, read={"disk": 1.0}))
    with Desk(engine, tmp_path / "s", rng) as desk:
        outcome, tokens = desk.ask()
        _, expected = desk.ask("full")
        ids = to_tensor(desk.prompt.token_ids)
    assert outcome.plan.recompute == (0, 1, 2, 3)
    assert outcome.mode == STRIDED
    report = outcome.report
    assert (report.bytes_loaded, report.reusable_tokens, report.fresh_tokens) == (0, 0, len(ids))
    assert tokens == expected
    with torch.inference_mode():
        full = engine.model(input_ids=ids[None]).logits[0, -1]
    assert float((report.logits[-1] - full).abs().max()) < 1e-3


def test_a_mixed_plan_is_no_further_from_full_prefill_than_loading(engine, tmp_path, rng):
    """One chunk on disk is computed, those in memory are loaded; only the computed one is not read."""
    with Desk(engine, tmp_path / "s", rng, memory=1 << 30) as desk:
        for reader in [r for i, r in enumerate(desk.library.readers(desk.prompt)) if i in (0, 1, 3)]:  # into memory
            for layer in range(reader.layers):
                reader.layer(layer)
        engine.planner = LoadingPlanner(book_of(rng, row=1e-3, read={"disk": 1.0}))
        outcome, _ = desk.ask()
    assert outcome.plan.recompute == (2,)
    assert outcome.report.reusable_tokens == 90
    assert outcome.report.fresh_tokens == 60 + 7
    selected = set(outcome.report.selected.tolist())
    assert not selected & set(range(9 + 40, 9 + 40 + 60))


def test_a_raised_budget_is_spent(engine, tmp_path, rng):
    """Reading takes longer than the recompute at 10 %, and computing all would take longer still."""
    engine.planner = LoadingPlanner(book_of(rng, row=1e-2, read={"disk": 3e-6}))  # 1,024 bytes a token: 3 ms
    with Desk(engine, tmp_path / "s", rng) as desk:
        outcome, _ = desk.ask()
        exact, _ = desk.ask("blend:strided@0")
    plan, report = outcome.plan, outcome.report
    assert plan.recompute == ()
    assert plan.budget_asked == 0.1
    assert 0.1 < plan.budget <= engine.planner.max_budget
    assert report.budget_asked == plan.budget
    assert 0.1 < report.budget_spent <= plan.budget
    assert outcome.mode == STRIDED
    assert exact.plan.budget == 0.0


def test_slow_reads_are_learned(engine, tmp_path, rng, monkeypatch):
    """Every layer of a chunk takes 50 ms to read; to compute the whole prompt, a tiny model takes less."""
    read = DiskReader.layer

    def slowly(self, index):
        time.sleep(0.05)
        return read(self, index)

    monkeypatch.setattr(DiskReader, "layer", slowly)
    engine.planner = LoadingPlanner()
    with Desk(engine, tmp_path / "s", rng) as desk:
        first = [desk.ask()[0] for _ in range(READY)]
        assert all(o.plan.recompute == () and o.report.bytes_loaded > 0 for o in first)
        assert all(o.plan.predicted is None for o in first)
        learned, _ = desk.ask()
    assert set(learned.plan.recompute) >= {1, 2, 3}
    assert engine.planner.book.read["disk"].seconds((4, 50 * 1024)) > 0.15


def test_slow_computing_is_learned(engine, tmp_path, rng, monkeypatch):
    """Every row takes 10 ms: what is on disk is worth reading."""
    forward = type(engine.runner).forward

    def slowly(self, token_ids, *rest):
        time.sleep(0.01 * len(token_ids))
        return forward(self, token_ids, *rest)

    with Desk(engine, tmp_path / "s", rng) as desk:
        monkeypatch.setattr(type(engine.runner), "forward", slowly)
        engine.planner = LoadingPlanner()
        outcomes = [desk.ask()[0] for _ in range(READY + 1)]
    assert [o.plan.recompute for o in outcomes] == [()] * (READY + 1)
    assert outcomes[-1].plan.predicted["recompute"] > 0.1


def test_predictions_stand_beside_the_outcome(engine, tmp_path, rng, caplog):
    engine.planner = LoadingPlanner(book_of(rng, row=1e-2, score=1e-2, read={"disk": 1e-9}))
    with Desk(engine, tmp_path / "s", rng) as desk, caplog.at_level(logging.DEBUG, "blendkv.blend.planned"):
        outcome, _ = desk.ask("blend:head_query@0.1")
    predicted = outcome.plan.predicted
    assert predicted.keys() == {"load", "score", "rotate", "recompute", "total", "read"}
    parts = sum(predicted[stage] for stage in outcome.report.stages)
    assert predicted["total"] == pytest.approx(parts)
    assert predicted["score"] == pytest.approx(0.07, rel=0.05)  # 7 rows of the question
    (line,) = caplog.messages
    assert "predicted" in line
    assert "took" in line


@pytest.mark.parametrize("mode", ["blend:strided@0.1", "blend:head_query@0.1", "blend:kv_deviation@0.7"])
def test_the_work_that_is_observed_is_the_work_that_is_done(engine, tmp_path, rng, mode, monkeypatch):
    engine.planner = LoadingPlanner()
    seen = []
    monkeypatch.setattr(engine.planner.book, "observe", seen.append)
    with Desk(engine, tmp_path / "s", rng, memory=1 << 30) as desk:
        outcome, _ = desk.ask(mode)
        again, _ = desk.ask(mode)
    cold, warm = seen
    report = outcome.report
    assert cold.recompute.rows == report.fresh_tokens + report.recomputed_tokens
    rows = torch.cat((torch.arange(159, 166), report.selected))  # 9 + 40 + 60 + 50 tokens stand before the question
    assert cold.recompute.pairs == int((rows + 1).sum())
    calls, size, seconds = cold.reads["disk"]
    assert (calls, size) == (4 * len(engine.runner.layers), report.bytes_loaded)
    assert seconds > 0.0
    assert warm.reads == {}
    assert again.report.bytes_loaded == report.bytes_loaded
    if "strided" in mode:
        assert cold.selection is None
    elif "head_query" in mode:
        assert cold.selection[0] == "attention"
        assert cold.selection[1].rows == report.scored_rows == 7
        assert cold.passes == 2
    else:
        assert cold.selection[0] == "deviation"
        assert cold.selection[1].rows == 7 + 60 + 50


def test_damage_is_mended_under_a_planner(engine, tmp_path, rng):
    with Desk(engine, tmp_path / "s", rng) as desk:
        _, expected = desk.ask()
        path = next(p for p in (tmp_path / "s" / "kv").rglob("*.safetensors"))
        raw = bytearray(path.read_bytes())
        raw[-1000] ^= 1
        path.write_bytes(raw)
        engine.planner = LoadingPlanner()
        outcome, tokens = desk.ask()
    assert outcome.incidents == ("damaged chunk recomputed",)
    assert tokens == expected
    assert outcome.plan is not None


def test_a_conversation_under_a_planner(engine, tmp_path, rng):
    engine.planner = LoadingPlanner()
    with Desk(engine, tmp_path / "s", rng) as desk:
        talk = engine.conversation()
        first = engine.generate(desk.prompt, parse_mode(STRIDED), desk.library, OPTIONS, talk)
        list(first)
        more = [Segment("history", as_token_ids(first.tokens)), *desk.prompt.segments[2:]]
        longer = Prompt((*desk.prompt.segments, *more))
        second = engine.generate(longer, parse_mode(STRIDED), desk.library, OPTIONS, talk)
        list(second)
    assert second.outcome.plan is not None
    assert second.outcome.report.reusable_tokens == 110
    assert engine.planner.book.recompute.count == 2


def test_a_timed_reader_counts_reads_once(engine, tmp_path, rng):
    with Desk(engine, tmp_path / "s", rng, memory=1 << 30) as desk:
        ids = desk.prompt.segments[1].token_ids
        reader = TimedReader(desk.store.get(desk.library.key(ids), ids))
        assert isinstance(reader, LoadingReader)
        assert reader.tier == "disk"
        for _ in range(2):
            for layer in range(reader.layers):
                reader.readahead(layer)
                k, v = reader.layer(layer)
        assert k.shape == v.shape == (40, 2, 16)
    assert (reader.calls, reader.loaded) == (reader.layers, reader.nbytes)
    assert reader.bytes_read == reader.nbytes


def test_first_rates_are_measured(engine, tmp_path, monkeypatch):
    planner = start_planner(engine, tmp_path)
    assert planner is engine.planner is start_planner(engine, tmp_path)
    assert planner.book.ready
    assert planner.book.knows("disk")
    assert planner.book.selection["attention"].count > 0
    assert planner.book.hand.count > 0
    assert list(tmp_path.iterdir()) == []
    engine.planner = None
    with pytest.raises(InputError, match="cannot be measured: No such file or directory"):
        start_planner(engine, tmp_path / "none")
    assert engine.planner is None


def test_engines_without_a_planner(gpt2, tmp_path):
    with pytest.raises(InputError, match="works with the embedded engine"):
        start_planner(object(), tmp_path)
    try:
        assert start_planner(gpt2, tmp_path).book.recompute.count == 0
    finally:
        gpt2.planner = None


def test_a_short_context_is_measured_with_short_chunks(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "context", 100)
    assert start_planner(engine, tmp_path).book.ready
