"""Tensor-parallel ranks: which heads each holds, and what they say to each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import build

from blendkv.engines.torch.runner import TorchRunner
from blendkv.engines.vllm.parallel import HeadShare, Ranks
from blendkv.errors import UnsupportedModelError
from blendkv.types import ChunkKV, Recipe, as_token_ids


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [
        (8, 1, [range(8)]),
        (8, 2, [range(4), range(4, 8)]),
        (6, 3, [range(2), range(2, 4), range(4, 6)]),
        (4, 4, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 3, [range(1)] * 3),
    ],
)
def test_heads_are_dealt_out_in_a_row(total, size, expected):
    shares = [HeadShare(total, rank, size) for rank in range(size)]
    assert [list(range(total)[share.local]) for share in shares] == [list(heads) for heads in expected]
    covered = [head for share in shares[:: shares[0].replicas] for head in range(total)[share.local]]
    assert covered == list(range(total))


def test_layers_that_hold_another_number_of_heads_are_refused():
    layers = TorchRunner(build("llama")).layers  # two KV heads in each layer
    HeadShare(4, 1, 2).check(layers)
    HeadShare(7, 0, 1).check(layers)
    odd = (*layers[:2], replace(layers[2], kv_heads=1), layers[3])
    with pytest.raises(UnsupportedModelError, match=r"layer 2 has 1 KV heads on rank 1 of 2, where 4 in all give 2"):
        HeadShare(4, 1, 2).check(odd)


def test_one_rank_exchanges_nothing():
    ranks = Ranks(HeadShare(2))
    tensor = torch.ones(2)
    kv = ChunkKV(
        "tiny", Recipe("bos", (), "float32"), as_token_ids([3]), (torch.ones(1, 2, 4),), (torch.ones(1, 2, 4),)
    )
    assert ranks.reduce(tensor, "max") is tensor
    assert ranks.agree([True, False]) == [True, False]
    assert ranks.decide(lambda: 7) == 7
    assert ranks.local(kv) is kv
    assert ranks.gather(kv) is kv
    with pytest.raises(ValueError, match="as it is"), ranks.together():
        raise ValueError("as it is")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What two ranks in processes of their own printed, and how they ended."""
    file = tmp_path_factory.mktemp("ranks") / "meeting"
    script = str(Path(__file__).with_name("ranks_process.py"))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([sys.executable, script, str(rank), str(file)], stdout=subprocess.PIPE, text=True, env=env)
        for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=120)[0].splitlines() for child in children]
    finally:
        for child in children:
            child.kill()
    return (
        [json.loads(lines[0]) for lines in outputs],
        [lines[1:] for lines in outputs],
        [c.returncode for c in children],
    )


def test_statistics_are_joined(said):
    for found in said[0]:
        assert found["max"] == [7.0, 5.0]
        assert found["mean"] == [4.0, 3.5]
    assert [found["untouched"] for found in said[0]] == [[1.0, 5.0], [7.0, 2.0]]


def test_ranks_agree_and_rank_0_decides(said):
    for found in said[0]:
        assert found["agree"] == [True, False, False, False]
        assert found["decide"][0] == ["as", 0, "says"]
        assert found["decide"][1].endswith("away")


def test_a_fault_on_one_rank_is_one_on_both(said):
    zero, one = said[0]
    assert zero["fine"] is None
    assert one["fine"] is None
    assert one["store"] == ["StoreError", "a disk"]
    assert zero["store"] == ["StoreError", "rank 1 failed, so all ranks give up: StoreError: a disk"]
    assert zero["unsupported"] == ["UnsupportedModelError", "a layer"]
    assert one["unsupported"][0] == "UnsupportedModelError"
    assert zero["other"] == ["ValueError", "a value"]
    assert one["other"] == ["PeerFaultError", "rank 0 failed, so all ranks give up: ValueError: a value"]
    assert zero["both"] == one["both"] == ["ValueError", "a value"]
    assert zero["afterwards"] is None
    assert one["afterwards"] is None


def test_chunk_kv_is_put_together_on_rank_0(said):
    zero, one = said[0]
    assert zero["gather"] == [[2, True], [1, True], [1, True]]
    assert one["gather"] == [[2, None], [1, None], [1, None]]


def test_a_rank_that_is_left_alone_ends(said):
    """It does not go on: what the ranks exchange next would not belong together."""
    assert said[1] == [[], []]
    assert said[2] == [0, 1]
