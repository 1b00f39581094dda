"""The choice of a codec on the real small model: 2 bits are refused, and the margin is above bfloat16's own noise."""

from __future__ import annotations

import pytest
from tiny_hub import TOPICS

from blendkv.blend.gate import Target
from blendkv.eval.calibrate import LEAST_ITEMS
from blendkv.eval.codec_choice import MARGIN, choose_codec, codec_sizes
from blendkv.eval.items import EvalItem
from blendkv.eval.subject_torch import TorchSubject
from blendkv.store.tiered import KVStore

pytestmark = pytest.mark.xdist_group("real")


def test_two_bits_are_refused(engine):
    plain = [text for text in TOPICS.values() if text.isascii()]
    items = [
        EvalItem(str(n), "What is a function?", ("function",), (plain[n % 4], plain[(n + 1) % 4]), max_new_tokens=2)
        for n in range(LEAST_ITEMS)
    ]
    sizes = {name: size for name, size in codec_sizes(engine.runner).items() if name in ("int8", "turbo2")}
    assert sizes == {"int8": pytest.approx(0.53125), "turbo2": pytest.approx(0.15625)}
    subject = TorchSubject(engine, KVStore.open(None, memory_bytes=1 << 30))
    # The gate's own target is left aside: so few items show nothing about it.
    choice, verdicts = choose_codec(
        subject.stored_as, sizes, items, target=Target(10.0, 1.0), candidates=["blend:head_query@0.1"]
    )
    subject.close()
    print(choice)
    int8, turbo2 = choice.rows
    assert not turbo2.passed
    assert choice.codec in ("raw", "int8")
    assert choice.codec == verdicts[-1].codec
    assert abs(int8.excess) < turbo2.excess
    assert 0 < choice.rounding < MARGIN
