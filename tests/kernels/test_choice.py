"""Top-n under a budget, and the deviation of KV."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from blendkv.kernels import kv_deviation, topk_by_budget


@given(st.data())
def test_topk_takes_forced_tokens_first_then_the_best(data):
    n = data.draw(st.integers(1, 40))
    scores = data.draw(st.lists(st.integers(-5, 5), min_size=n, max_size=n))
    forced = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    count = data.draw(st.integers(0, n))
    chosen = topk_by_budget(torch.tensor(scores, dtype=torch.float32), torch.tensor(forced), count).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count
    rank = [(forced[i], scores[i]) for i in range(n)]
    left = [rank[i] for i in range(n) if i not in chosen]
    assert not left or not chosen or min(rank[i] for i in chosen) >= max(left)


def test_deviation_by_hand():
    k_a, k_b = torch.zeros(2, 1, 2), torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])
    v_a, v_b = torch.zeros(2, 1, 2), torch.tensor([[[0.0, 0.0]], [[3.0, 0.0]]])
    assert kv_deviation(k_a, k_b, v_a, v_b).tolist() == [5.0, 9.0]
    assert kv_deviation(k_a, k_b, v_a, v_b, use_v=False).tolist() == [5.0, 0.0]
    assert kv_deviation(k_a, k_b, v_a, v_b, use_k=False).tolist() == [0.0, 9.0]
