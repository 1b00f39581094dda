"""One of two tensor-parallel ranks without a model: exchanges what `blendkv.engines.vllm.parallel.Ranks` exchanges.

``ranks_process.py RANK FILE``: both ranks name the same FILE. Prints what came of it as one JSON object, then waits for
the other one in vain.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from blendkv.engines.vllm.parallel import HeadShare, Ranks
from blendkv.errors import StoreError, UnsupportedModelError
from blendkv.types import ChunkKV, Recipe, as_token_ids


def chunk(heads):
    """A chunk KV with all heads, equal on both ranks; K and V differ in size."""
    noise = torch.Generator().manual_seed(heads)
    k = tuple(torch.randn(5, heads, 8, generator=noise).to(torch.bfloat16) for _ in range(3))
    v = tuple(torch.randn(5, heads, 4, generator=noise).to(torch.bfloat16) for _ in range(3))
    return ChunkKV("tiny", Recipe("bos", (), "bfloat16"), as_token_ids(range(5)), k, v)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip((*one.k, *one.v), (*other.k, *other.v), strict=True))


def outcome(ranks, failing=None, error=None):
    """Name and text of what a common block raises when the ranks ``failing`` raise ``error`` in it."""
    try:
        with ranks.together():
            if failing is not None and ranks.rank in failing:
                raise error
    except Exception as raised:
        return [type(raised).__name__, str(raised)]
    return None


def decided(ranks):
    def make():
        if ranks.rank != 0:
            raise AssertionError("only rank 0 decides")
        return ["as", ranks.rank, "says"]

    def fail():
        raise StoreError("away")

    try:
        ranks.decide(fail)
    except StoreError as error:
        return [ranks.decide(make), str(error)]
    return None


def gathered(rank, heads):
    ranks = Ranks(HeadShare(heads, rank, 2), dist.group.WORLD, dist.group.WORLD)
    whole = chunk(heads)
    mine = ranks.local(whole)
    found = ranks.gather(mine)
    return [mine.k[0].shape[1], None if found is None else same(found, whole) and found.key == whole.key]


def main(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    ranks = Ranks(HeadShare(4, rank, 2), dist.group.WORLD, dist.group.WORLD)
    values = torch.tensor([[1.0, 5.0], [7.0, 2.0]])[rank]
    found = {
        "max": ranks.reduce(values, "max").tolist(),
        "mean": ranks.reduce(values, "mean").tolist(),
        "untouched": values.tolist(),
        "agree": ranks.agree([True, rank == 0, rank == 1, False]),
        "decide": decided(ranks),
        "fine": outcome(ranks),
        "store": outcome(ranks, {1}, StoreError("a disk")),
        "unsupported": outcome(ranks, {0}, UnsupportedModelError("a layer")),
        "other": outcome(ranks, {0}, ValueError("a value")),
        "both": outcome(ranks, {0, 1}, ValueError("a value")),
        "afterwards": outcome(ranks),
        "gather": [gathered(rank, heads) for heads in (4, 2, 1)],
    }
    print(json.dumps(found), flush=True)
    if rank == 1:
        ranks.agree([True], timedelta(seconds=0.5))
        print("rank 1 went on alone", flush=True)
    time.sleep(2)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
