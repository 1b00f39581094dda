"""Choose tokens under a budget."""

from __future__ import annotations

import torch


def topk_by_budget(scores: torch.Tensor, forced: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of ``count`` tokens: the forced ones first, the rest by score, ascending by index.

    Parameters
    ----------
    scores
        ``[tokens]`` float; ``-inf`` marks tokens that may not be chosen.
    forced
        ``[tokens]`` bool. When more than ``count`` are forced, the best-scored of them are kept.
    count
        At most the number of tokens whose score is finite or that are forced.

    Returns
    -------
    torch.Tensor
        ``[count]`` int64, sorted.
    """
    by_score = scores.argsort(descending=True, stable=True)
    by_right = by_score[forced[by_score].to(torch.int8).argsort(descending=True, stable=True)]
    return by_right[:count].sort().values
