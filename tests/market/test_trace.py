"""Requests as data, and Mooncake's file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from blendkv.errors import InputError
from blendkv.market.base import Item, Use
from blendkv.market.costs import given
from blendkv.market.replay import Cache, KeepsAll, replay
from blendkv.market.trace import BLOCK, Block, Request, Trace, blocks, read_mooncake

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "mooncake_conversation.jsonl"


class Counter(KeepsAll):
    """Counts what it is told of."""

    hits = stored = 0

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        self.stored += 1

    def touched(self, key: str, use: Use, now: float) -> None:
        self.hits += 1


def line(timestamp: object = 0, length: object = 600, ids: object = (0, 1), output: object = 5) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids})


def test_blocks_are_cut_with_a_smaller_last_one() -> None:
    assert blocks("a", 1100) == (Block("a/0", 512), Block("a/1", 512), Block("a/2", 76))
    assert blocks("a", 512) == (Block("a/0", 512),)
    assert blocks("a", 0) == ()


def test_what_a_trace_knows_of_itself() -> None:
    first = Request(1.0, Use("chat", "s"), blocks("p", 600), fresh=7, output=3, made=blocks("m", 10))
    second = Request(3.5, Use("rag"), blocks("p", 600), (Block("c", 40),), fresh=2)
    trace = Trace("t", (first, second)).check()
    assert (len(trace), trace.span, trace.distinct_tokens) == (2, 2.5, 650)
    assert (first.tokens, second.tokens) == (607, 642)
    assert trace.uses() == [
        (1.0, "m/0"), (1.0, "p/1"), (1.0, "p/0"), (3.5, "c"), (3.5, "p/1"), (3.5, "p/0"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ((), "has no request"),
        ((Request(2.0, Use(), fresh=1), Request(1.0, Use(), fresh=1)), "arrives at 1.0 s, after one at 2.0 s"),
        ((Request(float("nan"), Use(), fresh=1),), "arrives at nan s"),
        ((Request(0.0, Use()),), "has no tokens"),
        ((Request(0.0, Use(), fresh=1, gap=-1.0),), "fewer than 0"),
        ((Request(0.0, Use(), blocks("a", 5)), Request(0.0, Use(), (Block("a/0", 6),))), "has 6 tokens, and 5"),
        ((Request(0.0, Use(), (Block("a", 0),), fresh=1),), "block a has 0 tokens"),
        ((Request(0.0, Use(), (), blocks("c", 5), made=blocks("m", 5)),), "has chunks and makes prefix blocks"),
    ],
)
def test_what_cannot_be_replayed_is_refused(requests: tuple[Request, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Trace("t", requests).check()


def test_mooncake_lines(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join([line(1500, 1024, [0, 2]), "", line(500, 600, [0, 1])]) + "\n")
    trace = read_mooncake(path)
    assert (trace.name, len(trace)) == ("some", 2)
    assert trace.requests[0] == Request(0.5, Use(), (Block("m0", 512), Block("m1", 88)), output=5)
    assert trace.requests[1].prefix == (Block("m0", 512), Block("m2", 512))
    assert trace.requests[0].use.workload == "unknown"
    assert len(read_mooncake(path, limit=1)) == 1


def test_requests_of_one_timestamp_keep_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(line(0, 512, [n]) for n in range(3)))
    found = [(r.arrival, r.prefix[0].key) for r in read_mooncake(path)]
    assert found == [(0.0, "m0"), (pytest.approx(1e-6), "m1"), (pytest.approx(2e-6), "m2")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 2: JSONDecodeError"),
        ("[]", "line 2: TypeError"),
        ('{"timestamp": 0}', "line 2: KeyError 'hash_ids'"),
        (line(length=100), "100 input tokens with 2 blocks"),
        (line(length="many"), "line 2: ValueError"),
        (line(output=-1), "-1 output tokens"),
        (line(timestamp="NaN"), "arrives at nan"),
    ],
)
def test_lines_that_are_no_requests_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(f"{line()}\n{text}\n")
    with pytest.raises(InputError, match=says):
        read_mooncake(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_mooncake(tmp_path / "absent.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_mooncake(tmp_path / "bytes")
    (tmp_path / "empty").write_text("")
    with pytest.raises(InputError, match="has no request"):
        read_mooncake(tmp_path / "empty")


@pytest.mark.skipif(not SHARED.is_file(), reason=f"Mooncake's conversation trace is not here: {SHARED.name}")
def test_the_shared_mooncake_trace_has_the_known_hit_rate() -> None:
    """36.6 % of the blocks are prefix hits in a cache that forgets nothing, which are 37.4 % of the tokens."""
    began = time.perf_counter()
    trace = read_mooncake(SHARED)
    costs, counter = given(), Counter()
    result = replay(trace, Cache(trace.distinct_tokens * costs.token_bytes, counter, costs))
    share = counter.hits / (counter.hits + counter.stored)
    print(f"{len(trace)} requests read and replayed in {time.perf_counter() - began:.1f} s: {share:.4f} of the blocks")
    assert len(trace) == 12_031
    assert share == pytest.approx(0.366, abs=0.005)
    assert result.all.hit_rate == pytest.approx(0.3736, abs=0.0005)
    full = sum(b.tokens == BLOCK for request in trace for b in request.prefix)
    assert full > 0.9 * sum(len(request.prefix) for request in trace)
